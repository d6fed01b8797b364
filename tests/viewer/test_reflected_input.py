"""Request values that a page repeats are escaped, and cause no redirect to another site."""

from __future__ import annotations

from itertools import product
from urllib.parse import quote, urlencode

import httpx2
import pytest

from edda.control.views import ActionResult
from edda.web import Token, TokenScope, WebOptions
from tests.viewer.hostile import PAYLOADS
from tests.viewer.showcase import ShowcaseController
from tests.viewer.test_pages import Skeleton, client_for

EVERYTHING = "\n".join(PAYLOADS)
PARTS = tuple("\n".join(PAYLOADS[begin::6]) for begin in range(6))
"""Each short enough for a URL."""
OWN = {"Sec-Fetch-Site": "same-origin"}
ECHOING: dict[str, tuple[str, ...]] = {
    "/runs": ("q", "workflow", "id", "input", "parent", "cursor", "colour", "status"),
    "/runs/bulk?action=cancel&every=1": ("q", "workflow", "id", "input", "parent", "run", "colour"),
    "/runs/bulk?action=cancel": ("run",),
    "/runs/order-A-17": ("view", "step", "generation", "from", "scale", "colour"),
    "/runs/order-A-14?view=history": ("generation", "colour"),
    "/events": ("q", "type", "source", "messages", "cursor", "colour"),
    "/events/send": ("type", "source", "subject", "id", "target"),
    "/channels/publish": ("channel", "target"),
    "/waits": ("type", "cursor"),
    "/outbox": ("state", "cursor"),
    "/outbox/retry": ("event",),
    "/outbox/drop": ("event",),
    "/audit": ("cursor",),
    "/login": ("next", "failed"),
}
REFUSED: dict[str, tuple[str, ...]] = {
    "/runs": ("since", "until"),
    "/runs/bulk?every=1": ("action",),
    "/runs/bulk?action=cancel&every=1": ("since", "until"),
    "/events": ("since", "until"),
}


def asked(address: str, name: str, text: str) -> str:
    return f"{address}{'&' if '?' in address else '?'}{urlencode({name: text})}"


INTRUDERS = frozenset({"iframe", "object", "embed", "base", "style", "img", "math", "template", "animate"})
OURS = ("/_edda", "#")


def check(page: str) -> None:
    """Fails if the page has an element or attribute that our templates never produce."""
    found = Skeleton(page)
    assert not INTRUDERS & {tag[0] for tag in found.tags}
    assert not [tag for tag in found.tags for name in tag[1:] if name.startswith("on") or name in ("srcdoc", "style")]
    assert [tag for tag in found.tags if tag[0] == "script"] == [("script", "src"), ("script", "src", "type")]
    assert not [link for link in found.links if not link.startswith(OURS)]


@pytest.mark.parametrize("address", ECHOING)
async def test_query_parameters_are_escaped(address: str) -> None:
    async with client_for(ShowcaseController()) as client:
        for name, text in product(ECHOING[address], (*PARTS, *PAYLOADS[::97])):
            answer = await client.get(asked(address, name, text))
            assert answer.status_code == 200, (name, text)
            check(answer.text)


@pytest.mark.parametrize("address", REFUSED)
async def test_refused_values_are_escaped(address: str) -> None:
    async with client_for(ShowcaseController()) as client:
        for name, text in product(REFUSED[address], PARTS):
            answer = await client.get(asked(address, name, text))
            assert answer.status_code == 422
            check(answer.text)


@pytest.mark.parametrize("path", ["/runs/*", "/start/*", "/events/*", "/runs/*/cancel"])
async def test_missing_ids_are_escaped(path: str) -> None:
    async with client_for(ShowcaseController()) as client:
        for text in (*PARTS, *PAYLOADS[::97]):
            answer = await client.get(path.replace("*", quote(text, safe="")))
            assert answer.status_code == 404
            check(answer.text)


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("/start/order", ("data.order_id", "data.customer.email", "data.items.0.sku", "data.items.0.count", "_id")),
        ("/runs/order-A-17/answer", ("data.order_id", "data.amount", "data.method", "data.paid_on", "data.reference")),
        ("/events/send", ("type", "source", "subject", "id", "target", "data")),
        ("/channels/publish", ("channel", "target", "data")),
    ],
)
async def test_a_form_with_errors_repeats_the_input_as_a_string(path: str, names: tuple[str, ...]) -> None:
    form = {"_step": "wait_event:1"}
    async with client_for(ShowcaseController()) as client:
        for text in (EVERYTHING, *PAYLOADS[::97]):
            answer = await client.post(path, data=form | dict.fromkeys(names, text))
            assert answer.status_code == 422
            check(answer.text)


async def test_a_form_of_very_many_fields_is_refused() -> None:
    """It would be rendered as a page of as many rows, which blocks the event loop."""
    controller = ShowcaseController()
    many = "&".join(f"data.items.{number}.sku=x" for number in range(2_001))
    async with client_for(controller) as client:
        assert (await client.post("/start/order", content=many)).status_code == 413
        assert (await client.post("/start/order", content=many.rpartition("&")[0])).status_code == 422
        assert (await client.get(f"/events?{'q&' * 2_000}")).status_code == 413
    assert controller.done == []


def sendable(text: str) -> str:
    """Without the characters that a header cannot contain."""
    return "".join(one for one in text if one.isascii() and one.isprintable())


SECRET = "Bq7v9Qw8RtYpLm2NbVcXsD4fGhJ6aE7u"
BEARER = {"Authorization": f"Bearer {SECRET}"}
HEADERS = (
    *("Host", "Origin", "Referer", "User-Agent", "Accept-Language", "Cookie", "X-Edda-Live", "X-Original-URL"),
    *("Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Prefix", "X-Forwarded-Proto"),
)


def guarded(name: str = "boss") -> WebOptions:
    return WebOptions(tokens=(Token(name, frozenset(TokenScope), SECRET),))


@pytest.mark.parametrize(("path", "few"), [("/login", 1), ("/runs/nobody", 11), ("/runs", 37), ("/", 97)])
async def test_headers_are_in_no_page(path: str, few: int) -> None:
    async with client_for(ShowcaseController(), guarded()) as client:
        for payload in PAYLOADS[::few]:
            text = f"{sendable(payload)} canary"
            answer = await client.get(path, headers=BEARER | dict.fromkeys(HEADERS, text))
            assert "canary" not in answer.text
            check(answer.text)


async def test_the_flash_message_is_escaped() -> None:
    """Another site on a subdomain can set a cookie that the browser then sends here."""
    async with client_for(ShowcaseController()) as client:
        for payload in PAYLOADS:
            answer = await client.get("/login", headers={"Cookie": f"edda_flash={quote(payload, safe='')}"})
            assert 'class="flash"' in answer.text
            check(answer.text)


@pytest.mark.parametrize(("scheme", "end"), [("http", "SameSite=Strict"), ("https", "SameSite=Strict; Secure")])
async def test_the_flash_cookie_has_the_path_and_scheme_of_the_app(scheme: str, end: str) -> None:
    async with client_for(ShowcaseController()) as client:
        done = await client.post(f"{scheme}://127.0.0.1:8001/_edda/runs/order-A-17/resume")
        said = done.headers["set-cookie"]
        assert said.endswith(f"; Path=/_edda; Max-Age=60; HttpOnly; {end}")
        page = await client.get(f"{scheme}://127.0.0.1:8001/_edda/audit", headers={"Cookie": said.partition(";")[0]})
        assert page.headers["set-cookie"] == f"edda_flash=; Path=/_edda; Max-Age=0; HttpOnly; {end}"


async def test_the_name_of_a_token_is_escaped() -> None:
    async with client_for(ShowcaseController(), guarded(EVERYTHING)) as client:
        answer = await client.get("/audit", headers=BEARER)
        assert "&lt;script&gt;" in answer.text
        check(answer.text)
        session = (await client.post("/login", data={"token": SECRET}, headers=OWN)).headers["set-cookie"]
        assert session.isascii()
        assert session.isprintable()


ELSEWHERE = ("//evil.example", "/\\evil.example", "https://evil.example/", "..", ".", "javascript:alert(1)")


async def test_no_request_redirects_to_another_site() -> None:
    async with client_for(ShowcaseController(), guarded()) as client:
        for payload in (*PAYLOADS, *ELSEWHERE):
            client.cookies.clear()
            check_redirect(await client.get(f"/runs/{quote(payload, safe='')}?{urlencode({'q': payload})}"))
            check_redirect(await client.post("/login", data={"token": SECRET, "next": payload}, headers=OWN))


async def test_no_action_redirects_to_another_site(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = ShowcaseController()
    said = [""]

    async def send(order: object) -> ActionResult:
        return ActionResult(True, said[0])

    async def start(order: object) -> ActionResult:
        return ActionResult(True, said[0], 1, said[0])

    monkeypatch.setattr(controller, "send_event", send)
    monkeypatch.setattr(controller, "start_run", start)
    async with client_for(controller) as client:
        for number, said[0] in enumerate((*ELSEWHERE, *PAYLOADS)):
            check_redirect(await client.post("/events/send", data={"type": "x", "data": "{}"}))
            if number % 25 == 0:  # reading the code of a workflow takes a while
                form = {"data.order_id": "A", "data.customer.name": "Ada"}
                check_redirect(await client.post("/start/order", data=form))


def check_redirect(answer: httpx2.Response) -> None:
    location = answer.headers["location"]
    assert answer.status_code == 303
    assert location.startswith("/_edda/")
    for value in (location, *answer.headers.get_list("set-cookie")):
        assert value.isascii()
        assert value.isprintable()
