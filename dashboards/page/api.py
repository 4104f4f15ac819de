"""The server's routes: the JSON of docs/api.md, incident pages, and the page itself."""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from seismograd.dashboards.page import band, queries, story
from seismograd.dashboards.page.columns import ColumnCache, Columns
from seismograd.dashboards.page.live import Cursor, Stream, event_json, plain_json
from seismograd.dashboards.page.queries import QueryError, Selector, Window
from seismograd.dashboards.page.runs import NoSuchRun, RunsFolder, summary_json
from seismograd.dashboards.page.safety import INCIDENT_POLICY, Access, Guard
from seismograd.telemetry.baselines import Envelope
from seismograd.telemetry.catalogue import CATALOGUE
from seismograd.telemetry.rules import RULES
from seismograd.telemetry.store import RunStore, StoreError

STATIC = Path(__file__).resolve().parent / "static"
API = "/api/v1"
DAMAGED = (sqlite3.Error, ValueError, TypeError, LookupError, ArithmeticError, RecursionError)
"""What a file raises that is no store of ours."""

log = logging.getLogger("seismograd")
_MOST_POINTS = 5000
_LARGE = 1000  # bytes, from which an answer is compressed: pages are read through slow tunnels too


def application(runs: RunsFolder, access: Access, stopped: Callable[[], bool] = lambda: False) -> Starlette:
    """The whole server as an ASGI application.

    Args:
        runs: what it shows.
        access: who may ask.
        stopped: whether the server is stopping, so that streams end.
    """
    api = _Api(runs, stopped)
    routes = [
        Route(f"{API}/runs", api.runs),
        Route(f"{API}/runs/{{run}}", api.run),
        Route(f"{API}/runs/{{run}}/series", api.series),
        Route(f"{API}/runs/{{run}}/baseline", api.baseline),
        Route(f"{API}/runs/{{run}}/events", api.events),
        Route(f"{API}/runs/{{run}}/live", api.live),
        Route(f"{API}/runs/{{run}}/incidents/{{incident}}", api.incident),
        Route(f"{API}/metrics", api.metrics),
        Route("/runs/{run}/incidents/{incident}.html", api.incident_page),
        Route("/", _shell),
        Route("/runs/{run}", api.run_page),
        Route("/compare", _shell),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    return Starlette(
        routes=routes,
        middleware=[Middleware(Guard, access=access), Middleware(GZipMiddleware, minimum_size=_LARGE, compresslevel=1)],
        exception_handlers={
            HTTPException: _http_error,
            NoSuchRun: _missing,
            StoreError: _missing,
            QueryError: _bad,
            **dict.fromkeys(DAMAGED, _damaged),
        },
    )


class _Api:
    """The endpoints. Those that read stores are plain functions, run in Starlette's threads."""

    def __init__(self, runs: RunsFolder, stopped: Callable[[], bool]) -> None:
        self._runs, self._stopped = runs, stopped
        self._cache = ColumnCache()

    def runs(self, _: Request) -> Response:
        found = [summary_json(summary) for summary in self._runs.summaries()]
        return _json({"folder": str(self._runs.path), "single": self._runs.single, "runs": found})

    def run(self, request: Request) -> Response:
        name = request.path_params["run"]
        # Not from the decoded columns: the headline is there before a long run has been read.
        with RunStore.read(self._runs.store(name)) as store:
            row, meta, steps = store.last_row(), store.meta(), store.step_range()
            numbered, series = store.numbered_events(), store.known_series()
            sentences = story.story([event for _, event in numbered], store)
        summary = self._runs.summary(name)
        return _json(
            {
                "summary": summary_json(summary),
                "headline": story.headline(sentences, summary.step),
                "findings": [story.sentence_json(sentence) for sentence in sentences],
                "incidents": self._runs.incidents(name),
                "config": plain_json(meta.get("config", {})),
                "first_step": steps and steps[0],
                "last_step": steps and steps[1],
                "cursor": str(Cursor(row, numbered[-1][0] if numbered else 0)),
                "series": [queries.named(s) for s in queries.catalogued(series)],
            }
        )

    def series(self, request: Request) -> Response:
        columns = self._columns(request)
        return _json(queries.series(columns, _selectors(request), _window(request)))

    def baseline(self, request: Request) -> Response:
        """The envelope of the global gradient norm on the buckets of /series."""
        columns = self._columns(request)
        rule = next(rule for rule in RULES if rule.signal == "grad_norm")
        assert isinstance(rule.baseline, Envelope)
        steps, values = columns.values(("grad_norm", "all", "all"))
        first, last, width = queries.grid(columns.all_rows(), _window(request))
        levels, thresholds = band.envelope(values, rule.baseline)
        return _json(band.on_grid(steps, levels, thresholds, first, last, width))

    def events(self, request: Request) -> Response:
        store_path = self._runs.store(request.path_params["run"])
        after = _whole(request, "after", 0)
        with RunStore.read(store_path) as store:
            numbered = store.numbered_events(0 if after is None else after, request.query_params.get("kind"))
        return _json({"events": [event_json(number, event) for number, event in numbered]})

    async def live(self, request: Request) -> Response:
        given = request.headers.get("last-event-id") or request.query_params.get("cursor", "0-0")
        try:
            cursor = Cursor.read(given)
        except ValueError as e:
            raise QueryError("cursor: needs ROW-EVENT, as /runs/NAME gives it") from e
        stream = Stream(self._runs, self._cache, request.path_params["run"], _selectors(request), cursor)
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(stream.events(self._stopped), media_type="text/event-stream", headers=headers)

    def incident(self, request: Request) -> Response:
        file = self._runs.incident_file(request.path_params["run"], request.path_params["incident"], ".json")
        return FileResponse(file, media_type="application/json")

    def incident_page(self, request: Request) -> Response:
        file = self._runs.incident_file(request.path_params["run"], request.path_params["incident"], ".html")
        return FileResponse(file, media_type="text/html", headers={"Content-Security-Policy": INCIDENT_POLICY})

    def run_page(self, request: Request) -> Response:
        """The page of a run. Its values are read while the browser loads the page's scripts."""
        return FileResponse(STATIC / "index.html", background=BackgroundTask(self._warm, request.path_params["run"]))

    def _warm(self, name: str) -> None:
        with suppress(NoSuchRun, StoreError, OSError):  # told by the requests that follow
            self._cache.get(self._runs.store(name))

    def metrics(self, _: Request) -> Response:
        specs = [
            {
                "name": s.name,
                "unit": s.unit,
                "help": s.help,
                "source": s.source,
                "labels": list(s.labels),
                "kind": s.kind,
            }
            for s in CATALOGUE.values()
        ]
        rules = [
            {
                "signal": r.signal,
                "metric": r.selection.metric,
                "severity": r.severity,
                "summary": r.summary,
                "advice": r.advice,
            }
            for r in RULES
        ]
        return _json({"metrics": specs, "rules": rules})

    def _columns(self, request: Request) -> Columns:
        return self._cache.get(self._runs.store(request.path_params["run"]))


def _selectors(request: Request) -> list[Selector]:
    chosen = request.query_params.getlist("select")
    if not chosen:
        raise QueryError('select: name at least one series, as in select=kl or select=["grad_norm","all","all"]')
    return [queries.selector(text) for text in chosen]


def _window(request: Request) -> Window:
    points = _whole(request, "points", 600)
    if points is None or not 0 <= points <= _MOST_POINTS:
        raise QueryError(f"points: needs a whole number from 0 (every step) to {_MOST_POINTS}")
    ends = {key: _whole(request, key, None) for key in ("from", "to")}
    for key, step in ends.items():
        if step is not None and step < 0:
            raise QueryError(f"{key}: steps count from 0, got {step}")
    return Window(ends["from"], ends["to"], points)


def _whole(request: Request, key: str, default: int | None) -> int | None:
    text = request.query_params.get(key)
    if text is None:
        return default
    try:
        number = int(text)
    except ValueError as e:
        raise QueryError(f"{key}: needs a whole number, got {text!r}") from e
    if abs(number) > 2**53:
        raise QueryError(f"{key}: too large")
    return number


def _shell(_: Request) -> Response:
    return FileResponse(STATIC / "index.html")


def _json(data: Any, status: int = 200) -> Response:
    text = json.dumps({"version": 1} | data, allow_nan=False, separators=(",", ":"))
    return Response(text, status, media_type="application/json", headers={"Cache-Control": "no-store"})


def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _json({"error": error.detail}, error.status_code)


def _missing(_: Request, error: Exception) -> Response:
    return _json({"error": str(error)}, 404)


def _damaged(request: Request, error: Exception) -> Response:
    """Reading it has failed in a way that no store of ours leads to."""
    log.warning("seismograd: %s cannot be answered", request.url.path, exc_info=error)
    run = request.path_params.get("run")
    what = "this" if run is None else f"run {run!r}"
    return _json({"error": f"{what} cannot be read, its store is damaged ({type(error).__name__}: {error})"}, 500)


def _bad(_: Request, error: Exception) -> Response:
    return _json({"error": str(error)}, 400)
