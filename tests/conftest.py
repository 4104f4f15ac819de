"""What tests share. Run them by `make test`."""

from __future__ import annotations

import os
import shutil
import socket

import pytest

# Models of this size are faster on one thread, by far where another process wants the same cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "offline")


def require(program: str, package: str = "prometheus") -> str:
    """The path of a program that a test needs.

    Where it is missing the test is skipped with the reason, and fails instead where SEISMOGRAD_NO_SKIPS=1.
    """
    path = shutil.which(program)
    if path is None:
        reason = f"{program} is not installed (Debian: apt-get install {package})"
        if os.environ.get("SEISMOGRAD_NO_SKIPS") == "1":
            pytest.fail(f"{reason}, and skips are forbidden here")
        pytest.skip(reason)
    return path


@pytest.fixture
def free_port() -> int:
    """A loopback port that nothing listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Where skips are forbidden, a skip of any kind is a failure."""
    if (
        os.environ.get("SEISMOGRAD_NO_SKIPS") == "1"
        and call.excinfo
        and call.excinfo.errisinstance(pytest.skip.Exception)
    ):
        call.excinfo = pytest.ExceptionInfo.from_exception(AssertionError(f"skipped: {call.excinfo.value}"))
