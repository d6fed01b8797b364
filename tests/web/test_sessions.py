"""Login, cookies, and requests that other origins make a browser send."""

from __future__ import annotations

from collections.abc import Callable
from http.cookies import SimpleCookie
from typing import Any
from urllib.parse import quote, urlencode

import httpx2
import pytest

from edda.control.controller import PREFIX
from edda.web import Token, TokenScope, WebApp, WebOptions
from edda.web.access import COOKIE, MAX_FAILURES, SECONDS, LoginSessions, LoginThrottle, Principal, own_path
from edda.web.request import Request, read_request
from edda.web.responses import HTTPError, Response

from .calls import Call, Reply, ask, deliver
from .fake_controller import Showcase
from .fakes import FakeService, PlainRefusals
from .listening import listening
from .test_security import PROTECTION, SECRETS, TOKENS

HERE = {"host": "edda.example"}
LOCAL = {"host": "127.0.0.1:8001"}
OWN = {"sec-fetch-site": "same-origin"}
EVERYTHING = "kq3sJ9vN2xLw8Rt5Yb1Zc7Hd4Gf6Mp0A"
ALL = (*TOKENS, Token("ops", frozenset(TokenScope), EVERYTHING))
VIEW = SECRETS[TokenScope.VIEW]


class Papers(PlainRefusals):
    """Pages that show their caller."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str | None, bytes]] = []

    async def handle(self, request: Request, caller: Principal | None, body: bytes = b"") -> Response | None:
        self.seen.append((request.path, None if caller is None else caller.name, body))
        if request.path == "/_edda/nothing":
            return None
        return Response(200, b"<p>a page", ((b"content-type", b"text/html; charset=utf-8"),))


@pytest.fixture
def papers() -> Papers:
    return Papers()


@pytest.fixture
def showcase() -> Showcase:
    return Showcase()


@pytest.fixture
def make_web(service: FakeService, showcase: Showcase, papers: Papers) -> Callable[..., WebApp]:
    return lambda **options: WebApp(service, WebOptions(**options), control=lambda: showcase, viewer=lambda: papers)


@pytest.fixture
def web(make_web: Callable[..., WebApp]) -> WebApp:
    return make_web(tokens=ALL)


@pytest.fixture
def open_web(make_web: Callable[..., WebApp]) -> WebApp:
    return make_web()


async def log_in(web: WebApp, token: str, next: str | None = None, **changes: Any) -> Reply:
    fields = {"token": token} | ({} if next is None else {"next": next})
    headers = HERE | OWN | {"content-type": "application/x-www-form-urlencoded"}
    return await ask(web, Call(path="/_edda/login", headers=headers, body=urlencode(fields).encode(), **changes))


async def cookie_for(web: WebApp, token: str = VIEW) -> dict[str, str]:
    reply = await log_in(web, token)
    return {"cookie": reply.headers["set-cookie"].partition(";")[0]}


async def get(web: WebApp, path: str, headers: dict[str, str], method: str = "GET") -> Reply:
    return await ask(web, method=method, path=path, headers=HERE | headers, body=b"")


# Logging in


async def test_a_login_opens_the_pages_and_the_api(web: WebApp, papers: Papers) -> None:
    cookie = await cookie_for(web)
    assert (await get(web, "/_edda/runs", cookie)).headers["content-type"].startswith("text/html")
    assert (await get(web, f"{PREFIX}/runs", cookie)).status == 200
    assert (await get(web, "/_edda/metrics", cookie)).status == 200
    assert papers.seen == [("/_edda/runs", "view", b"")]


async def test_the_cookie_is_httponly_and_samesite(web: WebApp) -> None:
    reply = await log_in(web, VIEW)
    assert (reply.status, reply.headers["location"]) == (303, "/_edda/")
    morsel = SimpleCookie(reply.headers["set-cookie"])[COOKIE]
    assert (morsel["httponly"], morsel["samesite"], morsel["path"]) == (True, "Strict", "/_edda")
    assert (morsel["max-age"], morsel["secure"]) == (str(SECONDS), "")
    assert VIEW not in morsel.value
    assert {name: reply.headers.get(name) for name in PROTECTION} == PROTECTION


async def test_a_cookie_set_by_https_is_secure(web: WebApp) -> None:
    scope = {**Call().scope(), "scheme": "https", "root_path": "/a b", "path": "/a b/_edda/login"}
    cookie = LoginSessions(WebOptions(tokens=ALL)).log_in(read_request(scope, no_body), f"token={VIEW}".encode())
    text = dict(cookie.headers)[b"set-cookie"].decode()
    assert text.endswith("; Secure")
    assert "; Path=/a%20b/_edda;" in text


async def no_body() -> dict[str, Any]:
    return {"type": "http.disconnect"}


async def test_a_wrong_token_leads_back_to_the_form(web: WebApp) -> None:
    for token in ("", "wrong", VIEW + "x", "\xff"):
        reply = await log_in(web, token, "/_edda/runs?status=failed")
        assert reply.status == 303
        assert reply.headers["location"] == "/_edda/login?failed=1&next=%2F_edda%2Fruns%3Fstatus%3Dfailed"
        assert "set-cookie" not in reply.headers


@pytest.mark.parametrize("addresses", [1, MAX_FAILURES], ids=["one address", "another address each time"])
async def test_wrong_tokens_are_throttled_and_right_ones_still_accepted(web: WebApp, addresses: int) -> None:
    """Another address each time, as with a forged X-Forwarded-For under a server that trusts it."""
    clients = [(f"192.0.2.{number % addresses}", 1) for number in range(MAX_FAILURES + 1)]
    for client in clients[:-1]:
        assert (await log_in(web, "wrong", client=client)).status == 303
    reply = await log_in(web, "wrong", client=clients[-1])
    assert (reply.status, "set-cookie" in reply.headers) == (429, False)
    assert 1 <= int(reply.headers["retry-after"]) <= 61
    for client in (clients[0], ("198.51.100.1", 1)):
        reply = await log_in(web, VIEW, client=client)
        assert (reply.status, "set-cookie" in reply.headers) == (303, True)


def test_failures_are_forgotten_after_a_minute_and_do_not_pile_up() -> None:
    failures = LoginThrottle()
    for second in range(MAX_FAILURES):
        failures.add(1000.0 + second)
    failures.add(1060.0)
    for _ in range(1000):
        with pytest.raises(HTTPError):
            failures.add(1060.0)
    assert len(failures._times) == MAX_FAILURES


async def test_without_tokens_there_is_nothing_to_log_in_to(open_web: WebApp) -> None:
    reply = await ask(open_web, path="/_edda/login", headers=LOCAL | OWN, body=b"token=x&next=/_edda/runs")
    assert (reply.status, reply.headers["location"]) == (303, "/_edda/runs")
    assert "set-cookie" not in reply.headers


async def test_logout_deletes_the_cookie(web: WebApp) -> None:
    cookie = await cookie_for(web)
    reply = await ask(web, path="/_edda/logout", headers=HERE | OWN | cookie, body=b"")
    assert (reply.status, reply.headers["location"]) == (303, "/_edda/login")
    assert f"{COOKIE}=; Max-Age=0; Path=/_edda" in reply.headers["set-cookie"]


async def test_a_large_form_is_refused(make_web: Callable[..., WebApp]) -> None:
    web = make_web(tokens=ALL, max_body=100)
    assert (await log_in(web, "x" * 200)).status == 413


async def test_a_form_of_many_fields_is_refused(web: WebApp) -> None:
    reply = await ask(
        web, path="/_edda/login", headers=HERE | OWN, body=f"token={VIEW}&".encode() + b"&".join([b"a=b"] * 10)
    )
    assert (reply.status, "set-cookie" in reply.headers) == (400, False)


ELSEWHERE = [
    "",
    "http://evil.example/_edda/",
    "//evil.example/_edda/",
    "/\\evil.example/_edda/",
    "/",
    "/_eddax",
    "/_edda",
    "/events",
    "/_edda/../events",
    "/_edda/%2e%2e/events",
    "/_edda/%2E./events",
    "/_edda/.%2e/events",
    "/_edda/./x",
    "/_edda/a\\..\\..\\x",
    "/_edda//evil.example",
    "/_edda/x\r\nset-cookie: a=b",
    "/_edda/x y",
    "/_edda/é",
    "javascript:alert(1)",
    "\t/_edda/runs",
]
OURS = ["/_edda/", "/_edda/runs", "/_edda/runs/", "/_edda/runs?status=failed&q=..", "/_edda/runs/a%2Fb", "/_edda/a.b/c"]


@pytest.mark.parametrize(("wanted", "ours"), [*((path, False) for path in ELSEWHERE), *((path, True) for path in OURS)])
async def test_the_login_redirects_to_own_pages_only(web: WebApp, wanted: str, ours: bool) -> None:
    reply = await log_in(web, VIEW, wanted)
    assert reply.headers["location"] == (wanted if ours else "/_edda/")


def test_a_mounted_app_redirects_below_its_own_prefix() -> None:
    scope = Call(path="/shop/_edda/login", root_path="/shop").scope()
    request = read_request(scope, no_body)
    assert own_path(request, "/shop/_edda/runs") == "/shop/_edda/runs"
    assert own_path(request, "/_edda/runs") == "/shop/_edda/"


# The cookie


async def test_a_cookie_counts_below_edda_only(web: WebApp, service: FakeService) -> None:
    cookie = await cookie_for(web, EVERYTHING)
    for path in ("/events", "/cancel/r-1"):
        reply = await ask(web, path=path, headers=HERE | OWN | cookie, body=b"")
        assert reply.status == 401
    assert [*service.stored, *service.cancelled] == []


async def test_a_session_has_the_scopes_of_its_token(web: WebApp) -> None:
    for token, looks, acts in ((VIEW, 200, 403), (SECRETS[TokenScope.CONTROL], 403, 200), (EVERYTHING, 200, 200)):
        cookie = await cookie_for(web, token)
        assert (await get(web, f"{PREFIX}/runs", cookie)).status == looks
        assert (await get(web, f"{PREFIX}/runs/r-1/resume", cookie | OWN, "POST")).status == acts
        assert (await get(web, "/_edda/runs", cookie)).status == looks


def test_a_cookie_is_good_for_half_a_day() -> None:
    now = [1000.0]
    sessions = LoginSessions(WebOptions(tokens=ALL), lambda: now[0])
    request = with_cookie(make_cookie(sessions))
    for time, known in ((1000.0, True), (1000.0 + SECONDS - 1, True), (1000.0 + SECONDS, False)):
        now[0] = time
        assert (sessions.find(request) is not None) is known


def test_a_cookie_ends_with_its_token() -> None:
    cookie = make_cookie(LoginSessions(WebOptions(tokens=ALL)))
    request = with_cookie(cookie)
    other = Token("view", frozenset({TokenScope.VIEW}), EVERYTHING)
    assert LoginSessions(WebOptions(tokens=TOKENS)).find(request) is not None
    assert LoginSessions(WebOptions(tokens=(other,))).find(request) is None
    assert LoginSessions(WebOptions(tokens=(other, *TOKENS))).find(request) is not None, (
        "the old secret beside the new one"
    )
    assert LoginSessions(WebOptions()).find(request) is None


def test_a_cookie_that_was_changed_is_none() -> None:
    sessions = LoginSessions(WebOptions(tokens=ALL))
    cookie = make_cookie(sessions)
    name, expires, mac = cookie.split(".")
    forged = [
        cookie[:-1],
        cookie + "0",
        f"{name}.{int(expires) + 1}.{mac}",
        f"b3Bz.{expires}.{mac}",
        f"{name}.{expires}.",
    ]
    forged += [
        "",
        ".",
        "..",
        "...",
        "a.b.c",
        f"é.{expires}.{mac}",
        f"{name}.{'9' * 5000}.{mac}",
        f"!.{expires}.{mac}",
        f"{name}.٣.{mac}",
    ]
    assert sessions.find(with_cookie(cookie)) is not None
    for text in forged:
        assert sessions.find(with_cookie(text)) is None, text
    assert sessions.find(with_cookie(f"{forged[0]}; x=y; {COOKIE}={cookie}")) is not None


def make_cookie(sessions: LoginSessions) -> str:
    answer = sessions.log_in(read_request(Call().scope(), no_body), f"token={VIEW}".encode())
    return SimpleCookie(dict(answer.headers)[b"set-cookie"].decode())[COOKIE].value


def with_cookie(cookie: str) -> Request:
    scope = {**Call().scope(), "headers": [(b"cookie", f"{COOKIE}={cookie}".encode())]}
    return read_request(scope, no_body)


async def test_a_login_ignores_an_existing_cookie(web: WebApp) -> None:
    """An attacker who planted a cookie before the login does not get the session."""
    planted = make_cookie(LoginSessions(WebOptions(tokens=ALL)))
    headers = HERE | OWN | {"cookie": f"{COOKIE}={planted}"}
    reply = await ask(web, path="/_edda/login", headers=headers, body=f"token={EVERYTHING}".encode())
    fresh = SimpleCookie(reply.headers["set-cookie"])[COOKIE].value
    assert fresh != planted
    assert (await get(web, f"{PREFIX}/runs/r-1/resume", {"cookie": f"{COOKIE}={planted}"} | OWN, "POST")).status == 403
    assert (await get(web, f"{PREFIX}/runs/r-1/resume", {"cookie": f"{COOKIE}={fresh}"} | OWN, "POST")).status == 200


async def test_a_planted_cookie_is_never_valid(web: WebApp) -> None:
    for planted in ("session-of-mine", "", "a.1.b", f"{COOKIE}="):
        headers = HERE | OWN | {"cookie": f"{COOKIE}={planted}"}
        reply = await ask(web, path="/_edda/login", headers=headers, body=f"token={VIEW}".encode())
        assert SimpleCookie(reply.headers["set-cookie"])[COOKIE].value != planted
        assert (await get(web, f"{PREFIX}/runs", {"cookie": f"{COOKIE}={planted}"})).status == 401


async def test_a_session_cannot_be_made_longer(web: WebApp) -> None:
    """Neither by requests nor by a login with the cookie alone."""
    cookie = await cookie_for(web)
    assert "set-cookie" not in (await get(web, "/_edda/runs", cookie)).headers
    reply = await ask(web, path="/_edda/login", headers=HERE | OWN | cookie, body=b"token=")
    assert "set-cookie" not in reply.headers


@pytest.mark.parametrize("root", ["", "/shop", "/a b", "/a;b"])
@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_behind_a_proxy_the_cookie_has_our_path_and_scheme_and_is_deleted_again(
    web: WebApp, scheme: str, root: str
) -> None:
    written: dict[str, str] = {}
    for path, body in (("login", f"token={VIEW}"), ("logout", "")):
        call = Call(path=f"{root}/_edda/{path}", root_path=root, headers=HERE | OWN, body=body.encode())
        reply = await deliver(web, call, {**call.scope(), "scheme": scheme})
        assert reply.headers["location"].startswith(f"{quote(root)}/_edda/")
        written[path] = reply.headers["set-cookie"]
    marks = [{part.strip() for part in text.split(";")[1:] if "Max-Age" not in part} for text in written.values()]
    secure = {"Secure"} if scheme == "https" else set()
    assert marks[0] == marks[1] == {f"Path={quote(root)}/_edda", "HttpOnly", "SameSite=Strict", *secure}


@pytest.mark.parametrize(("said", "secure"), [({}, False), ({"x-forwarded-proto": "https"}, True)])
async def test_the_scheme_of_a_local_proxy_is_used(web: WebApp, said: dict[str, str], secure: bool) -> None:
    async with listening(web) as url, httpx2.AsyncClient(base_url=url, trust_env=False) as client:
        answer = await client.post("/_edda/login", data={"token": VIEW}, headers=OWN | said)
    assert answer.headers["set-cookie"].endswith("; Secure") is secure


# Pages


async def test_pages_get_the_caller_and_the_body(web: WebApp, papers: Papers) -> None:
    cookie = await cookie_for(web, EVERYTHING)
    await get(web, "/_edda/runs", {})
    await ask(web, path="/_edda/runs/bulk", headers=HERE | OWN | cookie, body=b"ids=r-1")
    assert papers.seen == [("/_edda/runs", None, b""), ("/_edda/runs/bulk", "ops", b"ids=r-1")]
    assert (await get(web, "/_edda/nothing", cookie)).status == 404


async def test_without_the_view_scope_only_the_login_is_served(web: WebApp) -> None:
    cookie = await cookie_for(web, SECRETS[TokenScope.EVENTS])
    assert (await get(web, "/_edda/", cookie)).status == 403
    assert (await get(web, "/_edda/login", cookie)).status == 200
    assert (await get(web, "/_edda/static/edda.css", cookie)).status == 200


async def test_pages_have_the_security_headers(web: WebApp) -> None:
    """Except Referrer-Policy: under "no-referrer" our own forms would send no origin."""
    for path in ("/_edda/", "/_edda/login"):
        reply = await get(web, path, await cookie_for(web))
        expected = PROTECTION | {"referrer-policy": "same-origin"}
        assert {name: reply.headers.get(name) for name in PROTECTION} == expected
    reply = await get(web, "/_edda/nothing", await cookie_for(web))
    assert {name: reply.headers.get(name) for name in PROTECTION} == PROTECTION


# Requests that a page of another origin makes a browser send

SAME, CROSS = {"sec-fetch-site": "same-origin"}, {"sec-fetch-site": "cross-site"}
SITE, NONE = {"sec-fetch-site": "same-site"}, {"sec-fetch-site": "none"}
MINE, EVIL = {"origin": "http://edda.example"}, {"origin": "http://evil.example"}
PORT, NULL = {"origin": "http://edda.example:81"}, {"origin": "null"}
BY_COOKIE, BY_TOKEN, BY_NOTHING = "cookie", "token", "nothing"
FORGERIES = [
    # with a session
    (BY_COOKIE, SAME, True),
    (BY_COOKIE, SAME | MINE, True),
    (BY_COOKIE, SAME | EVIL, True),  # a proxy has changed Host; Sec-Fetch-Site is still right
    (BY_COOKIE, CROSS, False),
    (BY_COOKIE, CROSS | MINE, False),
    (BY_COOKIE, SITE, False),
    (BY_COOKIE, SITE | MINE, False),
    (BY_COOKIE, NONE, False),
    (BY_COOKIE, NONE | MINE, False),
    (BY_COOKIE, {"sec-fetch-site": ""}, False),
    (BY_COOKIE, {"sec-fetch-site": "Same-Origin"}, False),
    (BY_COOKIE, MINE, True),
    (BY_COOKIE, {"origin": "https://edda.example"}, True),  # behind a proxy that terminates TLS
    (BY_COOKIE, {"origin": "HTTP://EDDA.example"}, True),
    (BY_COOKIE, EVIL, False),
    (BY_COOKIE, PORT, False),
    (BY_COOKIE, NULL, False),
    (BY_COOKIE, {"origin": ""}, False),
    (BY_COOKIE, {"origin": "edda.example"}, False),
    (BY_COOKIE, {"origin": "http://edda.example.evil.example"}, False),
    (BY_COOKIE, {"origin": "http://evil.example/edda.example"}, False),
    (BY_COOKIE, {}, False),
    (BY_COOKIE, {"referer": "http://edda.example/_edda/"}, False),
    # with a token in the header, which other origins lack
    (BY_TOKEN, {}, True),
    (BY_TOKEN, CROSS, True),
    (BY_TOKEN, EVIL, True),
    (BY_TOKEN, NULL, True),
    # without tokens, on this machine
    (BY_NOTHING, {}, True),
    (BY_NOTHING, SAME, True),
    (BY_NOTHING, MINE, True),
    (BY_NOTHING, CROSS, False),
    (BY_NOTHING, SITE, False),
    (BY_NOTHING, NONE, False),
    (BY_NOTHING, EVIL, False),
    (BY_NOTHING, NULL, False),
]


@pytest.mark.parametrize(("by", "said", "done"), FORGERIES)
@pytest.mark.parametrize("path", [f"{PREFIX}/runs/r-1/cancel", "/_edda/runs/r-1/cancel"])
async def test_only_requests_of_our_own_origin_change_something(
    make_web: Callable[..., WebApp],
    showcase: Showcase,
    papers: Papers,
    by: str,
    said: dict[str, str],
    done: bool,
    path: str,
) -> None:
    web = make_web(auth="none", allowed_hosts=("edda.example",)) if by == BY_NOTHING else make_web(tokens=ALL)
    headers = HERE | said
    if by == BY_COOKIE:
        headers |= await cookie_for(web, EVERYTHING)
    if by == BY_TOKEN:
        headers |= {"authorization": f"Bearer {EVERYTHING}"}
    reply = await ask(web, path=path, headers=headers, body=b"")
    assert reply.status == (200 if done else 403)
    assert bool(showcase.world.audits or papers.seen) is done


@pytest.mark.parametrize("said", [CROSS, NONE, EVIL, NULL])
async def test_another_origin_cannot_log_a_browser_in_or_out(web: WebApp, said: dict[str, str]) -> None:
    for path in ("/_edda/login", "/_edda/logout"):
        reply = await ask(web, path=path, headers=HERE | said, body=f"token={VIEW}".encode())
        assert (reply.status, "set-cookie" in reply.headers) == (403, False)


@pytest.mark.parametrize(
    ("host", "served"),
    [
        ("127.0.0.1:8001", True),
        ("localhost", True),
        ("[::1]:8001", True),
        ("edda.localhost", True),
        ("evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("localhost.evil.example:8001", False),
        ("192.168.0.1", False),
        ("0.0.0.0", False),
        ("", False),
    ],
)
@pytest.mark.parametrize("path", [f"{PREFIX}/runs", "/_edda/", "/_edda/login", "/_edda/metrics"])
async def test_a_foreign_name_that_resolves_to_this_machine_shows_nothing(
    open_web: WebApp, papers: Papers, showcase: Showcase, host: str, served: bool, path: str
) -> None:
    reply = await ask(open_web, method="GET", path=path, headers={"host": host}, body=b"")
    assert reply.status == (200 if served else 403)
    assert served or not (papers.seen or showcase.world.searches)


@pytest.mark.parametrize("path", [f"{PREFIX}/runs", "/_edda/", "/_edda/login", "/_edda/metrics", "/_edda/static/x"])
async def test_without_tokens_only_this_machine_sees_pages(open_web: WebApp, path: str) -> None:
    for changes in ({"client": ("192.0.2.7", 1)}, {"headers": LOCAL | {"x-forwarded-for": "127.0.0.1"}}):
        reply = await ask(open_web, **({"method": "GET", "path": path, "headers": LOCAL} | changes))
        assert reply.status == 403


async def test_a_cookie_of_one_name_is_not_taken_twice_by_quoting(web: WebApp) -> None:
    cookie = await cookie_for(web)
    assert (await get(web, f"{PREFIX}/runs", {"cookie": quote(cookie["cookie"])})).status == 401
