"""Tokens: their syntax, which are refused, what is kept of them."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from edda.web import Token, TokenScope, WebOptions, find_tokens, read_tokens
from edda.web.tokens import match_token

SECRET = "Vd0vzRQnC0d2yqW1sZ6b8HfJpK4uTgXe_mNa7oLr-Yk"
OTHER = "9f86d081884c7d659a2feaa0c55ad015"
EVENTS = frozenset({TokenScope.EVENTS})


def test_tokens_are_read_from_a_line() -> None:
    first, second = read_tokens(f" shop:events:{SECRET} , ops:events+control+view:{OTHER},")
    assert first == Token("shop", EVENTS, SECRET)
    assert second == Token("ops", frozenset(TokenScope), OTHER)
    assert first != Token("shop", EVENTS, OTHER)


def test_tokens_are_read_from_json() -> None:
    text = json.dumps([{"name": "shop", "scopes": ["events"], "secret": SECRET}])
    assert read_tokens(text) == read_tokens(f"shop:events:{SECRET}")


def test_no_text_is_no_tokens() -> None:
    assert read_tokens("") == read_tokens(" ") == ()


def test_tokens_come_from_the_environment_unless_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDDA_TOKENS", f"shop:events:{SECRET}")
    assert [token.name for token in find_tokens(None)] == ["shop"]
    assert find_tokens(()) == ()
    assert [token.name for token in find_tokens(f"ops:view:{OTHER}")] == ["ops"]
    assert [token.name for token in find_tokens([Token("ops", EVENTS, OTHER)])] == ["ops"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SECRET, r"number 1 is not name:scope\+scope:secret"),
        (f"shop:{SECRET}", r"number 1 is not name:scope\+scope:secret"),
        (f"shop:events:{SECRET},{OTHER}", "number 2 is not"),
        (f"shop:everything:{SECRET}", "token 'shop': unknown scope; expected some of events, control"),
        (f"shop::{SECRET}", "token 'shop': unknown scope; expected some of events"),
        (f":events:{SECRET}", "needs a name"),
        ("shop:events:", "token 'shop': a secret may contain only letters"),
        ("shop:events:pass word and more of it all", "token 'shop': a secret may contain only letters"),
        ("shop:events:hunter2", "token 'shop' can be guessed.*128.*token_urlsafe"),
        (f"shop:events:{OTHER[:30]}", "can be guessed"),
        ("shop:events:" + "1234567890" * 3, "can be guessed"),
        ("shop:events:" + "ab" * 40, "can be guessed"),
        ("{}", "expected JSON like"),
        ("[1]", "expected JSON like"),
        ("[", "expected JSON like"),
        (json.dumps([{"name": "a", "scopes": [], "secret": SECRET}]), "token 'a' has no scopes"),
        (json.dumps([{"name": "a", "scopes": ["events"], "secret": SECRET, "x": 1}]), "expected JSON like"),
    ],
)
def test_a_token_that_cannot_be_used_is_refused_without_showing_its_secret(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        read_tokens(text)
    for secret in (SECRET, OTHER, "hunter2"):
        assert secret not in str(caught.value)


def test_what_is_no_token_is_refused() -> None:
    with pytest.raises(TypeError, match="expected Token"):
        find_tokens(cast(Any, [SECRET]))


def test_a_secret_is_not_kept() -> None:
    token = Token("shop", EVENTS, SECRET)
    assert SECRET not in repr(token)
    assert SECRET not in repr([getattr(token, name) for name in Token.__slots__])
    assert SECRET not in repr(WebOptions(tokens=(token,)))


def test_an_old_and_a_new_secret_can_be_valid_together() -> None:
    old, new = Token("shop", EVENTS, SECRET), Token("shop", EVENTS, OTHER)
    assert match_token([old, new], SECRET.encode()) is old
    assert match_token([old, new], OTHER.encode()) is new
    for unknown in (b"", SECRET.encode() + b"x", b"\xff" * 40):
        assert match_token([old, new], unknown) is None


def test_every_token_is_compared_whichever_was_presented(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the time reveals neither which token matched nor how much of it."""
    compared = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append(other)
        return one == other

    monkeypatch.setattr("hmac.compare_digest", compare)
    tokens = [Token("a", EVENTS, SECRET), Token("b", EVENTS, OTHER), Token("c", EVENTS, SECRET + "c")]
    for presented in (SECRET, OTHER, SECRET + "c", "unknown"):
        match_token(tokens, presented.encode())
    assert len(compared) == 4 * 3
    assert {len(digest) for digest in compared} == {32}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"auth": "None"}, "auth='None': expected None"),
        ({"auth": "none", "tokens": (Token("a", EVENTS, SECRET),)}, "give one of the two"),
        ({"max_body": 0}, "max_body=0: expected more than 0"),
        ({"body_timeout": -1}, "body_timeout=-1"),
        ({"max_batch": -1}, "max_batch=-1"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WebOptions(**options)


def test_a_str_in_place_of_a_tuple_is_refused() -> None:
    with pytest.raises(TypeError, match="allowed_hosts: expected a tuple"):
        WebOptions(allowed_hosts=cast(Any, "shop.example"))
