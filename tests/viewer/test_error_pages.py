"""Error responses: a page with reason and advice for browsers, JSON for programs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest

from edda import EddaApp
from edda.errors import StorageUnavailableError
from edda.viewer.viewer import Viewer
from edda.web import State, Token, TokenScope, WebApp, WebOptions
from tests.viewer.showcase import ShowcaseController
from tests.web.fakes import FakeService

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
OWN = {"Sec-Fetch-Site": "same-origin"}
SECRET = "Zk3v9Qw8RtYpLm2NbVcXsD4fGhJ6aE7u"
TOKENS = (Token("sender", frozenset({TokenScope.EVENTS}), SECRET),)


class Away(ShowcaseController):
    async def list_runs(self, search: Any) -> Any:
        raise StorageUnavailableError("postgresql://ops:hunter2@db does not answer")


class Broken(ShowcaseController):
    async def list_runs(self, search: Any) -> Any:
        raise RuntimeError("<b>a secret</b>")


@dataclass(frozen=True)
class Case:
    status: int
    title: str
    words: str
    path: str
    method: str = "GET"
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    options: dict[str, Any] = field(default_factory=dict)
    controller: type[ShowcaseController] = ShowcaseController
    state: State = State.STARTED
    times: int = 1


CASES = {
    "wrong token": Case(
        401,
        "Not logged in",
        "Unknown token",
        "/runs",
        "GET",
        {"Authorization": "Bearer x"},
        b"",
        {"tokens": TOKENS},
    ),
    "no scope": Case(
        403,
        "Not allowed",
        "The token lacks the scope &#39;view&#39;.",
        "/runs",
        "GET",
        {"Authorization": f"Bearer {SECRET}"},
        b"",
        {"tokens": TOKENS},
    ),
    "other origin": Case(
        403, "Not allowed", "another origin", "/runs/order-A-17/cancel", "POST", {"Origin": "http://evil.example"}
    ),
    "other host": Case(403, "Not allowed", "allowed_hosts", "/runs", "GET", {"Host": "evil.example"}),
    "nowhere": Case(404, "Not found", "There is nothing at this path.", "/nowhere"),
    "method": Case(405, "Not possible here", "GET, HEAD", "/livez", "POST", OWN),
    "large": Case(
        413,
        "Too large",
        "larger than 10 bytes",
        "/runs/order-A-17/cancel",
        "POST",
        OWN,
        b"reason=x" * 9,
        {"max_body": 10},
    ),
    "guessing": Case(
        429, "Too many requests", "Wait a minute", "/login", "POST", OWN, b"token=x", {"tokens": TOKENS}, times=11
    ),
    "many headers": Case(431, "Too many headers", "headers", "/runs", "GET", {f"X-{n}": "1" for n in range(101)}),
    "database away": Case(503, "Not available", "edda doctor", "/runs", controller=Away),
    "not started": Case(503, "Not available", "edda doctor", "/runs", state=State.STOPPED),
    "broken": Case(500, "Unexpected error", "see the log of the server", "/runs", controller=Broken),
}


async def ask(case: Case, accept: str) -> httpx2.Response:
    controller = case.controller()
    web = WebApp(
        FakeService(case.state),
        WebOptions(**case.options),
        control=lambda: controller,
        viewer=lambda: Viewer(lambda caller: controller),
    )
    transport = httpx2.ASGITransport(app=web, client=("127.0.0.1", 50_000))
    async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1:8001/_edda") as client:
        for _ in range(case.times):
            answer = await client.request(
                case.method, case.path, headers={"Accept": accept, **case.headers}, content=case.body
            )
    return answer


@pytest.mark.parametrize("name", CASES)
async def test_a_refusal_is_a_page_for_people_and_json_for_programs(name: str) -> None:
    case = CASES[name]
    page, plain = await ask(case, BROWSER), await ask(case, "*/*")
    assert (page.status_code, plain.status_code) == (case.status, case.status)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert f"<h1>{case.title}</h1>" in page.text
    assert case.words in page.text
    assert set(plain.json()) == {"error", "error_type", "retryable"}
    for secret in ("hunter2", "a secret"):
        assert secret not in page.text
    same = {name: value for name, value in plain.headers.items() if name not in {"content-type", "content-length"}}
    assert same == {name: page.headers.get(name) for name in same}
    assert "script-src 'self'" in page.headers["content-security-policy"]


@pytest.mark.parametrize("path", ["/_edda/api/v1/nothing", "/cancel/nobody/now", "/_edda/api/v1/runs/nobody"])
async def test_what_is_no_page_answers_programs_only(path: str) -> None:
    controller = ShowcaseController()
    web = WebApp(FakeService(), control=lambda: controller, viewer=lambda: Viewer(lambda caller: controller))
    transport = httpx2.ASGITransport(app=web, client=("127.0.0.1", 50_000))
    async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1:8001") as client:
        answer = await client.get(path, headers={"Accept": BROWSER})
    assert answer.status_code in {404, 405}
    assert answer.headers["content-type"] == "application/json"


async def test_an_app_that_is_not_started_says_so_on_a_page(tmp_path: Path) -> None:
    app = EddaApp("shop", f"sqlite:///{tmp_path}/shop.db", workflows=())
    transport = httpx2.ASGITransport(app=app, client=("127.0.0.1", 50_000))
    async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1:8001/_edda") as client:
        answer = await client.get("/runs", headers={"Accept": BROWSER})
    assert answer.status_code == 503
    assert "<h1>Not available</h1>" in answer.text


async def test_an_error_page_links_to_other_pages_after_login() -> None:
    assert 'aria-label="Pages"' in (await ask(CASES["nowhere"], BROWSER)).text
    stranger = (await ask(CASES["wrong token"], BROWSER)).text
    assert 'aria-label="Pages"' not in stranger
    assert 'href="/_edda/login"' in stranger
