"""Values come back as they were: with an annotation or without, in the first run and in every replay."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import pathlib
import pickle
import re
import subprocess
import sys
import tracemalloc
import typing
from collections import Counter, OrderedDict, namedtuple
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Annotated, Any, Generic, Literal, NamedTuple, NewType, NotRequired, Optional, TypedDict, TypeVar
from uuid import UUID
from zoneinfo import ZoneInfo

import msgspec
import pydantic
import pytest
import typing_extensions
from hypothesis import given, settings
from hypothesis import strategies as st

from edda.core.codec import Codec, encode_value
from edda.core.signature import Signature
from edda.errors import ArgumentError, PayloadError, PayloadTooLargeError

codec = Codec()
T = TypeVar("T")


def round_trip(value: Any, annotation: Any = Any) -> Any:
    return codec.decode(codec.encode(value), annotation)


def same(one: Any, other: Any) -> bool:
    """Equal, and of the same types all the way down: 1, 1.0 and True are three things."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return len(one) == len(other) and all(
            same(a, b) and same(x, y) for (a, x), (b, y) in zip(one.items(), other.items(), strict=True)
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, set | frozenset):
        return one == other and {(type(item), item) for item in one} == {(type(item), item) for item in other}
    if isinstance(one, float):
        return one == other and math.copysign(1, one) == math.copysign(1, other)
    if isinstance(one, datetime):
        return one == other and str(one.tzinfo) == str(other.tzinfo) and one.fold == other.fold
    return bool(one == other)


class Colour(enum.Enum):
    RED = "red"
    BLUE = ("b", 1)


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Mood(enum.StrEnum):
    GOOD = "good"


class Item(pydantic.BaseModel):
    sku: str
    price: Decimal
    bought: datetime | None = None
    colours: set[Level] = set()


class Order(pydantic.BaseModel):
    id: UUID
    items: list[Item]
    by_day: dict[date, Item] = {}


@dataclasses.dataclass(frozen=True)
class Point:
    x: int
    y: float
    label: str | None = None


@dataclasses.dataclass(frozen=True)
class Place:
    at: Point
    seen: frozenset[date] = frozenset()


@dataclasses.dataclass
class Tree:
    name: str
    children: list[Tree] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Page(Generic[T]):
    rows: list[T]
    next: int | None = None


@dataclasses.dataclass
class PointPage(Page[Point]):
    title: str = ""


class Box(pydantic.BaseModel, Generic[T]):
    content: T


class Shot(msgspec.Struct, frozen=True):
    at: timedelta
    by: Item
    raw: bytes = b""


class Cat(msgspec.Struct, tag="cat"):
    name: str


class Dog(msgspec.Struct, tag="dog"):
    name: str


class Pair(NamedTuple):
    left: Point
    right: Item


class Movie(TypedDict):
    title: str
    director: Point
    year: NotRequired[int]


class LateMovie(typing_extensions.TypedDict):
    star: Point


class ByCard(pydantic.BaseModel):
    kind: Literal["card"] = "card"
    number: str


class ByPost(pydantic.BaseModel):
    kind: Literal["post"] = "post"
    number: str


@dataclasses.dataclass
class Short:
    x: int


@dataclasses.dataclass
class Long:
    x: int
    y: int


Spot = namedtuple("Spot", "a b")
OrderId = NewType("OrderId", int)
Payment = Annotated[ByCard | ByPost, pydantic.Field(discriminator="kind")]
Json = typing_extensions.TypeAliasType("Json", "dict[str, Json] | list[Json] | Level")
ITEM = Item(sku="A", price=Decimal("9.90"), bought=datetime(2024, 1, 1, tzinfo=UTC), colours={Level.HIGH})


# Without an annotation

hashable = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=2**64, max_value=2**200),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(),
    st.binary(),
    st.dates(),
    st.times(),
    st.datetimes(timezones=st.none() | st.just(UTC) | st.sampled_from([timezone(timedelta(hours=5, seconds=7))])),
    st.datetimes(timezones=st.sampled_from([ZoneInfo("Europe/Berlin"), ZoneInfo("America/New_York")])),
    st.timedeltas(),
    st.uuids(),
    st.decimals(allow_nan=False),
)
keys = hashable | st.tuples(hashable, hashable) | st.frozensets(hashable, max_size=3) | st.just("$")
values = st.recursive(
    hashable | st.binary().map(bytearray) | st.sets(keys, max_size=4),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.just("$"), inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)


@given(values)
@settings(max_examples=150, deadline=None)
def test_every_value_comes_back_as_it_was_without_an_annotation(value: Any) -> None:
    assert same(round_trip(value), value)
    assert codec.encode(round_trip(value)) == codec.encode(value)


@pytest.mark.parametrize(
    "value",
    [
        {1: "a", "1": "b"},
        {(1, 2): 3, None: 4, UUID(int=1): 5, True: 6},
        {"$": "tuple", "v": [1]},
        {"a": {"$": 1}},
        ("$", ["$"]),
        (),
        set(),
        [[], {}, "", 0, None],
        2**63,
        -(2**70),
        [10**5000],
        -0.0,
        1e16,
        5e-324,
        'a\x00b\u2028 \\ " é 💥',
        Decimal("1.10"),
        Decimal("-Infinity"),
        datetime(2024, 10, 27, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=1),
        datetime(2024, 3, 31, 2, 30, tzinfo=ZoneInfo("Europe/Berlin")),
        datetime(2024, 1, 1, fold=1),
        time(12, 30, tzinfo=ZoneInfo("Europe/Berlin")),
        time(12, 30, tzinfo=timezone(timedelta(hours=-3))),
        timedelta.min,
        b"\x00\xff",
    ],
)
def test_what_json_cannot_say_is_tagged(value: Any) -> None:
    assert same(round_trip(value), value)


def test_a_plain_value_is_stored_as_the_json_one_would_write() -> None:
    assert codec.encode({"payment_id": "PAY-1", "n": 3, "ok": None}) == b'{"payment_id":"PAY-1","n":3,"ok":null}'


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Colour.RED, "red"),
        (Colour.BLUE, ("b", 1)),
        (Level.HIGH, 2),
        (Mood.GOOD, "good"),
        ({Mood.GOOD: Level.LOW}, {"good": 1}),
        (Counter("aa"), {"a": 2}),
        (OrderedDict(a=1), {"a": 1}),
        (Point(1, 2.0), {"x": 1, "y": 2.0, "label": None}),
        (Spot(1, 2), {"a": 1, "b": 2}),
        (Cat("Tom"), {"type": "cat", "name": "Tom"}),
    ],
)
def test_without_an_annotation_a_richer_type_comes_back_as_its_content(value: Any, plain: Any) -> None:
    assert same(round_trip(value), plain)


def test_a_set_has_the_same_bytes_in_every_process() -> None:
    code = "from edda.core.codec import Codec; print(Codec().encode({'a', 'b', 'c', 'd', 1, (2, 3)}))"
    runs = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": str(seed)}, capture_output=True, check=True
        ).stdout
        for seed in range(1, 4)
    }
    assert len(runs) == 1


# With an annotation


@pytest.mark.parametrize(
    ("value", "annotation"),
    [
        (Colour.BLUE, Colour),
        ([Colour.RED, Level.LOW], list[Colour | Level]),
        ({Level.LOW: Colour.RED}, dict[Level, Colour]),
        (Colour.RED, Literal[Colour.RED]),
        (ITEM, Item),
        ([ITEM], list[Item]),
        ((ITEM, 1), tuple[Item, int]),
        ((ITEM, ITEM), tuple[Item, ...]),
        ({"a": ITEM}, dict[str, Item]),
        ({"a": [None, ITEM]}, dict[str, list[Item | None]]),
        (None, Optional[Item]),  # noqa: UP045 - the old spelling is what is tested
        (Order(id=UUID(int=7), items=[ITEM], by_day={date(2024, 1, 1): ITEM}), Order),
        (Point(1, 2.5, "p"), Point),
        (Place(Point(1, 2.0), frozenset({date(2024, 1, 2)})), Place),
        ({Place(Point(1, 2.0))}, set[Place]),
        ({1, 2}, set[int]),
        (Tree("a", [Tree("b", [Tree("c")])]), Tree),
        (Page([Point(1, 1.0)]), Page[Point]),
        (PointPage([Point(1, 1.0)], title="t"), PointPage),
        (Box[Item](content=ITEM), Box[Item]),
        (Shot(timedelta(1), ITEM, b"\xff"), Shot),
        ([Cat("Tom"), Dog("Tom")], list[Cat | Dog]),
        (Pair(Point(1, 1.0), ITEM), Pair),
        ({"title": "M", "director": Point(1, 1.0)}, Movie),
        ({"star": Point(1, 1.0)}, LateMovie),
        (ByPost(number="1"), Payment),
        (ByPost(number="1"), ByCard | ByPost),
        ([Long(1, 2), Short(1)], list[Short | Long]),
        ([Short(1)], list[Long] | list[Short]),
        (OrderId(3), OrderId),
        (ITEM, Annotated[Item, "remark"]),
        ({"a": [Level.LOW]}, Json),
        ([Point(1, 1.0)], Sequence[Point]),
        ((Point(1, 1.0),), Iterable[Point]),
        ({"a": Point(1, 1.0)}, Mapping[str, Point]),
        (3, int | float),
        (3, float | int),
        (datetime(2024, 1, 1), date | datetime),
        ("2024-01-01", datetime | str),
        (b"x", bytes | str),
    ],
)
def test_an_annotation_brings_the_type_back(value: Any, annotation: Any) -> None:
    restored = round_trip(value, annotation)
    assert same(restored, value)
    assert same(round_trip(restored, annotation), restored)


@given(
    st.builds(
        Item,
        sku=st.text(),
        price=st.decimals(allow_nan=False, allow_infinity=False),
        bought=st.none() | st.datetimes(timezones=st.just(UTC)),
        colours=st.sets(st.sampled_from(Level)),
    )
)
@settings(max_examples=50, deadline=None)
def test_a_model_with_any_fields_is_restored(item: Item) -> None:
    assert round_trip([{"it": item}], list[dict[str, Item]]) == [{"it": item}]


@given(values, st.sampled_from([int, str, float, Item, list[Point], dict[int, Colour], Short | Long, tuple[int, str]]))
@settings(max_examples=100, deadline=None)
def test_decoding_is_a_fixed_point_also_where_the_annotation_lies(value: Any, annotation: Any) -> None:
    first = round_trip(value, annotation)
    assert same(round_trip(first, annotation), first)


@pytest.mark.parametrize("annotation", [int, list[Item], Item, Colour, Literal["b"], Point | None, Movie, pathlib.Path])
def test_where_the_annotation_is_not_true_the_value_comes_back_as_it_is(annotation: Any) -> None:
    assert round_trip({"x": "no"}, annotation) == {"x": "no"}


def test_the_first_of_two_models_that_fit_is_taken() -> None:
    @dataclasses.dataclass
    class Other:
        x: int

    assert round_trip(Other(1), Short | Other) == Short(1)
    assert round_trip(Other(1), Other | Short) == Other(1)  # although to Python the two unions are equal


def test_validators_and_post_init_do_not_run_again() -> None:
    class Doubled(pydantic.BaseModel):
        n: int
        _seen: list[int] = pydantic.PrivateAttr(default_factory=list)

        @pydantic.field_validator("n")
        @classmethod
        def double(cls, n: int) -> int:
            return n * 2

    @dataclasses.dataclass
    class Grown:
        n: int
        made: dataclasses.InitVar[int]
        total: int = dataclasses.field(init=False, default=0)

        def __post_init__(self, made: int) -> None:
            self.n += made
            self.total = self.n

    class Stepped(msgspec.Struct):
        n: int

        def __post_init__(self) -> None:
            self.n += 1

    doubled = round_trip(Doubled(n=2), Doubled)
    assert (doubled.n, doubled._seen) == (4, [])
    assert round_trip(Grown(1, 2), Grown).total == 3
    assert round_trip(Stepped(1), Stepped).n == 2


def test_a_pydantic_model_keeps_aliases_extras_and_the_types_only_pydantic_knows() -> None:
    class Visit(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(extra="allow", frozen=True)
        url: pydantic.HttpUrl
        path: pathlib.Path
        who: str = pydantic.Field(alias="userName")

    visit = Visit.model_validate(
        {"url": "https://example.org/a", "path": "/tmp", "userName": "u", "$": 1, "at": UTC.utcoffset(None)}
    )
    assert round_trip(visit, Visit) == visit


def test_a_cached_property_is_no_part_of_a_model() -> None:
    class Sized(pydantic.BaseModel):
        names: list[str]

        @functools.cached_property
        def handle(self) -> object:
            return object()

    sized = Sized(names=["a"])
    assert sized.handle
    assert round_trip(sized, Sized) == Sized(names=["a"])


def test_a_secret_is_refused_rather_than_stored_as_stars() -> None:
    class Login(pydantic.BaseModel):
        password: pydantic.SecretStr

    with pytest.raises(PayloadError, match=r"^\$\.password: SecretStr cannot be stored"):
        codec.encode(Login(password=pydantic.SecretStr("hunter2")))


def test_a_model_stored_by_an_older_class_gets_defaults_or_is_migrated() -> None:
    class Renamed(pydantic.BaseModel):
        full_name: str

        @pydantic.model_validator(mode="before")
        @classmethod
        def migrate(cls, data: Any) -> Any:
            return {"full_name": data["name"]} if "name" in data else data

    assert codec.decode(b'{"x": 1, "y": 2, "old": 3}', Point) == Point(1, 2.0)
    assert codec.decode(b'{"name": "Tom"}', Renamed) == Renamed(full_name="Tom")
    assert codec.decode(b'{"name": "Tom"}', Point) == {"name": "Tom"}


def test_an_instance_of_a_subclass_comes_back_as_the_annotated_class() -> None:
    class Special(Item):
        model_config = pydantic.ConfigDict(extra="forbid")
        bonus: int = 1

    special = Special(sku="S", price=Decimal(1))
    assert round_trip(special, Item) == Item(sku="S", price=Decimal(1))


# What is refused


class Handle(msgspec.Struct):
    handle: Any


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"items": [1, 2, 3, Handle(object())]}, r"^\$\.items\[3\]\.handle: object cannot be stored; store plain data"),
        ([lambda: 1], r"^\$\[0\]: function cannot be stored"),
        ((n for n in "ab"), r"^\$: generator cannot be stored; make a list of it"),
        ({"odd key": {1: [1j]}}, r"^\$\['odd key'\]\[1\]\[0\]: complex cannot be stored"),
        ({"a": float("nan")}, r"^\$\.a: is nan, which JSON does not have"),
        ([1.0, [float("-inf")]], r"^\$\[1\]\[0\]: is -inf"),
        ({"a": ["\ud800"]}, r"^\$\.a\[0\]: has half a surrogate pair"),
        ({"\udfff": 1}, r"^\$\['\\udfff'\]: has half a surrogate pair"),
        (Colour, r"^\$: EnumType cannot be stored; store its name"),
        (ValueError("x"), r"^\$: ValueError cannot be stored; store its text"),
        (ZoneInfo("UTC"), r"^\$: ZoneInfo cannot be stored"),
        ({Place(Point(1, 1.0)): 1}, r"^\$: has a model as a key"),
        ({Colour.RED: 1, "red": 2}, r"^\$: has two keys that are stored as the same value"),
    ],
)
def test_what_cannot_be_stored_is_refused_with_the_path_to_it(value: Any, message: str) -> None:
    with pytest.raises(PayloadError, match=message):
        codec.encode(value)


def test_a_forgotten_await_is_named() -> None:
    async def fetch() -> int:
        return 1

    coroutine = fetch()
    with pytest.raises(PayloadError, match=r"^\$\.n: coroutine cannot be stored; await it first"):
        codec.encode({"n": coroutine})
    coroutine.close()


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: dict[str, Any] = {"a": []}
    loop["a"].append(loop)
    with pytest.raises(PayloadError, match=r"^\$\.a\[0\]: refers to a value that contains it"):
        codec.encode(loop)
    node = Tree("a")
    node.children.append(node)
    with pytest.raises(PayloadError, match=r"^\$\.children\[0\]: refers to a value"):
        codec.encode(node)


def test_the_same_value_twice_is_no_circle() -> None:
    point = [1]
    assert round_trip([point, point]) == [[1], [1]]


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def test_depth_is_limited_and_never_a_recursion_error() -> None:
    assert round_trip(nested(100)) == nested(100)
    for levels in (101, 500, 5000):
        with pytest.raises(PayloadError, match="nested more than 100 levels deep"):
            codec.encode(nested(levels))
    tree = Tree("leaf")
    for _ in range(49):
        tree = Tree("t", [tree])
    assert round_trip(tree, Tree) == tree
    for hostile in (b"[" * 100_000 + b"]" * 100_000, b"[" * 100_000 + b'"$"' + b"]" * 100_000):
        with pytest.raises(PayloadError, match="not Edda's JSON"):
            codec.decode(hostile)


def test_a_value_over_the_limit_is_refused_with_its_size_and_largest_part() -> None:
    small = Codec(max_bytes=1000)
    value = {"id": 1, "items": [{"n": 1}, {"photo": "x" * 2000, "n": ()}]}
    with pytest.raises(
        PayloadTooLargeError, match=r"2,064 bytes.* limit of 1,000.*\$\.items\[1\]\.photo with 2,002 bytes"
    ):
        small.encode(value)
    with pytest.raises(PayloadTooLargeError, match=r"largest part is \$\[7\]\[1\] with"):
        small.encode({7: (1, b"x" * 2000)})
    assert small.decode(small.encode("x" * 998)) == "x" * 998


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        pickle.dumps({"a": 1}),
        b'{"$": "class", "v": "os.system"}',
        b'{"$": ["tuple"], "v": []}',
        b'{"$": "datetime", "v": "soon"}',
        b'{"$": "datetime", "v": ["2024-01-01", "../../etc/passwd", 0]}',
        b'{"$": "map", "v": [[1]]}',
        b'{"$": "decimal", "v": "x"}',
        b'{"$": "uuid"}',
    ],
)
def test_data_that_the_codec_did_not_write_is_refused_and_nothing_is_imported(data: bytes) -> None:
    with pytest.raises(PayloadError):
        codec.decode(data)


def test_an_unknown_zone_leaves_the_same_instant() -> None:
    moment = codec.decode(b'{"$": "datetime", "v": ["2024-01-01T12:00:00+05:00", "Mars/Olympus", 0]}')
    assert moment == datetime(2024, 1, 1, 7, tzinfo=UTC)


# Arguments


@pytest.mark.parametrize(
    ("value", "annotation", "expected"),
    [
        (3, float, 3.0),
        ("red", Colour, Colour.RED),
        ({"x": 1, "y": 2}, Point, Point(1, 2.0)),
        ([{"sku": "A", "price": "1.5"}], list[Item], [Item(sku="A", price=Decimal("1.5"))]),
        (ITEM, Item, ITEM),
        ((1, 2), list[int], [1, 2]),
        ([1, 1], set[int], {1}),
        ("2024-01-01T00:00:00Z", datetime, datetime(2024, 1, 1, tzinfo=UTC)),
        ("1.10", Decimal, Decimal("1.10")),
        (str(UUID(int=1)), UUID, UUID(int=1)),
        ({"type": "dog", "name": "Rex"}, Cat | Dog, Dog("Rex")),
        ({"kind": "post", "number": "1"}, Payment, ByPost(number="1")),
        ([{"x": 1, "y": 1}, {"sku": "A", "price": 1}], Pair, Pair(Point(1, 1.0), Item(sku="A", price=Decimal(1)))),
        (5, Annotated[int, pydantic.Field(gt=0)], 5),
        (Mood.GOOD, str, Mood.GOOD),
        (object, Any, object),
    ],
)
def test_an_argument_is_converted_where_nothing_is_lost(value: Any, annotation: Any, expected: Any) -> None:
    assert same(convert(value, annotation), expected)


def convert(value: Any, annotation: Any) -> Any:
    def f(ctx: Any, given: Any) -> None: ...

    f.__annotations__["given"] = annotation
    return Signature(f).bind((value,), {})["given"]


@pytest.mark.parametrize(
    ("value", "annotation", "message"),
    [
        ("abc", int, r"^f\(\) argument 'given': expected int, got str"),
        (True, int, "expected int, got bool"),
        (1, bool, "expected bool, got int"),
        (1.5, int, "expected int, got float"),
        (None, int, "expected int, got NoneType"),
        ("green", Colour, r"expected Colour \('red', \('b', 1\)\), got str"),
        ([1, "2"], list[int], r"^f\(\) argument 'given'\[1\]: expected int, got str"),
        ("abc", Sequence[str], "expected collection of str"),
        ({"a": {"b": "x"}}, dict[str, dict[str, int]], r"^f\(\) argument 'given'\.a\.b: expected int"),
        ({"x": 1}, Point, "missing 1 required positional argument: 'y'"),
        (
            {"x": 1, "y": 1, "lable": ""},
            Point,
            r"'given': Point has no 'lable'; did you mean 'label'\?",
        ),
        ([{"sku": "A"}], list[Item] | None, r"^f\(\) argument 'given'\[0\]\.price: Field required"),
        ({"title": 1}, Movie, "got a dict without director"),
        ((1, 2, 3), tuple[int, int], "expected tuple of int, int"),
        ("x", int | float, r"expected int \| float, got str"),
        ("c", Literal["a", "b"], "expected 'a' or 'b', got str"),
        (0, Annotated[int, pydantic.Field(gt=0)], "Input should be greater than 0"),
        (0, Annotated[int, msgspec.Meta(gt=0)], "Expected `int` >= 1"),
        ("soon", datetime, "expected datetime, got str"),
        (1, pathlib.Path, "expected Path, got int"),
    ],
)
def test_an_argument_that_does_not_fit_is_refused(value: Any, annotation: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        convert(value, annotation)


# Encryption and comparison


class Salted:
    """Not a cipher, but as unrepeatable as one."""

    def __init__(self) -> None:
        self.count = 0

    def seal(self, data: bytes) -> bytes:
        self.count += 1
        return bytes([self.count]) + data[::-1]

    def open(self, data: bytes) -> bytes:
        return data[:0:-1]


def test_a_transform_seals_last_and_opens_first() -> None:
    sealed = Codec(transform=Salted())
    data = sealed.encode({"when": date(2024, 1, 1)})
    assert b"2024-01-01" not in data
    assert sealed.decode(data) == {"when": date(2024, 1, 1)}


def test_stored_values_are_compared_by_content() -> None:
    sealed = Codec(transform=Salted())
    assert sealed.equal(sealed.encode({"a": 1, "b": {2}}), sealed.encode({"b": {2}, "a": 1}))
    assert not codec.equal(codec.encode({"a": 1}), codec.encode({"a": True}))


def test_pydantic_is_not_loaded_before_its_first_use() -> None:
    code = (
        "import sys, types; edda = types.ModuleType('edda'); edda.__path__ = [sys.argv[1]]; sys.modules['edda'] = edda;"
        "from edda.core.codec import Codec; from edda.core import exceptions, signature;"
        "Codec().decode(Codec().encode({'a': (1,)}), dict[str, tuple[int]]);"
        "assert 'pydantic' not in sys.modules"
    )
    source = pathlib.Path(sys.modules["edda.core.codec"].__file__ or "").parents[1]
    subprocess.run([sys.executable, "-c", code, str(source)], check=True)


def test_typing_has_no_annotation_that_breaks_decoding() -> None:
    odd: list[Any] = [
        typing.Callable[[int], int],
        type[int],
        "Unknown",
        T,
        typing.Hashable,
        typing.Never,
        ...,
        typing.Self,
    ]
    for annotation in odd:
        assert round_trip({"a": [1]}, annotation) == {"a": [1]}


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ("x" * 20_000_000, r"\$ with 20,000,002 bytes"),
        ({"order": {"scan": "ä" * 5_000_000}, "id": 1}, r"\$\.order\.scan with 10,000,002 bytes"),
        ({"order": ["\n" * 5_000_000]}, r"\$\.order\[0\] with 10,000,002 bytes"),
        ({"numbers": [100_000] * 1_000_000, "id": "a"}, r"\$\.numbers with 7,000,001 bytes"),
        ([1, {2: "y" * 3_000_000}], r"\$\[1\]\[2\] with 3,000,002 bytes"),
        ([[0] * 300_000, "z" * 9_000_000], r"\$\[1\] with 9,000,002 bytes"),
    ],
    ids=["text", "not ASCII", "escaped", "many", "a map", "behind many"],
)
def test_the_largest_part_is_found_without_another_copy(value: Any, path: str) -> None:
    codec = Codec()
    packed = encode_value(value)
    size = len(msgspec.json.encode(packed))
    tracemalloc.start()
    try:
        error = codec._too_large(packed, size)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000
    with pytest.raises(PayloadTooLargeError, match=path):
        codec.encode(value)
    assert re.search(path, str(error))
