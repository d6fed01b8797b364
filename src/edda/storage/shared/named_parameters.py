"""`:name` in a user's statement, rewritten as the driver wants it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

# The alternatives before the last match text in which a colon starts no parameter: strings, quoted names, comments,
# casts. Each database has its own quotes and comments.
_POSTGRES = re.compile(
    r"""[eE]'(?:[^'\\]|\\.|'')*'
      | '(?:[^']|'')*'
      | "(?:[^"]|"")*"
      | \$(?P<tag>[A-Za-z_]\w*|)\$.*?\$(?P=tag)\$
      | --[^\n]*
      | /\*.*?\*/
      | (?<![:\w]):(?P<name>[A-Za-z_]\w*)""",
    re.VERBOSE | re.DOTALL,
)
_MYSQL = re.compile(
    r"""'(?:[^'\\]|\\.|'')*' | "(?:[^"\\]|\\.|"")*" | `[^`]*`
      | --(?=\s)[^\n]* | \#[^\n]* | /\*.*?\*/ | ::\w*
      | :(?P<name>[A-Za-z_]\w*)""",
    re.VERBOSE | re.DOTALL,
)


@lru_cache(maxsize=1_000)
def to_positional(sql: str) -> tuple[str, tuple[str, ...]]:
    """For asyncpg: `$1`, `$2`, …, and the names in that order."""
    numbers: dict[str, int] = {}

    def number(token: re.Match[str]) -> str:
        name = token["name"]
        return token[0] if name is None else f"${numbers.setdefault(name, len(numbers) + 1)}"

    return _POSTGRES.sub(number, sql), tuple(numbers)


def bind_positional(sql: str, values: Mapping[str, Any]) -> tuple[str, list[Any]]:
    statement, names = to_positional(sql)
    return statement, [values[name] for name in names]


@lru_cache(maxsize=1_000)
def to_pyformat(sql: str) -> str:
    """For asyncmy: `%(name)s`, with every other `%` doubled."""
    parts: list[str] = []
    end = 0
    for token in _MYSQL.finditer(sql):
        if name := token["name"]:
            parts += [sql[end : token.start()].replace("%", "%%"), f"%({name})s"]
            end = token.end()
    return "".join([*parts, sql[end:].replace("%", "%%")])
