"""Prometheus: /metrics over the last known value of every series, on a registry of its own.

The lane's thread swaps in a new snapshot a row; a scrape, on the server's thread, reads the snapshot that it finds. The
training thread has no part in either.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable
from contextlib import suppress
from threading import Thread
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from seismograd.telemetry.catalogue import CATALOGUE
from seismograd.telemetry.records import Event, Row, RunInfo

Snapshot = dict[str, dict[tuple[str, ...], float]]


class PrometheusSink:
    """Serves the last values. The port is bound at construction, so that a clash shows at once.

    Args:
        port: 0 takes a free one, see `url`.
        address: of the interface; loopback unless told otherwise.

    Raises:
        OSError: the port cannot be bound; the message names the setting and the fix.
    """

    name = "prometheus"

    def __init__(self, port: int, address: str = "127.0.0.1") -> None:
        self._snapshot = _SnapshotCollector()
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self._snapshot)
        try:
            self._server, self._thread = _serve(port, address, registry)
        except OSError as e:
            reason = (
                "the port is in use, by another program or by an earlier run that has not been closed (run.close())"
                if e.errno == errno.EADDRINUSE
                else (e.strerror or str(e))
            )
            raise OSError(
                e.errno,
                f"cannot serve /metrics on {address}:{port}: {reason}; set prometheus= or SEISMOGRAD_PROMETHEUS "
                "to a free port, or to 0 for any",
            ) from e
        self.port = int(self._server.server_address[1])
        host = f"[{address}]" if ":" in address else address
        self.url = f"http://{host}:{self.port}/metrics"

    def open(self, run: RunInfo) -> None:
        self._snapshot.run = run.name

    def write(self, row: Row) -> None:
        self._snapshot.merge(row)

    def event(self, event: Event) -> None:
        """Events show in their counters."""

    def close(self) -> None:
        self._server.shutdown()
        with suppress(OSError):  # a forked child that lives on would hold the port
            self._server.socket.shutdown(socket.SHUT_RDWR)
        self._server.server_close()
        self._thread.join()


def _serve(port: int, address: str, registry: CollectorRegistry) -> tuple[WSGIServer, Thread]:
    server, thread = start_http_server(port, addr=address, registry=registry)
    return server, thread


class _SnapshotCollector(Collector):
    """The last value of each series, as metric families described by the catalogue."""

    def __init__(self) -> None:
        self.run = ""
        self._last: Snapshot = {}

    def merge(self, row: Row) -> None:
        merged = {name: dict(series) for name, series in self._last.items()}
        for reading in row.readings:
            merged.setdefault(reading.name, {})[tuple(reading.labels.values())] = reading.value
        self._last = merged  # one assignment: a scrape sees the old snapshot or the new one

    def collect(self) -> Iterable[Metric]:
        last = self._last
        for name, spec in CATALOGUE.items():
            series = last.get(name)
            if not series:
                continue
            family = (CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily)(
                spec.prometheus_name, spec.help, labels=("run", *spec.labels)
            )
            for labels, value in series.items():
                family.add_metric((self.run, *labels), value)
            yield family
