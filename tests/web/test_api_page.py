"""The reference page of the control API matches the table of operations."""

from __future__ import annotations

from .api_page import PAGE, write_page


def test_the_page_is_what_the_table_says() -> None:
    assert PAGE.read_text() == write_page(), "run: python -m tests.web.api_page"
