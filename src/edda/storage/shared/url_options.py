"""The options behind the `?` of a database URL. An option that no part of Edda reads is an error that names it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches
from urllib.parse import parse_qsl

from edda.core.value_path import did_you_mean

_ARGUMENTS = ("pool_size", "auto_migrate", "engine", "storage", "settings")
"""Arguments of EddaApp that people may put into the URL by mistake."""


def split_options(url: str) -> tuple[str, dict[str, list[str]]]:
    """The URL without its options, and the values of each option in order."""
    bare, _, query = url.partition("?")
    options: dict[str, list[str]] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        options.setdefault(name, []).append(value)
    return bare, options


def refuse_unknown_options(given: Iterable[str], known: Collection[str], database: str) -> None:
    """The error names options and no values, because a value may be a password."""
    for name in given:
        if name not in known:
            raise ValueError(
                f"db_url: {database} URLs have no option {name!r}{_suggest(name, known)} "
                f"(known: {', '.join(sorted(known)) or 'none'})"
            )


def _suggest(name: str, known: Collection[str]) -> str:
    if name in _ARGUMENTS:
        return f"; it is an argument: EddaApp({name}=...)"
    if argument := get_close_matches(name, _ARGUMENTS, n=1):
        return f"; did you mean EddaApp({argument[0]}=...)?"
    return did_you_mean(name, known)
