"""The handshake: rows W6 to W8."""

from __future__ import annotations

import pytest

from edda.cloudevents import webhook_handshake
from edda.cloudevents.webhook_handshake import Handshake, Policy

FRIEND = Policy(frozenset({"Sender.example.com"}))


def asked(**headers: str) -> list[tuple[bytes, bytes]]:
    return [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]


def answered(policy: Policy, **headers: str) -> dict[str, str]:
    handshake = webhook_handshake.read(asked(**headers))
    assert handshake is not None
    return dict(webhook_handshake.answer(handshake, policy))


def test_a_sender_that_may_send_is_told_so() -> None:
    """W6."""
    answer = answered(FRIEND, WebHook_Request_Origin="sender.example.com")
    assert answer == {"Allow": "POST", "WebHook-Allowed-Origin": "Sender.example.com"}


def test_a_sender_that_may_not_send_gets_no_such_header() -> None:
    """W6."""
    for origin in ("other.example.com", "*", "sender.example.com.evil.com"):
        assert answered(FRIEND, webhook_request_origin=origin, webhook_request_rate="10") == {}
    assert answered(Policy(), webhook_request_origin="sender.example.com") == {}


def test_where_everybody_may_send_nothing_of_the_request_comes_back() -> None:
    """W6."""
    answer = answered(Policy(frozenset({"*"})), WEBHOOK_REQUEST_ORIGIN="evil\r\nSet-Cookie: x")
    assert answer["WebHook-Allowed-Origin"] == "*"


@pytest.mark.parametrize(("rate", "allowed"), [(None, "*"), (120, "120")])
def test_who_asks_for_a_rate_is_told_one(rate: int | None, allowed: str) -> None:
    """W6."""
    policy = Policy(frozenset({"*"}), rate)
    for wanted in ("60", "*", "nonsense", ""):
        answer = answered(policy, webhook_request_origin="a", webhook_request_rate=wanted)
        assert answer["WebHook-Allowed-Rate"] == allowed


def test_a_limit_is_told_to_who_does_not_ask_as_well() -> None:
    """W6."""
    assert "WebHook-Allowed-Rate" not in answered(Policy(frozenset({"*"})), webhook_request_origin="a")
    assert answered(Policy(frozenset({"*"}), 5), webhook_request_origin="a")["WebHook-Allowed-Rate"] == "5"


def test_a_callback_is_read_and_no_more() -> None:
    """W7."""
    headers = asked(webhook_request_origin="a", webhook_request_callback="https://a.example/confirm?id=1")
    assert webhook_handshake.read(headers) == Handshake("a", False, "https://a.example/confirm?id=1")


def test_a_preflight_of_a_browser_is_no_handshake() -> None:
    """W8."""
    assert webhook_handshake.read(asked(origin="https://a.example", access_control_request_method="POST")) is None
    assert webhook_handshake.read(asked(webhook_request_origin=" ")) is None
    assert webhook_handshake.read([]) is None
