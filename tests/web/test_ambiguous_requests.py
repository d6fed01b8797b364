"""Requests that two parsers read differently, or whose apparent origin is false."""

from __future__ import annotations

import gzip

import httpx2
import pytest

from edda.web import WebApp, WebOptions

from .calls import EVENT, Call, ask
from .fakes import FakeService
from .servers import SERVERS, serving
from .test_abuse import FIELDS, say

BOTH = (
    b"POST /events HTTP/1.1\r\n" + FIELDS + b"Connection: close\r\nContent-Length: 12\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
)


@pytest.mark.parametrize("name", [name for name in SERVERS if name != "granian"])
async def test_a_length_and_an_encoding_exclude_each_other_under_every_server(name: str) -> None:
    async with serving(name) as server:
        assert await say(server, BOTH) == [400]


@pytest.mark.parametrize(
    ("encoding", "status"),
    [("chunked", 202), ("gzip, chunked", 400), ("chunked, identity", 400), ("identity", 400), ("xchunked", 400)],
)
async def test_only_the_transfer_encoding_chunked_is_accepted(service: FakeService, encoding: str, status: int) -> None:
    """The server decodes the chunks only; another encoding remains in the body."""
    assert (await ask(WebApp(service), Call(headers=EVENT | {"transfer-encoding": encoding}))).status == status


@pytest.mark.parametrize("path", ["/events", "/cancel/x"])
@pytest.mark.parametrize("encoding", ["gzip", "br", "GZIP", "gzip, identity", "nonsense"])
async def test_a_compressed_body_is_refused_by_name(service: FakeService, encoding: str, path: str) -> None:
    headers = EVENT | {"content-encoding": encoding}
    reply = await ask(WebApp(service), Call(path=path, headers=headers, body=gzip.compress(b"{}")))
    assert (reply.status, reply.json["retryable"]) == (415, False)
    assert "Content-Encoding" in reply.json["error"]
    assert ("nonsense" in reply.json["error"]) is False
    assert service.stored == []


async def test_the_content_encoding_identity_is_accepted(service: FakeService) -> None:
    assert (await ask(WebApp(service), Call(headers=EVENT | {"content-encoding": "identity"}))).status == 202


@pytest.mark.parametrize(
    ("referer", "status"),
    [
        ("http://127.0.0.1:8001/_edda/", 202),
        ("http://127.0.0.1:8001", 202),
        ("http://evil.example/page", 403),
        ("http://evil.example/127.0.0.1:8001", 403),
        ("http://evil.example?http://127.0.0.1:8001", 403),
        ("http://127.0.0.1:8001@evil.example/", 403),
        ("http://127.0.0.1:9/", 403),
        ("nonsense", 403),
        ("", 403),
    ],
)
async def test_another_origin_is_detected_by_the_referer_too(service: FakeService, referer: str, status: int) -> None:
    assert (await ask(WebApp(service), Call(headers=EVENT | {"referer": referer}))).status == status


async def test_the_origin_takes_precedence_over_the_referer(service: FakeService) -> None:
    own, others = "http://127.0.0.1:8001", "http://evil.example"
    for origin, referer, status in ((own, others, 202), (others, own, 403)):
        headers = EVENT | {"origin": origin, "referer": referer}
        assert (await ask(WebApp(service), Call(headers=headers))).status == status


async def test_a_client_that_does_not_read_times_out_under_any_server(service: FakeService) -> None:
    import asyncio

    never = asyncio.Event()

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b"{}"}

    async def send(message: object) -> None:
        await never.wait()

    async with asyncio.timeout(20):
        await WebApp(service, WebOptions(write_timeout=0.05))(Call().scope(), receive, send)


LOGIN = "/_edda/login"
TOKEN = "Qm9vc3QtdGhlLXNpZ25hbC1mb3ItdGhpcy10ZXN0"


@pytest.mark.parametrize("name", ["edda", "edda-h11"])
async def test_forwarded_addresses_count_only_from_a_configured_proxy(name: str) -> None:
    """Without tokens a request with a forwarding header is refused: it is not from this machine."""
    async with serving(name, FORWARDED_ALLOW_IPS="") as server, httpx2.AsyncClient(trust_env=False) as client:
        headers = {key: value for key, value in EVENT.items() if key != "host"}
        assert (await client.post(server.url, headers=headers, content=b"{}")).status_code == 202
        forged = headers | {"x-forwarded-for": "127.0.0.1"}
        assert (await client.post(server.url, headers=forged, content=b"{}")).status_code == 403
