"""`:name` in a statement, as the driver wants it."""

from __future__ import annotations

import re
from functools import lru_cache

# What is skipped comes first: strings and quoted names, comments, and the two colons of a cast.
_TOKEN = re.compile(
    r"""'(?:[^'\\]|\\.|'')*' | "(?:[^"\\]|\\.|"")*" | `[^`]*`
      | --(?=\s)[^\n]* | \#[^\n]* | /\*.*?\*/ | ::\w*
      | :(?P<name>[A-Za-z_]\w*)""",
    re.VERBOSE | re.DOTALL,
)


@lru_cache(maxsize=1_000)
def pyformat(sql: str) -> str:
    parts: list[str] = []
    end = 0
    for token in _TOKEN.finditer(sql):
        if name := token["name"]:
            parts += [_literal(sql[end : token.start()]), f"%({name})s"]
            end = token.end()
    return "".join([*parts, _literal(sql[end:])])


def _literal(sql: str) -> str:
    return sql.replace("%", "%%")
