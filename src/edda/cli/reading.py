"""Values on the command line: JSON, `name=value`, and files of it."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
import msgspec


def parse_json(option: str, text: str) -> Any:
    """`@file` and `-` (standard input) mean what is in there."""
    try:
        return msgspec.json.decode(_read_source(text))
    except (msgspec.DecodeError, OSError, UnicodeError) as error:
        raise click.UsageError(f"{option}: expected JSON, or @file, or - for standard input: {error}") from error


def _read_source(text: str) -> str:
    if text == "-":
        return sys.stdin.read()
    return Path(text[1:]).read_text("utf-8") if text.startswith("@") else text


def read_object(option: str, text: str) -> dict[str, Any]:
    value = parse_json(option, text)
    if not isinstance(value, dict):
        raise click.UsageError(f'{option}: expected a JSON object, such as \'{{"order_id": "A-17"}}\'')
    return value


def parse_pairs(option: str, pairs: Iterable[str]) -> dict[str, Any]:
    """A value that is JSON is taken as such, and everything else as text: `count=3`, `id=A-17`, `id='"17"'`."""
    found: dict[str, Any] = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator or not name:
            raise click.UsageError(f"{option} {pair!r}: expected name=value")
        found[name] = _as_value(value)
    return found


def _as_value(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
