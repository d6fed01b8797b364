"""/_edda/metrics, in the text format of Prometheus."""

from __future__ import annotations

import asyncio
import platform
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from datetime import datetime

from edda.control.views import StatsView
from edda.version import __version__

from .responses import Response

MEDIA = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
CACHE_SECONDS = 5.0
"""Statistics are read from the database at most once in that time, for any number of scrapers."""

Sample = tuple[dict[str, str], float]


class Metrics:
    def __init__(self) -> None:
        self._started_at = time.time()
        self._cached: tuple[float, StatsView] | None = None
        self._lock = asyncio.Lock()
        self.responses: Counter[int] = Counter()
        """By status."""

    async def collect(self, get_stats: Callable[[], Awaitable[StatsView]], streams: int) -> Response:
        async with self._lock:
            now = time.monotonic()
            if self._cached is None or now - self._cached[0] > CACHE_SECONDS:
                self._cached = (now, await get_stats())
        text = "".join((*_database_metrics(self._cached[1]), *self._process_metrics(streams)))
        return Response(200, text.encode(), (MEDIA,))

    def _process_metrics(self, streams: int) -> Iterable[str]:
        build = {"version": __version__, "python": platform.python_version()}
        requests = [({"status": str(status)}, float(count)) for status, count in sorted(self.responses.items())]
        cpu = time.process_time()
        yield _metric("edda_build_info", "gauge", "Versions of Edda and Python.", [(build, 1)])
        yield _metric("edda_http_requests_total", "counter", "Responses by status.", requests)
        yield _gauge("edda_streams", "Open event streams of pages.", streams)
        yield _gauge("process_start_time_seconds", "Unix time at which this process started.", self._started_at)
        yield _metric("process_cpu_seconds_total", "counter", "CPU time of this process.", [({}, cpu)])


def _database_metrics(stats: StatsView) -> Iterable[str]:
    runs = [({"status": status}, float(count)) for status, count in sorted(stats.counts.items())]
    yield _metric("edda_runs", "gauge", "Runs by status; 10000 means that many or more.", runs)
    yield _gauge("edda_runs_ready", "Runs that are due and have no worker.", stats.ready)
    yield _gauge("edda_runs_parked", "Runs that cannot continue with their current code.", stats.parked)
    oldest_ready = _age(stats, stats.oldest_ready)
    yield _gauge("edda_oldest_ready_seconds", "Age of the run that has been due longest.", oldest_ready)
    yield _gauge("edda_oldest_wait_seconds", "Age of the oldest waiting run.", _age(stats, stats.oldest_wait))
    yield _gauge("edda_outbox_pending", "Outbox events that are to be sent.", stats.outbox_pending)
    yield _gauge("edda_outbox_dead", "Outbox events that the receiver rejected for good.", stats.outbox_dead)
    yield _gauge("edda_oldest_outbox_seconds", "Age of the oldest outbox event.", _age(stats, stats.oldest_outbox))
    yield _gauge("edda_staged_events", "Staged messages and events, not yet in the event log.", stats.staged_events)
    yield _gauge("edda_workers_alive", "Workers whose lease has not expired.", stats.workers)
    latency = [("0.5", stats.median_ms), ("0.95", stats.p95_ms)]
    known = [({"quantile": quantile}, ms / 1000) for quantile, ms in latency if ms is not None]
    yield _metric("edda_run_seconds", "gauge", "Seconds from creation to end, of the runs that ended last.", known)


def _age(stats: StatsView, since: datetime | None) -> float:
    return 0.0 if since is None else max(0.0, (stats.at - since).total_seconds())


def _gauge(name: str, help: str, value: float) -> str:
    return _metric(name, "gauge", help, [({}, value)])


def _metric(name: str, kind: str, help: str, samples: Iterable[Sample]) -> str:
    lines = [f"# HELP {name} {help}", f"# TYPE {name} {kind}"]
    lines += [f"{name}{_labels(labels)} {value:.17g}" for labels, value in samples]
    return "\n".join(lines) + "\n"


def _labels(labels: dict[str, str]) -> str:
    pairs = ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items())
    return f"{{{pairs}}}" if pairs else ""


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
