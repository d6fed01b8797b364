"""`python -m tests.vocabulary`: fails on words that the project has a conventional word for.

A reader who knows asyncio, SQL and durable execution must not need a glossary. Each word below was once a private name
of a thing that the field has a name for; the second column is that name. `make check` runs this.
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

WORDS = {
    r"absorb(s|ed|ing)?": "read (an inbox)",
    r"birth(s)?|unborn|newborn|nursery|heir(s)?": "create, start, successor",
    r"bundle(s|d)?": "run write",
    r"bur(y|ied|ies|ying)": "remove (a dead worker)",
    r"crew|roster|sights?|glance(s|d)?": "workers, queries, look-up",
    r"doubt(s|ed|ful)?": "recheck, uncertain",
    r"excuse(s|d)?": "error page, error response",
    r"herald(s)?": "hooks",
    r"horizon": "scan limit",
    r"judge(s|d)?|judg(e)?ment(s)?|verdict(s)?": "decide, decision, outcome policy",
    r"lore": "definitions",
    r"mailbox(es)?": "inbox",
    r"nudge(s|d)?": "wake",
    r"steer(s|ed|ing)?": "admin",
    r"stray(s|ed)?": "late event, unknown claim",
    r"tenure(s)?": "held transaction",
    r"veil(s|ed)?": "redact",
}
"""Nowhere: neither in names nor in prose."""

NAMES = {
    r"letters?|mails?|mailed": "inbox item, signal",
    r"desks?|lanes?|memos?": "thread, cache",
    r"dispatch(es|ed)|outgoing": "staged event, outbox event",
    r"facts?": "run value",
    r"floors?": "cursor",
    r"forwarder": "staged event mover",
    r"guests?|joints?": "shared transaction, caller's transaction",
    r"patience": "timeout, grace",
    r"pulses?": "heartbeat",
    r"shapes?": "match paths, type adapter, icon",
    r"sched|scheds": "open run",
    r"told|tells?|says?|said|heard|hears?": "notify, format, fields",
}
"""Not as a part of a name in the source; in prose they are English words."""

CONSTANTS = re.compile(r"_?(MOST|LEAST|LONGEST|SHORTEST)_\w+|\w+_PATIENCE")
"""Limits are called MAX_ and MIN_, and times after which something is given up `_TIMEOUT`."""

Found = tuple[Path, int, str, str]
"""File, line, word, and the word to use instead."""

_PROSE = re.compile(rf"\b({'|'.join(WORDS)})\b", re.IGNORECASE)
_NAME = re.compile(rf"^({'|'.join([*WORDS, *NAMES])})$", re.IGNORECASE)
_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
TEXTS = ("*.md", "*.sql", "*.html", "*.js", "*.css", "*.toml")


def main() -> int:
    found = [*(_in_source()), *(_in_texts())]
    for path, line, word, instead in found:
        print(f"{path.relative_to(ROOT)}:{line}: {word!r}; here we say: {instead}")
    print(f"{len(found)} private words" if found else "no private words")
    return int(bool(found))


def _in_source() -> Iterator[Found]:
    for path in sorted((ROOT / "src").rglob("*.py")):
        yield from find_in_python(path, path.read_text("utf-8"))


def find_in_python(path: Path, source: str) -> Iterator[Found]:
    """In names, comments and strings."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME:
            if CONSTANTS.fullmatch(token.string):
                yield path, token.start[0], token.string, "MAX_, MIN_, _TIMEOUT"
            for part in _PARTS.findall(token.string):
                if _NAME.match(part):
                    yield path, token.start[0], token.string, _instead(part, WORDS | NAMES)
        elif token.type in (tokenize.COMMENT, tokenize.STRING):
            yield from find_in_prose(path, token.start[0], token.string)


def _in_texts() -> Iterator[Found]:
    paths = [path for pattern in TEXTS for folder in ("src", "docs") for path in (ROOT / folder).rglob(pattern)]
    for path in sorted([*paths, *ROOT.glob("*.md")]):
        yield from find_in_prose(path, 1, path.read_text("utf-8"))


def find_in_prose(path: Path, line: int, text: str) -> Iterator[Found]:
    for match in _PROSE.finditer(text):
        yield path, line + text.count("\n", 0, match.start()), match.group(), _instead(match.group(), WORDS)


def _instead(word: str, table: dict[str, str]) -> str:
    return next(instead for pattern, instead in table.items() if re.fullmatch(pattern, word, re.IGNORECASE))


if __name__ == "__main__":
    sys.exit(main())
