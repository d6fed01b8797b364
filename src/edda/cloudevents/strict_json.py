"""Strict JSON: UTF-8, no duplicate keys, no NaN, and limits for depth and length of numbers."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from typing import Any, TypeVar

import msgspec
from msgspec import Raw

from edda.errors import EventError

MAX_DEPTH = 64
MAX_DIGITS = 4_300
"""Of a number, with sign and point: Python refuses longer integers."""
MAX_EXPONENT_DIGITS = 9
"""Decimal refuses much longer exponents."""

exact = msgspec.json.Decoder(float_hook=Decimal)
"""Reads numbers without losing a digit; does not fail for JSON that was checked here."""

_RAW = msgspec.json.Decoder(Raw)
_OBJECT = msgspec.json.Decoder(dict[str, Raw])
_ARRAY = msgspec.json.Decoder(list[Raw])

_NOT_JSON = "is not JSON (RFC 8259)"

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"')
_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))

T = TypeVar("T")


class _NotStrictError(ValueError):
    pass


def read_object(body: bytes, *, depth: int) -> dict[str, Raw]:
    """The members of an object, after checking its whole text."""
    members = _decode(_OBJECT, "body", body, "must be an object in JSON")
    _check("body", body, depth)
    return members


def read_raw(body: bytes, name: str) -> Raw:
    """The checked text of a value, without surrounding white space."""
    raw = _decode(_RAW, name, body)
    _check(name, body, MAX_DEPTH)
    return raw


def split_array(body: bytes) -> list[Raw]:
    """The items of an array; the caller checks each of them."""
    return _decode(_ARRAY, "body", body, "must be an array in JSON")


def _decode(decoder: msgspec.json.Decoder[T], name: str, body: bytes, misfit: str = _NOT_JSON) -> T:
    try:
        body.decode()
        return decoder.decode(body)
    except UnicodeDecodeError:
        raise _refusal(name, "is not UTF-8") from None
    except msgspec.ValidationError:
        raise _refusal(name, misfit) from None
    except msgspec.DecodeError:
        raise _refusal(name, _NOT_JSON) from None
    except RecursionError:
        raise _refusal(name, f"is nested more than {MAX_DEPTH} levels deep") from None


def _check(name: str, body: bytes, depth: int) -> None:
    """Checks that msgspec does not make. The depth comes first, because the standard library's decoder is recursive."""
    try:
        _check_depth(body, depth)
        _CHECKER.decode(body.decode())
    except _NotStrictError as refused:
        raise _refusal(name, str(refused)) from None
    except ValueError:  # both decoders must accept the text
        raise _refusal(name, _NOT_JSON) from None


def _refusal(name: str, problem: str) -> EventError:
    return EventError(f"the {name} {problem}", attribute=None if name == "body" else name)


def _check_depth(body: bytes, depth: int) -> None:
    if body.count(b"[") + body.count(b"{") <= depth:
        return
    brackets = _STRING.sub(b"", body).translate(_BRACKETS, _NO_BRACKETS)
    for _ in range(depth):
        if not brackets:
            return
        brackets = brackets.replace(b"[]", b"")  # removes the innermost level everywhere
    if brackets:
        raise _NotStrictError(f"is nested more than {MAX_DEPTH} levels deep")


def _check_keys(pairs: list[tuple[str, Any]]) -> None:
    if len(pairs) > 1 and len(dict(pairs)) != len(pairs):
        raise _NotStrictError("has a key twice in the same object")


def _check_number(text: str) -> None:
    if len(text) > MAX_DIGITS:
        raise _NotStrictError(f"has a number of more than {MAX_DIGITS:,} digits")


def _check_fraction(text: str) -> None:
    _check_number(text)
    exponent = text.lower().partition("e")[2]
    if len(exponent.lstrip("+-")) > MAX_EXPONENT_DIGITS:
        raise _NotStrictError(f"has a number whose exponent has more than {MAX_EXPONENT_DIGITS} digits")


def _refuse_constant(_: str) -> None:
    raise _NotStrictError("has NaN or Infinity, which JSON does not have")


# Called for its checks only: the standard library has the only decoder that reports every pair of an object.
_CHECKER = json.JSONDecoder(
    object_pairs_hook=_check_keys,
    parse_int=_check_number,
    parse_float=_check_fraction,
    parse_constant=_refuse_constant,
)
