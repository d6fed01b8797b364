"""The pages of the documentation and the code blocks in them.

What stands after the language of a block says what it is for:

    ```python                 run, in order, in one namespace per page; `await` at the top level is allowed
    ```python file=shop.py    written into the page's folder, for later blocks to import or run
    ```bash                   commands: those that touch the page's own files are run, the others must exist
    ```output                 exactly what the block before it printed
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

_FENCE = re.compile(r"^```(\w*)[ ]?(.*)$")


@dataclass(frozen=True)
class Block:
    language: str
    options: str
    text: str
    line: int
    """Where its first line of code is in the page."""

    @property
    def file(self) -> str | None:
        return self.options.removeprefix("file=") if self.options.startswith("file=") else None


def pages() -> list[Path]:
    return [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> Iterator[Block]:
    lines = enumerate(page.read_text().splitlines(), start=1)
    for number, line in lines:
        if opening := _FENCE.match(line):
            text = []
            for _, inner in lines:
                if inner == "```":
                    break
                text.append(inner)
            yield Block(opening[1], opening[2].strip(), "\n".join(text) + "\n", number + 1)
