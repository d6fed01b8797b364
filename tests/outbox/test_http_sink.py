"""What goes over the wire, and what the answers mean."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import time
import warnings
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from edda.cloudevents import http_binding, json_format
from edda.cloudevents.event import CloudEvent, make
from edda.cloudevents.signatures import read_standard, standard_key
from edda.engine.outbox.sinks import HttpSink, message_id, read_retry_after
from edda.errors import EventDeliveryError, EventPostponedError, EventRefusedError

from .receiver import HANG, HANG_UP, Answer, Receiver, receiving

SECRET = f"whsec_{base64.b64encode(b'a key of some length').decode()}"
OTHER_SECRET = f"whsec_{base64.b64encode(b'another key').decode()}"


def event(number: int = 1) -> CloudEvent:
    return make(
        "order.shipped",
        "/shop/1",
        f"événement-{number}",
        {"n": number, "price": 1.50},
        time="2026-01-31T18:30:00.123+01:00",
        subject="order 17",
        extensions={"tenant": "Zoë", "priority": "3"},
    )


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with receiving() as receiver:
        yield receiver


async def send(sink: HttpSink, *events: CloudEvent) -> None:
    try:
        for one in events:
            await sink.send(one)
    finally:
        await sink.close()


async def error_of(receiver: Receiver, answer: Answer, timeout: float = 10.0) -> EventDeliveryError:
    receiver.behaviour = lambda request, attempt: answer
    with pytest.raises(EventDeliveryError) as caught:
        await send(HttpSink(receiver.url, timeout=timeout), event())
    return caught.value


@pytest.mark.parametrize("mode", ["structured", "binary"])
async def test_an_event_arrives_as_it_was_made(receiver: Receiver, mode: str) -> None:
    await send(HttpSink(receiver.url, mode=mode), event())
    (request,) = receiver.taken
    headers = [(name.encode(), value.encode()) for name, value in request.headers.items()]
    message = http_binding.parse(headers, request.body)
    assert message.mode == mode
    assert message.events == (event(),)


async def test_structured_mode_sends_the_bytes_that_are_stored(receiver: Receiver) -> None:
    stored = json_format.emit_stored(event())
    await send(HttpSink(receiver.url), json_format.parse_stored(stored))
    assert receiver.taken[0].body == stored
    assert receiver.taken[0].headers["content-type"] == "application/cloudevents+json"


async def test_many_events_share_a_connection_and_bring_no_cookies(receiver: Receiver) -> None:
    receiver.behaviour = lambda request, attempt: Answer(200, (("set-cookie", "a=b; path=/"),), b"{}")
    await send(HttpSink(receiver.url), *map(event, range(5)))
    assert len(receiver.taken) == 5
    assert receiver.connections == 1
    assert not any("cookie" in request.headers for request in receiver.taken)


async def test_headers_of_the_users_own_go_with_every_event(receiver: Receiver) -> None:
    await send(HttpSink(receiver.url, headers={"Authorization": "Bearer abc"}), event())
    assert receiver.taken[0].headers["authorization"] == "Bearer abc"


async def test_a_secret_signs_what_is_sent(receiver: Receiver) -> None:
    await send(HttpSink(receiver.url, secret=[SECRET, OTHER_SECRET]), event())
    (request,) = receiver.taken
    headers = [(name.encode(), value.encode()) for name, value in request.headers.items()]
    claim = read_standard(headers, time.time())
    for secret in (SECRET, OTHER_SECRET):
        claim.check([standard_key(secret)], request.body)
    assert request.headers["webhook-id"] == message_id(event())


def test_the_id_of_a_message_names_source_and_id() -> None:
    names = {("a", "bc"), ("ab", "c"), ("a", "b"), ("abc", "d")}
    assert len({message_id(CloudEvent(source=source, id=id, type="t")) for source, id in names}) == 4


@pytest.mark.parametrize("status", [301, 302, 307, 308, 408, 425, 429, 500, 502, 503, 504, 599])
async def test_a_receiver_that_may_take_it_later_is_asked_later(receiver: Receiver, status: int) -> None:
    elsewhere = (("location", f"{receiver.url}/elsewhere"),)
    error = await error_of(receiver, Answer(status, elsewhere, b"busy"))
    assert isinstance(error, EventPostponedError)
    assert error.after is None
    assert str(status) in str(error)
    assert [request.path for request in receiver.requests] == ["/events"], "a redirect is never followed"


@pytest.mark.parametrize("status", [400, 401, 404, 409, 410, 413, 422, 451])
async def test_a_receiver_that_will_never_take_it_is_not_asked_again(receiver: Receiver, status: int) -> None:
    error = await error_of(receiver, Answer(status, body=b"x" * 2000))
    assert isinstance(error, EventRefusedError)
    assert str(status) in str(error)
    assert str(error).count("x") == 500


async def test_no_answer_at_all_is_tried_again(receiver: Receiver) -> None:
    assert isinstance(await error_of(receiver, Answer(HANG_UP)), EventPostponedError)
    assert "no answer within 0.2 seconds" in str(await error_of(receiver, Answer(HANG), timeout=0.2))
    await receiver.close()
    assert isinstance(await error_of(receiver, Answer()), EventPostponedError)


async def test_an_answer_whose_body_never_comes_counts_by_its_status(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edda.engine.outbox.sinks.BODY_TIMEOUT", 0.1)
    receiver.behaviour = lambda request, attempt: Answer(200, (("transfer-encoding", "chunked"),), b"5\r\nbegin\r\n")
    await send(HttpSink(receiver.url), event())
    assert len(receiver.taken) == 1


async def test_an_event_that_cannot_be_written_in_a_mode_is_refused(receiver: Receiver) -> None:
    odd = json_format.parse(
        json.dumps(
            {"specversion": "1.0", "id": "1", "source": "/s", "type": "t"}
            | {"datacontenttype": "text/plain; charset=latin-1", "data": "é"}
        ).encode()
    )
    with pytest.raises(EventRefusedError, match="cannot be sent in this mode"):
        await send(HttpSink(receiver.url, mode="binary"), odd)
    await send(HttpSink(receiver.url), odd)


async def test_retry_after_is_seconds_or_a_date(receiver: Receiver) -> None:
    in_a_minute = format_datetime(datetime.now(UTC) + timedelta(seconds=60), usegmt=True)
    for text, least, most in (("7", 7, 7), (in_a_minute, 50, 61), ("Fri, 31 Dec 1999 23:59:59 GMT", 0, 0)):
        error = await error_of(receiver, Answer(503, (("retry-after", text),)))
        assert isinstance(error, EventPostponedError)
        assert error.after is not None
        assert least <= error.after <= most


@pytest.mark.parametrize("text", ["soon", "-3", "1.5", "", "١٢"])
def test_a_retry_after_that_says_nothing_is_none(text: str) -> None:
    assert read_retry_after(text, 0.0) is None


@pytest.mark.parametrize("url", ["ftp://host/x", "http://", "host/events", ""])
def test_an_address_that_cannot_be_posted_to_is_refused_at_once(url: str) -> None:
    with pytest.raises(ValueError, match="http"):
        HttpSink(url)


def test_a_wrong_secret_or_mode_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="whsec_"):
        HttpSink("http://localhost/", secret="hunter2")
    with pytest.raises(ValueError, match="mode"):
        HttpSink("http://localhost/", mode="batch")


@pytest.mark.parametrize("turns", range(1, 10))
async def test_connections_that_were_cut_are_closed_though_sending_is_cancelled_meanwhile(
    receiver: Receiver, turns: int
) -> None:
    sink, events = HttpSink(receiver.url), [event(number) for number in range(8)]
    await asyncio.gather(*(sink.send(one) for one in events))
    await receiver.close()
    sending = [asyncio.create_task(sink.send(one)) for one in events]
    for _ in range(turns):
        await asyncio.sleep(0)
    with warnings.catch_warnings(record=True) as left_open:
        warnings.simplefilter("always", ResourceWarning)
        for one in sending:
            one.cancel()
        await asyncio.gather(*sending, return_exceptions=True)
        await sink.close()
        gc.collect()
    assert [str(warning.message) for warning in left_open] == []


def test_a_signed_event_is_not_sent_in_headers_that_no_signature_covers() -> None:
    """Our own receiver, as every careful one, refuses such a request."""
    with pytest.raises(ValueError, match="mode='structured'"):
        HttpSink("https://example.com/", mode="binary", secret=SECRET)
