"""A wait and an event meet if and only if the event has the values that the wait asks for."""

from __future__ import annotations

import json
import re
from datetime import datetime
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from typing import Any
from uuid import UUID
from zlib import crc32

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from edda.core.codec import Codec
from edda.core.event_match import bucket, describe, event_keys, match_paths, parse_match, wait_key

TYPE = "payment.completed"


def read(text: str) -> Any:
    return json.loads(text, parse_float=Decimal)


def meets(match: dict[str, Any], data: str = "{}", **attributes: Any) -> bool:
    match = parse_match(match)
    keys = event_keys(TYPE, attributes, read(data), [match_paths(match)], None)
    return wait_key(TYPE, match) in [key.wait_key for key in keys]


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (1, "1"),
        (1, "1.0"),
        (1.0, "1"),
        (1, "1e0"),
        (100, "1E2"),
        (Decimal("1e2"), "100.00"),
        (0, "-0.0"),
        (-0.0, "0"),
        (-5, "-5.0"),
        (0.1, "0.1"),
        (0.1, "0.10"),
        (1e23, "1e23"),
        (2**70, "1180591620717411303424"),
        (Decimal("1e999999999"), "10e999999998"),
    ],
)
def test_numbers_are_equal_by_value_however_they_are_written(asked: Any, text: str) -> None:
    assert meets({"a": asked}, f'{{"a": {text}}}')


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (0.1, "0.1000000000000000055511151231257827"),
        (2**53, "9007199254740993"),
        (2**53 + 1, "9007199254740992"),
        (1, "1e999999999"),
        (1, "-1"),
        (10, "1"),
        (12, "21"),
    ],
)
def test_no_digit_of_a_number_is_lost(asked: Any, text: str) -> None:
    assert not meets({"a": asked}, f'{{"a": {text}}}')


@pytest.mark.parametrize(
    ("asked", "text"),
    [(1, '"1"'), ("1", "1"), (True, "1"), (1, "true"), (None, "false"), ("", "null"), (0, "false"), ("null", "null")],
)
def test_values_of_different_kinds_are_different(asked: Any, text: str) -> None:
    assert not meets({"a": asked}, f'{{"a": {text}}}')


def test_null_is_a_value_and_a_missing_path_is_not() -> None:
    assert meets({"a": None}, '{"a": null}')
    assert not meets({"a": None}, "{}")


@pytest.mark.parametrize(("asked", "text"), [("A", '"a"'), ("a ", '"a"'), ("é", r'"e\u0301"'), ("a", '"ab"')])
def test_text_is_equal_by_its_characters(asked: str, text: str) -> None:
    assert not meets({"a": asked}, f'{{"a": {text}}}')


def test_any_character_can_be_matched() -> None:
    assert meets({"a": "\x00"}, r'{"a": "\u0000"}')
    assert meets({"a": "😀"}, r'{"a": "\ud83d\ude00"}')


def test_half_a_surrogate_pair_in_an_event_is_no_obstacle() -> None:
    keys = {event_keys(TYPE, {}, {"a": text}, ['["a"]'], None) for text in ("\ud800", "\ud801", "😀", "\ud83d\ude00")}
    assert len(keys) == 4


def test_lists_are_equal_by_order_and_objects_by_keys() -> None:
    assert meets({"a": [1, 2]}, '{"a": [1.0, 2]}')
    assert not meets({"a": [1, 2]}, '{"a": [2, 1]}')
    assert not meets({"a": [1, [2]]}, '{"a": [[1], 2]}')
    assert meets({"a": {"x": 1, "y": 2}}, '{"a": {"y": 2, "x": 1.0}}')
    assert not meets({"a": {"x": 1}}, '{"a": {"x": 1, "y": 2}}')


@pytest.mark.parametrize(
    ("path", "data"),
    [
        ("a.b", '{"a": {"b": 1}}'),
        (r"a\.b", '{"a.b": 1}'),
        (r"a\\.b", r'{"a\\": {"b": 1}}'),
        ("a\\", r'{"a\\": 1}'),
        ("a.0.x", '{"a": [{"x": 1}]}'),
        ("0", "[1]"),
        ("a.0", '{"a": {"0": 1}}'),
        ("a.00", '{"a": {"00": 1}}'),
        ("a.", '{"a": {"": 1}}'),
        (r"\@subject", '{"@subject": 1}'),
    ],
)
def test_a_path_leads_into_the_data(path: str, data: str) -> None:
    assert meets({path: 1}, data)


@pytest.mark.parametrize(
    ("path", "data"),
    [
        ("a.b", '{"a.b": 1}'),
        (r"a\.b", '{"a": {"b": 1}}'),
        ("a.00.x", '{"a": [{"x": 1}]}'),
        ("a.-1", '{"a": [1]}'),
        ("a.1", '{"a": [1]}'),
        ("a.²", '{"a": [1, 1, 1]}'),
        ("a.b", '{"a": 5}'),
        ("a.0", '{"a": "1"}'),
        ("a", "[1]"),
        ("a", "null"),
        ("a", '"a"'),
    ],
)
def test_a_path_that_leads_nowhere_meets_nothing(path: str, data: str) -> None:
    assert not meets({path: 1}, data)


def test_data_that_is_not_json_has_no_paths() -> None:
    assert event_keys(TYPE, {}, b"\x00", ['["a"]'], None) == ()
    assert len(event_keys(TYPE, {}, b"\x00", ["[]"], None)) == 1


def test_all_values_of_a_match_have_to_be_there() -> None:
    match = {"a": "x", "b": "y"}
    assert meets(match, '{"b": "y", "a": "x", "c": 1}')
    assert not meets(match, '{"a": "x"}')
    assert not meets(match, '{"a": "y", "b": "x"}')


def test_values_that_look_like_the_key_s_own_marks_do_not_confuse_it() -> None:
    assert meets({"a": "s1:y", "b": ""}, '{"a": "s1:y", "b": ""}')
    assert not meets({"a": "x,s1:y", "b": ""}, '{"a": "x", "b": "y"}')
    assert wait_key(TYPE, {"a": "b", "c": "d"}) != wait_key(TYPE, {"a": "bd", "c": ""})


def test_an_attribute_is_not_data_of_the_same_name() -> None:
    assert meets({"@subject": "S"}, subject="S")
    assert not meets({"@subject": "S"}, '{"subject": "S"}')
    assert not meets({"subject": "S"}, subject="S")
    assert not meets({"@subject": "S"}, subject=None)


@pytest.mark.parametrize(("asked", "sent"), [(5, 5), (5, "5"), ("5", 5), (True, "true"), ("true", True), (-1, "-1")])
def test_attributes_are_equal_as_text_because_a_header_is_text(asked: Any, sent: Any) -> None:
    assert meets({"@sequence": asked}, sequence=sent)


@pytest.mark.parametrize(("asked", "sent"), [(5, "05"), (1, True), (True, "True"), ("S", "s"), (5, "")])
def test_attributes_of_other_text_are_different(asked: Any, sent: Any) -> None:
    assert not meets({"@sequence": asked}, sequence=sent)


def test_a_key_depends_on_the_type_and_not_on_the_order_of_the_paths() -> None:
    assert wait_key("t", {}) != wait_key("T", {})
    assert wait_key(TYPE, {"b": 1, "a": 2}) == wait_key(TYPE, {"a": 2, "b": 1})
    assert len(wait_key(TYPE, {})) == 16


def test_a_key_is_the_same_in_every_release_because_it_is_stored() -> None:
    match = {"order_id": "A-17", "amount": 9.5, "@subject": "x", "items": [None, {"ok": True}]}
    assert wait_key(TYPE, match).hex() == "5e84c0aa16b668877cf0608b4775fa2e"
    assert wait_key(TYPE, match, "run-1").hex() == "18eb308b47643c9950255a31eef4c79c"


def test_an_event_has_a_key_for_every_shape_that_it_fits() -> None:
    data = {"order_id": "A-17", "region": "eu"}
    matches: list[dict[str, Any]] = [{}, {"order_id": "A-17"}, {"order_id": "A-17", "region": "eu"}, {"amount": 1}]
    keys = event_keys(TYPE, {}, data, map(match_paths, matches), None)
    assert [key.wait_key for key in keys] == [wait_key(TYPE, match) for match in matches[:3]]
    assert all(key.stored_key == key.wait_key for key in keys)


def test_an_event_for_one_run_is_kept_under_that_run_s_own_key() -> None:
    match = {"order_id": "A-17"}
    (key,) = event_keys(TYPE, {}, match, [match_paths(match)], "run-1")
    assert key.wait_key == wait_key(TYPE, match)
    assert key.stored_key == wait_key(TYPE, match, "run-1")
    assert len({key.wait_key, key.stored_key, wait_key(TYPE, match, "run-2")}) == 3


def test_a_shape_is_the_sorted_paths_in_ascii() -> None:
    assert match_paths({"b": 1, "a.é": 2, "\x00": 3}) == r'["\u0000","a.\u00e9","b"]'
    assert match_paths({}) == "[]"


def test_a_shape_has_a_limit() -> None:
    assert len(match_paths({"a" * 1_596: 1})) == 1_600
    with pytest.raises(
        ValueError, match="take 1,601 bytes, more than the limit of 1,600; match on fewer or shorter paths"
    ):
        match_paths({"a" * 1_597: 1})


def test_a_bucket_is_the_key_s_checksum() -> None:
    key = wait_key(TYPE, {})
    assert bucket(key) == crc32(key) % 256
    assert {bucket(wait_key(TYPE, {"n": n})) for n in range(5_000)} == set(range(256))


class Colour(Enum):
    RED = "red"


class Level(IntEnum):
    HIGH = 3


class Name(StrEnum):
    BO = "bo"


class Loud(float):
    def __repr__(self) -> str:
        return f"Loud({float(self)})"


@pytest.mark.parametrize(
    ("given", "normal"),
    [
        (UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (Colour.RED, "red"),
        (Level.HIGH, 3),
        (Name.BO, "bo"),
        (Loud(0.5), 0.5),
        (Decimal("1.50"), Decimal("1.50")),
        ((1, [Colour.RED]), [1, ["red"]]),
        ({"id": UUID(int=0)}, {"id": "00000000-0000-0000-0000-000000000000"}),
        (True, True),
        (None, None),
    ],
)
def test_a_match_is_reduced_to_json_values(given: Any, normal: Any) -> None:
    (value,) = parse_match({"a": given}).values()
    assert (type(value), value) == (type(normal), normal)


def test_no_match_is_an_empty_one() -> None:
    assert parse_match(None) == parse_match({}) == {}


def test_a_number_that_prints_itself_in_its_own_way_is_still_that_number() -> None:
    assert meets({"a": Loud(0.5)}, '{"a": 0.5}')


@pytest.mark.parametrize(
    ("match", "error", "message"),
    [
        (["a"], TypeError, """match: expected a dict like {"order_id": "A-17"}, got list"""),
        ({1: 2}, TypeError, 'match: expected a path like "order.id", got 1; write it as text'),
        ({"": 1}, ValueError, 'match: a path is empty; name a field of the data like "order.id"'),
        ({"@": 1}, ValueError, "match: '@' is not an attribute, whose name has only lowercase letters and digits"),
        ({"@data.id": 1}, ValueError, "match: '@data.id' is not an attribute"),
        ({"@Subject": "x"}, ValueError, "match: '@Subject' is not an attribute"),
        ({"@subject": None}, TypeError, "match['@subject']: an attribute is text, a whole number, True or False"),
        ({"@subject": 1.5}, TypeError, "match['@subject']: an attribute is text, a whole number, True or False"),
        ({"a": float("nan")}, ValueError, "match['a']: is nan, which JSON does not have"),
        ({"a": Decimal("sNaN")}, ValueError, "match['a']: is sNaN, which JSON does not have"),
        ({"a": Decimal("-Infinity")}, ValueError, "match['a']: is -Infinity, which JSON does not have"),
        ({"a": {"b": [0, float("inf")]}}, ValueError, "match['a'].b[1]: is inf, which JSON does not have"),
        ({"a": 10**4_300}, ValueError, "match['a']: has more than 4,300 digits"),
        ({"a": "\ud800"}, ValueError, "match['a']: has half a surrogate pair"),
        ({"\udfff": 1}, ValueError, r"match['\udfff']: has half a surrogate pair"),
        ({"a": {1: 2}}, TypeError, "match['a']: has the key 1, but the keys of a JSON object are text"),
        ({"a": [datetime(2024, 1, 2)]}, TypeError, "match['a'][0]: expected text, a number, True, False, None, a list"),
        ({"a": b"x"}, TypeError, "got bytes; give the text or number that the event has there"),
    ],
)
def test_what_no_event_can_have_is_refused_by_name(match: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        parse_match(match)


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ValueError, match="is nested more than 64 levels deep"):
        parse_match({"a": loop})


def test_a_match_is_described_for_people() -> None:
    match = parse_match({"order_id": "A-17", "@subject": "x", "price": Decimal("1.50"), "ok": None})
    assert describe(TYPE, match) == f'{TYPE} where order_id = "A-17" and @subject = "x" and price = 1.50 and ok = null'
    assert describe(TYPE, {}) == TYPE


def test_a_long_value_is_described_in_short() -> None:
    assert describe(TYPE, {"a": "x" * 1_000}) == f'{TYPE} where a = "{"x" * 58}…'


names = st.sampled_from(["a", "b", "0", "1", "a.b", "@a", "\\"])
numbers = st.integers(-2, 11) | st.sampled_from([Decimal(text) for text in ("1.0", "-0.0", "10e-1", "0.5", "1e1")])
scalars = st.none() | st.booleans() | numbers | st.sampled_from(["", "1", "true", "a", "a,b", "s1:a", "é"])
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3), max_leaves=8
)
attribute_values = st.sampled_from(["", "1", "true", "a", 0, 1, True, False])


def escaped(name: str) -> str:
    return re.sub(r"([\\.@])", r"\\\1", name)


def places(data: Any, path: str = "") -> dict[str, Any]:
    """Every path there is in the data, found by going everywhere instead of by reading paths."""
    found = {path: data} if path else {}
    parts = enumerate(data) if isinstance(data, list) else data.items() if isinstance(data, dict) else ()
    for name, part in parts:
        found |= places(part, f"{path}.{escaped(str(name))}" if path else escaped(str(name)))
    return found


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return bool(one == other)


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


@st.composite
def events_and_matches(draw: st.DrawFn) -> tuple[dict[str, Any], Any, dict[str, Any]]:
    """Half of the asked values come from the event itself, else hardly any would be there."""
    attributes = draw(st.dictionaries(st.sampled_from(["subject", "sequence"]), attribute_values))
    data = draw(values)
    present = places(data)
    paths = st.sampled_from([*present, "a", "b.0", "a.b", r"a\.b"])
    match = {path: draw(st.just(present.get(path, 1)) | values) for path in draw(st.lists(paths, max_size=3))}
    for name in draw(st.sets(st.sampled_from(["subject", "sequence"]))):
        match[f"@{name}"] = draw(st.just(attributes.get(name, "a")) | attribute_values)
    return attributes, data, match


@given(events_and_matches())
@example(({}, {"a": {"b": 1}, "a.b": 2}, {"a.b": 2}))
def test_a_wait_meets_an_event_if_and_only_if_its_values_are_there(case: tuple[dict[str, Any], Any, Any]) -> None:
    attributes, data, match = case
    present = places(data)
    texts = {f"@{name}": as_text(value) for name, value in attributes.items()}
    expected = all(
        texts.get(path) == as_text(value) if path[0] == "@" else path in present and equal(present[path], value)
        for path, value in match.items()
    )
    keys = event_keys(TYPE, attributes, data, [match_paths(match)], None)
    assert (wait_key(TYPE, parse_match(match)) in [key.wait_key for key in keys]) is expected


@given(events_and_matches())
def test_a_stored_match_has_the_same_key(case: tuple[Any, Any, dict[str, Any]]) -> None:
    codec, match = Codec(), parse_match(case[2])
    assert wait_key(TYPE, codec.decode(codec.encode(match))) == wait_key(TYPE, match)
