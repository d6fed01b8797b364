"""`:name` as users write it, `$1` as the server wants it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

# A colon in a string, a quoted name, a comment or a cast is none of ours.
_TOKEN = re.compile(
    r"""[eE]'(?:[^'\\]|\\.|'')*'
      | '(?:[^']|'')*'
      | "(?:[^"]|"")*"
      | \$(?P<tag>[A-Za-z_]\w*|)\$.*?\$(?P=tag)\$
      | --[^\n]*
      | /\*.*?\*/
      | (?<![:\w]):(?P<name>[A-Za-z_]\w*)""",
    re.VERBOSE | re.DOTALL,
)


@lru_cache(maxsize=1_000)
def to_positional(sql: str) -> tuple[str, tuple[str, ...]]:
    """The statement with numbers, and which name has which."""
    numbers: dict[str, int] = {}

    def number(token: re.Match[str]) -> str:
        name = token["name"]
        return token[0] if name is None else f"${numbers.setdefault(name, len(numbers) + 1)}"

    return _TOKEN.sub(number, sql), tuple(numbers)


def bind(sql: str, values: Mapping[str, Any]) -> tuple[str, list[Any]]:
    statement, names = to_positional(sql)
    return statement, [values[name] for name in names]
