"""/_edda/metrics: the text format of Prometheus."""

from __future__ import annotations

import re

import pytest

from edda.errors import StorageUnavailableError
from edda.version import __version__
from edda.web import WebApp, metrics

from .calls import Reply, ask
from .fake_controller import Showcase, a_run
from .fakes import FakeService

_SAMPLE = re.compile(r'^([a-z_:][a-z0-9_:]*)(?:\{((?:[a-z_]+="(?:[^"\\]|\\.)*",?)+)\})? (-?[0-9.e+-]+)$')


@pytest.fixture
def showcase() -> Showcase:
    return Showcase()


@pytest.fixture
def web(service: FakeService, showcase: Showcase) -> WebApp:
    return WebApp(service, control=lambda: showcase)


async def scrape(web: WebApp, method: str = "GET") -> Reply:
    return await ask(web, method=method, path="/_edda/metrics", headers={"host": "localhost"}, body=b"")


async def test_every_metric_is_present(web: WebApp) -> None:
    reply = await scrape(web)
    assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    text = reply.body.decode()
    for line in (
        'edda_runs{status="failed"} 1',
        'edda_runs{status="waiting"} 1',
        "edda_runs_ready 1",
        "edda_oldest_ready_seconds 3600",
        "edda_oldest_wait_seconds 0",
        "edda_outbox_pending 2",
        "edda_outbox_dead 1",
        "edda_workers_alive 1",
        'edda_run_seconds{quantile="0.5"} 0.012500000000000001',
    ):
        assert f"\n{line}\n" in f"\n{text}"
    assert f'edda_build_info{{version="{__version__}"' in text


async def test_every_line_is_one_that_prometheus_reads(web: WebApp, showcase: Showcase) -> None:
    showcase.world.runs["x"] = a_run("x", 'odd"\\\nstatus')
    lines = (await scrape(web)).body.decode().splitlines()
    described = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    for line in lines:
        if line.startswith("#"):
            assert re.match(r"# (HELP|TYPE) [a-z_]+ \S", line)
        else:
            found = _SAMPLE.match(line)
            assert found is not None, line
            assert found[1] in described


async def test_several_scrapers_cost_one_query(
    web: WebApp, showcase: Showcase, monkeypatch: pytest.MonkeyPatch
) -> None:
    await scrape(web)
    await scrape(web)
    assert showcase.world.stats == 1
    monkeypatch.setattr(metrics, "CACHE_SECONDS", -1.0)
    await scrape(web)
    assert showcase.world.stats == 2


async def test_requests_are_counted_by_their_status(web: WebApp) -> None:
    await ask(web, method="PUT")
    await ask(web, method="PUT")
    assert b'edda_http_requests_total{status="405"} 2\n' in (await scrape(web)).body


async def test_without_the_database_the_metrics_are_503(web: WebApp, showcase: Showcase) -> None:
    showcase.world.error = StorageUnavailableError("gone")
    assert (await scrape(web)).status == 503
    assert (await scrape(web, "POST")).status == 405
