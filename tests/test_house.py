"""The house: what importing pulls in, who may import whom, and the public names."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import seismograd

TOP = Path(__file__).parent.parent
ROOMS = ("telemetry", "collectors", "gradloc", "controls", "dashboards")
MAY_IMPORT = {
    "telemetry": {"telemetry"},
    "controls": {"controls", "telemetry"},
    "collectors": {"collectors", "telemetry", "controls"},
    "gradloc": {"gradloc", "telemetry", "controls"},
    "dashboards": {"dashboards", "telemetry"},
}


def modules_after(statement: str, cwd: Path) -> set[str]:
    """What a clean interpreter has loaded after a statement."""
    code = f"{statement}; import sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=True, timeout=120
    )
    return set(done.stdout.split())


@pytest.fixture(scope="module")
def loaded() -> set[str]:
    return modules_after("import seismograd, seismograd.cli", TOP)


@pytest.mark.parametrize(
    "heavy",
    [
        "transformers",
        "trl",
        "wandb",
        "accelerate",
        "datasets",
        "rich",
        "gguf",
        "grafana_foundation_sdk",
        "starlette",
        "uvicorn",
    ],
)
def test_import_is_slim(loaded: set[str], heavy: str) -> None:
    assert heavy not in loaded


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_are_never_loaded_by_their_plain_names(loaded: set[str], room: str) -> None:
    assert room not in loaded


def sources() -> list[tuple[str, Path]]:
    return [(room, path) for room in ROOMS if (TOP / room).is_dir() for path in sorted((TOP / room).rglob("*.py"))]


@pytest.mark.parametrize(
    ("room", "path"), sources(), ids=lambda x: str(x.relative_to(TOP)) if isinstance(x, Path) else ""
)
def test_who_imports_whom(room: str, path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [node.module or ""]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            parts = name.split(".")
            assert parts[0] not in ROOMS, f"{path} imports {name} by the plain name; use seismograd.{name}"
            if parts[0] == "seismograd":
                assert len(parts) > 1, f"{path} imports the package itself"
                assert parts[1] in MAY_IMPORT[room], f"{path}: {room} may not import {name}"


def test_rooms_are_committed_symbolic_links() -> None:
    for room in ROOMS:
        if (TOP / room).is_dir():
            assert (TOP / "seismograd" / room).is_symlink(), "a checkout needs symbolic links"
            assert (TOP / "seismograd" / room).readlink() == Path("..") / room


def test_public_names() -> None:
    assert seismograd.__all__ == sorted(seismograd.__all__, key=lambda n: (n.lower() != n and n[0].islower(), n))
    assert set(seismograd.__all__) == {
        "CATALOGUE", "ClipSpec", "Config", "ConfigError", "Event", "MetricSpec", "Reading", "Row", "Run", "RunInfo",
        "RunStore", "Sink", "Spike", "StoreError", "TokenBatch", "UnsupportedTrainer", "__version__", "watch",
    }  # fmt: skip
    for name in seismograd.__all__:
        assert hasattr(seismograd, name)
    assert (Path(seismograd.__file__).parent / "py.typed").is_file()
