"""Text for terminals: timelines, tables, escapes, widths."""

from __future__ import annotations

import pytest

from edda.cli.output import Line, display_width, strip_control, table, truncate
from edda.cli.overview import sparkline
from edda.cli.render import draw_timeline
from tests.cli.fake_controller import TIMELINE


def written(line: Line) -> str:
    return "".join(span.text for span in line).rstrip()


def test_a_timeline_shows_attempts_waits_children_and_compensations() -> None:
    assert [written(one) for one in draw_timeline(TIMELINE, 60)] == [
        "• reserve            ▓▓▓···███               4 s, 2 attempts",
        "✉ payment.completed          ░░░░░░░░        3 s",
        "↳ pack → pack-1                     ▓▓▓▓▓    2 s, failed",
        "↶ release                               ███  1 s",
    ]


@pytest.mark.parametrize("width", [20, 80, 300])
def test_a_timeline_fits_the_terminal(width: int) -> None:
    for one in draw_timeline(TIMELINE, width):
        assert display_width(written(one)) <= max(width, 40)


@pytest.mark.parametrize(
    ("hostile", "shown"),
    [
        ("\x1b[2Jgone", "\\x1b[2Jgone"),
        ("\x9b31m", "\\x9b31m"),
        ("a\rb", "a\\rb"),
        ("\u202eevil", "\\u202eevil"),
        ("\u200bhidden", "\\u200bhidden"),
        ("naïve 注文 🎉", "naïve 注文 🎉"),
    ],
)
def test_control_characters_are_escaped(hostile: str, shown: str) -> None:
    assert strip_control(hostile) == shown


def test_a_table_keeps_its_columns_below_each_other_in_every_script() -> None:
    lines = [written(one) for one in table(("A", "B"), [("注文", "x"), ("abc", "y"), ("two\nlines", "z")])]
    assert lines == ["A          B", "注文       x", "abc        y", "two lines  z"]


def test_long_text_is_cut_by_its_display_width() -> None:
    assert truncate("注文の番号", 5) == "注文…"
    assert truncate("short", 5) == "short"


def test_a_sparkline_shows_even_little_things() -> None:
    assert sparkline([0, 1, 50, 100]) == " ▁▄█"
    assert sparkline([]) == ""
    assert sparkline([0, 0]) == "  "
