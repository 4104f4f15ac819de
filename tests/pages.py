"""Run stores for the page's tests, written as a run writes them, and a server for them."""

from __future__ import annotations

import http.client
import json
import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import numpy as np

from seismograd import Event, Reading, Row, RunInfo, RunStore
from seismograd.dashboards.page.server import Access, PageServer

HOSTILE = '<img src=x onerror="window.hacked=1">\u202e\'"&<script>window.hacked=1</script>'
LAYERS = ("embedding", "0", "1", "norm")


def readings(step: int, norm: float | None = None) -> tuple[Reading, ...]:
    """One of each kind that the page draws; the same for the same step."""
    random = np.random.default_rng(step)
    cells = random.dirichlet((1, 1, 2, 30))
    fixed = [
        Reading("alpha_abs_mean", float(random.uniform(0.01, 0.05))),
        Reading("beta_abs_mean", float(random.uniform(0.01, 0.03))),
        Reading("snr", float(random.uniform(0.5, 3))),
        Reading("kl", float(random.uniform(1e-4, 1e-2)), {"estimator": "k3"}),
        *(
            Reading("clip_fraction", float(share), {"cell": cell, "ratio": "ppo"})
            for cell, share in zip(("legitimate", "phantom", "hidden", "open"), cells, strict=True)
        ),
        *(Reading("log_ratio", float(random.normal()), {"stat": stat}) for stat in ("mean", "min", "max")),
        Reading("overhead_ratio", 0.01),
        Reading("step_seconds", 1.5),
    ]
    norms = [
        Reading("grad_norm", float(random.uniform(0.5, 1.5)), {"layer": layer, "group": group})
        for layer in LAYERS
        for group in ("all", "mlp")
    ]
    whole = float(random.uniform(1, 2)) if norm is None else norm
    return (*fixed, Reading("grad_norm", whole, {"layer": "all", "group": "all"}), *norms)


def logged(step: int, names: Iterable[str] = ("reward", "loss", "entropy")) -> tuple[Reading, ...]:
    """What a trainer logs after a step."""
    return tuple(Reading("trainer_metric", math.sin(step / 7) + i, {"name": name}) for i, name in enumerate(names))


class Writer:
    """A run that is written step by step.

    Args:
        runs: the folder of runs.
        name: of the run.
        ago: seconds since its last step.
    """

    def __init__(self, runs: Path, name: str, ago: float = 0.0) -> None:
        self.folder = runs / name
        self.folder.mkdir(parents=True)
        self.start = time.time() - ago
        self.store = RunStore.create(
            self.folder / "run.db", RunInfo(name, str(self.folder), {"budget": 0.01}, started=self.start - 60)
        )

    def step(self, step: int, norm: float | None = None, extra: tuple[Reading, ...] = ()) -> None:
        when = self.start + step * 1e-3
        self.store.write(Row(step, when, (*readings(step, norm), *extra)))
        self.store.write(Row(step, when, logged(step)))

    def steps(self, n: int, norms: Mapping[int, float] | None = None) -> Writer:
        for step in range(1, n + 1):
            self.step(step, (norms or {}).get(step))
        return self

    def event(self, kind: str, step: int, message: str = "", **data: Any) -> None:
        self.store.event(Event(kind, message or kind, step, self.start, data))

    def spike(self, step: int, signal: str = "grad_norm", **data: Any) -> None:
        key = 'grad_norm{layer="all",group="all"}'
        fields = {"signal": signal, "key": key, "value": 38.0, "baseline": 1.0, "threshold": 3.0, "score": 38.0}
        self.event("spike", step, f"step {step}: {signal}", **{**fields, "severity": "critical", **data})

    def incident(self, step: int, page: str = "<!DOCTYPE html><p>incident</p>", **data: Any) -> None:
        folder = self.folder / "incidents"
        folder.mkdir(exist_ok=True)
        name = f"step-{step:06d}"
        (folder / f"{name}.json").write_text(json.dumps({"step": step, **data}))
        (folder / f"{name}.html").write_text(page)
        fields = {"verdict": "A.1", "evidence": ["log r = 9"], "advice": "Cap the ratio.", "culprits": [{"text": "x"}]}
        self.event("incident", step, f"step {step}: A.1", path=str(folder / f"{name}.json"), **{**fields, **data})

    def finish(self) -> None:
        self.event("run_end", -1)
        self.store.close()


def serve(runs: Path, port: int = 0, host: str = "127.0.0.1", token: str | None = None) -> PageServer:
    """A server on a thread of its own; use it in a ``with``."""
    return PageServer(runs, Access(host, token), port)


class Client:
    """Requests to a server, with any header."""

    def __init__(self, server: PageServer) -> None:
        self.port = server.port

    def ask(
        self, path: str, headers: Mapping[str, str] | None = None, method: str = "GET"
    ) -> tuple[int, dict[str, str], bytes]:
        """(status, headers in lower case, body)."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.putrequest(method, path, skip_host=True)
        for key, value in {"Host": f"127.0.0.1:{self.port}", **(headers or {})}.items():
            connection.putheader(key, value)
        connection.endheaders()
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, body

    def get(self, path: str, *parameters: tuple[str, object]) -> Any:
        """The JSON of an endpoint that answers 200."""
        status, _, body = self.ask(f"/api/v1{path}?{urlencode(parameters)}")
        assert status == 200, (path, status, body)
        return json.loads(body)

    def run(self, name: str, rest: str = "", *parameters: tuple[str, object]) -> Any:
        return self.get(f"/runs/{quote(name, safe='')}{rest}", *parameters)

    def stream(self, path: str, wanted: int, headers: Mapping[str, str] | None = None) -> list[tuple[str, str, Any]]:
        """(id, event, data) of the first events of a stream."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request("GET", f"/api/v1{path}", headers=dict(headers or {}))
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        found: list[tuple[str, str, Any]] = []
        fields: dict[str, str] = {}
        while len(found) < wanted:
            line = answer.readline().decode().rstrip("\n")
            if line:
                key, _, value = line.partition(": ")
                fields[key] = value
            else:
                if "event" in fields:
                    found.append((fields["id"], fields["event"], json.loads(fields["data"])))
                fields = {}
        connection.close()
        return found
