"""Geometry of bars, ticks and columns, formats of durations, and contrast of colours."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edda.control.views import AttemptView, Bar, BarState, Timeline
from edda.viewer import templating
from edda.viewer.overview import layout_bars
from edda.viewer.request import QueryParams
from edda.viewer.waterfall import draw

BEGIN = datetime(2026, 11, 15, 22, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return BEGIN + timedelta(seconds=seconds)


def bar(since: float, until: float | None, attempts: tuple[AttemptView, ...] = ()) -> Bar:
    return Bar("charge:1", "charge", "step", BarState.DONE, at(since), None if until is None else at(until), attempts)


def test_a_bar_is_where_its_time_is() -> None:
    (row,) = draw(Timeline(1, at(0), at(10), (bar(2.5, 7.5),))).rows
    assert (row.x, row.width, row.seconds, row.is_open) == (25, 50, 5, False)


def test_what_is_not_over_reaches_to_the_end() -> None:
    (row,) = draw(Timeline(1, at(0), at(10), (bar(4, None),))).rows
    assert (row.x, row.x + row.width, row.is_open) == (40, 100, True)


def test_a_bar_without_duration_is_visible() -> None:
    rows = draw(Timeline(1, at(0), at(1e6), (bar(0, 0), bar(1e6, 1e6)))).rows
    assert all(row.width > 0 and row.x + row.width <= 100 for row in rows)


def test_attempts_are_drawn_if_there_were_several() -> None:
    tries = (AttemptView(1, at(0), at(1), False), AttemptView(2, at(4), None))
    (row,) = draw(Timeline(1, at(0), at(10), (bar(0, None, attempts=tries),))).rows
    assert [(span.x, span.tone) for span in row.attempts] == [(0, "bad"), (40, "busy")]


def test_the_logarithmic_scale_shows_short_steps_beside_long_waits() -> None:
    day = 86_400
    timeline = Timeline(1, at(0), at(3 * day), (bar(0, 0.02), bar(0.02, 3 * day - 1), bar(3 * day - 1, 3 * day)))
    assert draw(timeline).rows[0].width < 1
    spread = draw(timeline, even=True).rows
    assert spread[0].width > 5
    assert spread[0].x < spread[1].x < spread[2].x


times = st.floats(0, 1e6, allow_nan=False)


@given(st.lists(st.tuples(times, times), max_size=20), st.booleans())
def test_no_bar_leaves_the_drawing(spans: list[tuple[float, float]], even: bool) -> None:
    bars = tuple(bar(min(span), max(span)) for span in spans)
    drawing = draw(Timeline(1, at(0), at(1e6), bars), even=even)
    assert all(row.x >= 0 and row.x + row.width <= 100.01 for row in drawing.rows)
    assert len(drawing.ticks) <= 7


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), max_size=60))
def test_no_column_leaves_its_plot(counts: list[tuple[int, int]]) -> None:
    one, two = [first for first, _ in counts], [second for _, second in counts]
    plot = layout_bars([""] * len(counts), [("good", one), ("bad", two)])
    assert plot.total == sum(one) + sum(two)
    for column in plot.columns:
        assert all(part.y >= 0 and part.y + part.height <= 100.01 for part in column.parts)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "0 ms"), (0.24, "240 ms"), (3.21, "3.2 s"), (60, "1 min"), (250, "4 min 10 s"), (183_600, "2 d 3 h")],
)
def test_durations_have_two_units_at_most(seconds: float, said: str) -> None:
    assert templating.format_duration(seconds) == said


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(1, "just now"), (180, "3 min ago"), (-7200, "in 2 h"), (90_000, "1 d ago"), (-1, "in a moment")],
)
def test_times_are_relative_to_now(seconds: float, said: str) -> None:
    assert templating.format_relative(BEGIN, at(seconds)) == said


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=20,
    )
)
def test_json_in_pieces_is_the_same_text(value: object) -> None:
    text = templating.format_json(value)
    assert "".join(piece for _, piece in templating.tokenize_json(text)) == text


def test_a_chip_adds_and_takes_away_its_states() -> None:
    query = QueryParams.read(b"status=failed&q=x")
    assert str(query.toggle("status", ("parked",))) == "q=x&status=failed&status=parked"
    assert str(query.toggle("status", ("failed",))) == "q=x"


# Colours


def read_themes() -> list[dict[str, str]]:
    css = (templating.read_file("page.css") or b"").decode()
    blocks = re.findall(r":root(?:\.dark|:not\(\.light\))? \{(.*?)\}", css, re.DOTALL)
    return [dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6});", block)) for block in blocks]


def brightness(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((brightness(one), brightness(other)))
    return (high + 0.05) / (low + 0.05)


def test_every_text_can_be_read() -> None:
    """WCAG AA: 4.5 to 1 for text, 3 to 1 for shapes."""
    light, dark, system_dark = read_themes()
    assert dark == system_dark
    for theme in (light, dark):
        for ground in ("ground", "raised", "sunken", "accent-ground"):
            for ink in ("ink", "soft", "accent", "good", "bad", "busy", "calm", "warn", "gone"):
                assert contrast(theme[ink], theme[ground]) >= 4.5, (ink, ground)
        for bar in ("good-bar", "bad-bar", "busy-bar", "calm-bar", "warn-bar", "gone-bar"):
            assert contrast(theme[bar], theme["raised"]) >= 3, bar
        assert contrast(theme["bad"], theme["bad-ground"]) >= 4.5
        assert contrast(theme["on-accent"], theme["accent"]) >= 4.5
        assert contrast(theme["raised"], theme["bad"]) >= 4.5
