"""Links lead somewhere, every page can be reached, and what the README promises has a test."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .pages import DOCS, ROOT, name, pages

_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_TEST = re.compile(r"`(tests/[\w/]+\.py)`")


def targets(page: Path) -> list[Path]:
    links = _LINK.findall(page.read_text())
    return [page.parent / link.partition("#")[0] for link in links if "://" not in link and not link.startswith("#")]


@pytest.mark.parametrize("page", pages(), ids=name)
def test_every_link_leads_to_a_file(page: Path) -> None:
    assert [str(target) for target in targets(page) if not target.exists()] == []


def test_every_page_is_reached_from_the_index() -> None:
    linked = {target.resolve() for target in targets(DOCS / "README.md")}
    assert [
        name(page) for page in sorted(DOCS.rglob("*.md")) if page != DOCS / "README.md" and page not in linked
    ] == []


@pytest.mark.parametrize("page", pages(), ids=name)
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    named = _TEST.findall(page.read_text())
    assert [test for test in named if not (ROOT / test).exists()] == []


def test_every_promise_names_a_test_that_can_fail() -> None:
    rows = re.findall(r"^\| (P\d+) \|.*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    with_tests = re.findall(r"^\| (P\d+) \|.*`tests/.*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert rows
    assert rows == with_tests
