"""Reading page by page."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from edda.cli.options import TIME
from edda.cli.output import read_all
from edda.control.views import Page

NOON = datetime(2026, 1, 31, 12, 0, 0, 7, UTC)
PAGES = {None: Page((1, 2), "a"), "a": Page((3,), None, NOON)}


async def read(cursor: str | None, size: int) -> Page[int]:
    return PAGES[cursor]


async def test_reading_all_pages_prints_the_scan_limit(capsys: pytest.CaptureFixture[str]) -> None:
    assert await read_all(read, None) == [1, 2, 3]
    said = capsys.readouterr()
    assert said.out == ""
    assert "ids were searched back to 2026-01-31T12:00:00.000007+00:00" in said.err
    assert TIME.convert(said.err.split()[-5], None, None) == NOON


async def test_reading_some_pages_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert await read_all(read, 2) == [1, 2]
    assert capsys.readouterr().err == ""
