"""What a caller may pass, what is stored of it, and how it comes back."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from datetime import datetime
from decimal import Decimal
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, Unpack

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edda.core.codec import Codec
from edda.core.signature import Signature, returns_of
from edda.errors import ArgumentError, PayloadError

if TYPE_CHECKING:
    from fractions import Fraction

codec = Codec()


class Size(enum.Enum):
    SMALL = "s"


class Item(pydantic.BaseModel):
    sku: str
    price: Decimal = Decimal(1)


class Special(Item):
    pass


class Options(TypedDict, total=False):
    speed: int


async def order(ctx: Any, order_id: str, amount: float = 9.5, *, item: Item | None = None) -> list[Later]:
    return []


@dataclasses.dataclass
class Later:
    """Defined after the function that names it."""

    n: int


def call(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    signature = Signature(fn)
    return signature.decode(codec, codec.encode(signature.bind(args, kwargs)))


def stored(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    signature = Signature(fn)
    return codec.decode(codec.encode(signature.bind(args, kwargs)))


def test_the_input_is_stored_by_name_in_the_order_of_the_parameters_with_its_defaults() -> None:
    signature = Signature(order)
    by_position = codec.encode(signature.bind(("A", 2.0), {}))
    by_name = codec.encode(signature.bind((), {"item": None, "amount": 2.0, "order_id": "A"}))
    assert by_position == by_name == b'{"order_id":"A","amount":2.0,"item":null}'
    assert stored(order, "A") == {"order_id": "A", "amount": 9.5, "item": None}


def test_types_are_restored_under_postponed_annotations() -> None:
    item = Item(sku="A")
    assert call(order, "A", item=item) == (("A", 9.5), {"item": item})
    assert Signature(order).returns == list[Later]
    assert codec.decode(b'[{"n": 1}]', Signature(order).returns) == [Later(1)]


def test_the_empty_signature_and_the_full_one() -> None:
    def none(ctx: Any) -> None: ...

    def every(ctx: Any, a: int, /, b: int, *rest: int, c: int, d: int = 4, **extra: Item) -> None: ...

    assert call(none) == ((), {})
    assert Signature(none).returns is type(None)
    item = Item(sku="A")
    assert call(every, 1, 2, 3, 4, c=5, a=item) == ((1, 2, 3, 4), {"c": 5, "d": 4, "a": item})
    assert stored(every, 1, 2, c=3) == {"a": 1, "b": 2, "c": 3, "d": 4}
    assert stored(every, 1, 2, 3, c=3, a=item)["*rest"] == [3]


def test_a_workflow_with_keyword_arguments_gets_its_values() -> None:
    def flow(ctx: Any, **kwargs: Any) -> None: ...

    assert call(flow, a=1, ctx=2, self=3) == ((), {"a": 1, "ctx": 2, "self": 3})
    assert call(flow) == ((), {})


def test_unpacked_options_are_checked_as_a_whole() -> None:
    def flow(ctx: Any, **options: Unpack[Options]) -> None: ...

    assert call(flow, speed=3) == ((), {"speed": 3})
    with pytest.raises(ArgumentError, match=r"flow\(\) argument '\*\*options'\.speed: expected int"):
        call(flow, speed="fast")


@given(
    st.lists(st.integers() | st.text() | st.none() | st.tuples(st.booleans()), max_size=4),
    st.dictionaries(st.text(), st.binary()),
)
def test_all_passed_arguments_are_restored(args: list[Any], kwargs: dict[str, Any]) -> None:
    def flow(ctx: Any, /, *args: Any, **kwargs: Any) -> None: ...

    signature = Signature(flow)
    assert signature.decode(codec, codec.encode(signature.bind(tuple(args), kwargs))) == (
        tuple(args),
        kwargs,
    )


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {}, r"^order\(\) needs 'order_id'$"),
        (
            ("A", 1.0, None),
            {},
            r"^order\(\) takes 2 positional arguments beside the context .*, got 3",
        ),
        (("A",), {"order_id": "B"}, r"^order\(\) got 'order_id' twice, by position and by name"),
        (("A",), {"amuont": 1.0}, r"^order\(\) has no parameter 'amuont'; did you mean 'amount'\?"),
        (("A",), {"zzz": 1}, r"has no parameter 'zzz'; it takes 'order_id', 'amount', 'item'"),
        (("A",), {"ctx": 1}, r"has no parameter 'ctx'"),
        ((1,), {}, r"^order\(\) argument 'order_id': expected str, got int"),
        (("A", "abc"), {}, r"^order\(\) argument 'amount': expected float, got str"),
        (("A", True), {}, r"expected float, got bool"),
        (("A",), {"item": {"sku": 5}}, r"^order\(\) argument 'item'\.sku: Input should be a valid string"),
        (("A",), {"item": "x"}, r"^order\(\) argument 'item': expected Item, got str"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(args: tuple[Any, ...], kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Signature(order).bind(args, kwargs)


def test_what_can_be_converted_is_what_the_function_gets() -> None:
    def flow(ctx: Any, amount: float, size: Size, item: Item, at: datetime) -> None: ...

    (amount, size, item, at), _ = call(flow, 3, "s", {"sku": "A", "price": "2"}, "2024-01-01T00:00:00")
    assert (type(amount), size, item, at) == (float, Size.SMALL, Item(sku="A", price=Decimal(2)), datetime(2024, 1, 1))
    assert call(flow, 3, Size.SMALL, Special(sku="A"), at)[0][2] == Item(sku="A")


def test_an_activitys_types_are_not_enforced_but_its_names_are() -> None:
    signature = Signature(order)
    bound = signature.bind((1, "abc"), {}, check=False)
    assert bound == {"order_id": 1, "amount": "abc", "item": None}
    with pytest.raises(ArgumentError, match="did you mean"):
        signature.bind(("A",), {"amuont": 1}, check=False)


def test_a_default_that_is_no_value_of_its_type_is_the_functions_own_affair() -> None:
    nothing: Any = None

    def flow(ctx: Any, n: int = nothing) -> None: ...

    assert call(flow) == ((None,), {})


def test_a_default_that_cannot_be_stored_is_left_to_the_function() -> None:
    sentinel = object()

    def flow(ctx: Any, a: int, log: Any = sentinel, b: int = 2) -> None: ...

    assert stored(flow, 1) == {"a": 1, "b": 2}
    assert call(flow, 1, b=3) == ((1, sentinel, 3), {})
    with pytest.raises(PayloadError, match=r"^\$\.log: object cannot be stored"):
        call(flow, 1, object())


def test_a_default_that_changes_later_does_not_change_a_stored_input() -> None:
    def before(ctx: Any, n: int = 1) -> None: ...

    def after(ctx: Any, n: int = 2, extra: str = "new") -> None: ...

    data = codec.encode(Signature(before).bind((), {}))
    assert Signature(after).decode(codec, data) == ((1, "new"), {})


def test_an_input_that_fits_no_more_names_both_sides() -> None:
    def renamed(ctx: Any, order_id: str, total: float) -> None: ...

    message = (
        r"the stored input of renamed\(\) has 'order_id', 'amount', 'item', but the function takes 'order_id', 'total'"
    )
    data = codec.encode(Signature(order).bind(("A",), {}))
    with pytest.raises(ArgumentError, match=message):
        Signature(renamed).decode(codec, data)
    with pytest.raises(ArgumentError, match=r"has list, but the function takes 'order_id', 'total'"):
        Signature(renamed).decode(codec, b"[1]")


def test_names_that_were_dropped_go_to_the_keyword_arguments_if_there_are_any() -> None:
    def flow(ctx: Any, order_id: str, **rest: Any) -> None: ...

    data = codec.encode(Signature(order).bind(("A",), {}))
    assert Signature(flow).decode(codec, data) == (("A",), {"amount": 9.5, "item": None})


def test_an_annotation_only_the_type_checker_can_see_counts_as_any() -> None:
    def flow(ctx: Any, a: Fraction, b: Item) -> Fraction:
        raise NotImplementedError

    assert call(flow, "anything", {"sku": "A"}) == (("anything", Item(sku="A")), {})
    assert Signature(flow).returns is Any


def test_a_local_class_that_a_string_annotation_names_counts_as_any() -> None:
    @dataclasses.dataclass
    class Local:
        n: int

    def flow(ctx: Any, it: Local) -> Local:
        raise NotImplementedError

    assert Signature(flow).returns is Any
    assert call(flow, {"n": 1}) == (({"n": 1},), {})


def test_a_decorated_function_keeps_its_signature() -> None:
    def logged(fn: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(fn)
        def inner(*args: Any, **kwargs: Any) -> Any:
            return fn(*args, **kwargs)

        return inner

    assert Signature(logged(order)).returns == list[Later]
    assert call(logged(order), "A", 1) == (("A", 1.0), {"item": None})


def test_a_function_without_a_context_is_refused() -> None:
    def nothing() -> None: ...

    def starred(*args: Any) -> None: ...

    for fn in (nothing, starred):
        with pytest.raises(ArgumentError, match="needs a first parameter for the context"):
            Signature(fn)


def test_the_return_annotation_of_anything_callable() -> None:
    class Caller:
        def __call__(self) -> Item:
            raise NotImplementedError

    assert returns_of(order) == list[Later]
    assert returns_of(partial(order, None)) == list[Later]
    assert returns_of(Caller()) is Item
    assert returns_of(lambda: 1) is Any
    assert returns_of(len) is Any
    assert returns_of(dict) is Any


@dataclasses.dataclass
class PlainInput:
    number: int
    note: str = None  # type: ignore[assignment]


class PydanticInput(pydantic.BaseModel):
    number: int
    note: str = None  # type: ignore[assignment]


class StructInput(msgspec.Struct):
    number: int
    note: str = None  # type: ignore[assignment]


class TupleInput(NamedTuple):
    number: int
    note: str = None  # type: ignore[assignment]


def by_itself(model: Any) -> Any:
    return model


def in_a_list(model: Any) -> Any:
    return [model]


@pytest.mark.parametrize("wrap", [by_itself, in_a_list])
@pytest.mark.parametrize("make", [PlainInput, PydanticInput.model_construct, StructInput, TupleInput])
def test_the_fields_of_a_model_are_checked_like_arguments(make: Callable[..., Any], wrap: Callable[[Any], Any]) -> None:
    good = wrap(make(number=1, note=None))

    def flow(ctx: Any, it: Any) -> None: ...

    kind = type(good[0]) if isinstance(good, list) else type(good)
    flow.__annotations__["it"] = list[kind] if isinstance(good, list) else kind  # type: ignore[valid-type]
    assert call(flow, good) == ((good,), {})
    for wrong, got in {"x": "str", None: "NoneType"}.items():
        path = r"\[0\]" if isinstance(good, list) else ""
        with pytest.raises(ArgumentError, match=rf"argument 'it'{path}\.number: expected int, got {got}"):
            Signature(flow).bind((wrap(make(number=wrong, note="")),), {})
