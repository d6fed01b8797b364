"""/_edda/metrics: what monitoring wants to know, in the text format of Prometheus."""

from __future__ import annotations

import asyncio
import platform
import time
from collections.abc import Awaitable, Callable, Iterable
from datetime import datetime

from edda.control.views import StatsView
from edda.version import __version__

from .responses import Response

MEDIA = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
CACHE_SECONDS = 5.0
"""Seconds for which an answer is good: several that scrape cost the database no more than one."""

Sample = tuple[dict[str, str], float]


class Metrics:
    def __init__(self) -> None:
        self._begun = time.time()
        self._kept: tuple[float, StatsView] | None = None
        self._asking = asyncio.Lock()
        self._requests: dict[int, int] = {}

    def count(self, status: int) -> None:
        """A request that was answered."""
        self._requests[status] = self._requests.get(status, 0) + 1

    async def answer(self, get_stats: Callable[[], Awaitable[StatsView]], streams: int) -> Response:
        async with self._asking:
            now = time.monotonic()
            if self._kept is None or now - self._kept[0] > CACHE_SECONDS:
                self._kept = (now, await get_stats())
        text = "".join((*_describe(self._kept[1]), *self._describe_process(streams)))
        return Response(200, text.encode(), (MEDIA,))

    def _describe_process(self, streams: int) -> Iterable[str]:
        build = {"version": __version__, "python": platform.python_version()}
        requests = [({"status": str(status)}, float(count)) for status, count in sorted(self._requests.items())]
        cpu = time.process_time()
        yield _metric("edda_build_info", "gauge", "What runs here.", [(build, 1)])
        yield _metric("edda_http_requests_total", "counter", "Requests that were answered, by status.", requests)
        yield _gauge("edda_streams", "Pages that are told of changes.", streams)
        yield _gauge("process_start_time_seconds", "When this process began to serve.", self._begun)
        yield _metric("process_cpu_seconds_total", "counter", "Time that this process computed.", [({}, cpu)])


def _describe(stats: StatsView) -> Iterable[str]:
    runs = [({"status": status}, float(count)) for status, count in sorted(stats.counts.items())]
    yield _metric("edda_runs", "gauge", "Runs by status; 10000 means that many or more.", runs)
    yield _gauge("edda_runs_ready", "Runs that are due and that no worker has.", stats.ready)
    yield _gauge("edda_runs_parked", "Runs that cannot go on with the code that there is.", stats.parked)
    yield _gauge("edda_oldest_ready_seconds", "Age of the run that is due longest.", _age(stats, stats.oldest_ready))
    yield _gauge("edda_oldest_wait_seconds", "Age of the oldest run that waits.", _age(stats, stats.oldest_wait))
    yield _gauge("edda_outbox_pending", "Events to be sent.", stats.outbox_pending)
    yield _gauge("edda_outbox_dead", "Events that were given up.", stats.outbox_dead)
    yield _gauge("edda_oldest_outgoing_seconds", "Age of the oldest event to send.", _age(stats, stats.oldest_outgoing))
    yield _gauge("edda_dispatches", "Messages and events of runs on their way to the log.", stats.dispatches)
    yield _gauge("edda_workers_alive", "Workers whose lease has not lapsed.", stats.workers)
    latency = [("0.5", stats.median_ms), ("0.95", stats.p95_ms)]
    known = [({"quantile": quantile}, ms / 1000) for quantile, ms in latency if ms is not None]
    yield _metric(
        "edda_run_seconds", "gauge", "From the creation of a run to its end, of those that ended last.", known
    )


def _age(stats: StatsView, since: datetime | None) -> float:
    return 0.0 if since is None else max(0.0, (stats.at - since).total_seconds())


def _gauge(name: str, words: str, value: float) -> str:
    return _metric(name, "gauge", words, [({}, value)])


def _metric(name: str, kind: str, words: str, samples: Iterable[Sample]) -> str:
    lines = [f"# HELP {name} {words}", f"# TYPE {name} {kind}"]
    lines += [f"{name}{_labels(labels)} {value:.17g}" for labels, value in samples]
    return "\n".join(lines) + "\n"


def _labels(labels: dict[str, str]) -> str:
    pairs = ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items())
    return f"{{{pairs}}}" if pairs else ""


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
