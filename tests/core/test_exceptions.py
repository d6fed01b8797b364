"""Exceptions come back as their own class, with what they said, and nothing else comes back at all."""

from __future__ import annotations

import sys
import traceback
from dataclasses import dataclass
from email.message import Message
from io import BytesIO
from types import ModuleType
from typing import Any
from urllib.error import HTTPError, URLError

import msgspec
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import edda.errors
from edda.core.codec import Codec
from edda.core.exceptions import TRACEBACK_NOTE, EncodedException, decode_failure, encode_failure
from edda.errors import EddaError, PayloadError, RemoteError, RetryExhaustedError, TerminalError

codec = Codec()


class Declined(Exception):
    def __init__(self, *, code: int, reason: str) -> None:
        super().__init__(f"declined with {code}")
        self.code = code
        self.reason = reason


class Odd(Exception):
    """Passes nothing on: `args` are what it was called with, and its text is made of attributes."""

    def __init__(self, who: str, times: int) -> None:
        self.who, self.times = who, times

    def __str__(self) -> str:
        return f"{self.who} x {self.times}"

    @property
    def loud(self) -> str:
        return self.who.upper()


class Explosive(Exception):
    def __init__(self) -> None:
        super().__init__("once")
        raise_if_again(self)


class Slotted(KeyError):
    __slots__ = ("key",)


class Unwritable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Many(ExceptionGroup[Exception]):
    pass


class Holder(Exception):
    def __init__(self, held: object) -> None:
        super().__init__()
        self.held = held

    def __str__(self) -> str:
        return f"holds an {type(self.held).__name__}"


made: list[Explosive] = []


def raise_if_again(exc: Explosive) -> None:
    made.append(exc)
    if len(made) > 1:
        raise AssertionError("an __init__ of the user's ran again")


class Outer:
    class InnerError(Exception):
        pass


def caught(exc: BaseException) -> BaseException:
    try:
        raise exc
    except BaseException as raised:  # what it is does not matter, only that it has a traceback now
        return raised


def round_trip(exc: BaseException) -> Exception:
    return decode_failure(codec, encode_failure(codec, exc))


def decode_bad(reason: str = "x") -> UnicodeDecodeError:
    return UnicodeDecodeError("utf-8", b"\xff\x00", 0, 1, reason)


@pytest.mark.parametrize(
    "exc",
    [
        ValueError("bad", 3),
        Exception(),
        KeyError("k"),
        KeyError(("a", 1)),
        OSError(2, "No such file", "/tmp/x"),
        OSError("just text"),
        OSError(2, "No such file", "a", None, "b"),
        ConnectionResetError(104, "reset"),
        decode_bad(),
        UnicodeEncodeError("ascii", "é", 0, 1, "no"),
        ImportError("no module", name="x", path="y"),
        SyntaxError("bad", ("f.py", 1, 2, "x =", 1, 3)),
        StopIteration(3),
        ZeroDivisionError("by zero"),
        TimeoutError("late"),
        Declined(code=5, reason="poor"),
        Odd("Tom", 3),
        Slotted("k"),
        Unwritable("x"),
        Outer.InnerError("in"),
        TerminalError("never again", {"code": 7}),
        RetryExhaustedError("3 times"),
        edda.errors.WorkflowTimeoutError("late"),
        RemoteError("x.Y: z"),
        msgspec.ValidationError("bad"),
    ],
    ids=lambda exc: type(exc).__name__,
)
def test_an_exception_comes_back_as_itself(exc: Exception) -> None:
    back = round_trip(exc)
    assert type(back) is type(exc)
    assert back.args == exc.args
    assert vars(back) == vars(exc)
    for attribute in (
        "errno",
        "strerror",
        "filename",
        "filename2",
        "name",
        "path",
        "reason",
        "object",
        "start",
        "lineno",
    ):
        assert getattr(back, attribute, None) == getattr(exc, attribute, None)
    if not isinstance(exc, Unwritable):
        assert str(back) == str(exc)


@pytest.mark.parametrize("kind", [kind for kind in vars(edda.errors).values() if isinstance(kind, type)])
def test_every_error_of_edda_comes_back_as_itself(kind: type[EddaError]) -> None:
    back = round_trip(kind("text"))
    assert type(back) is kind
    assert str(back) == "text"


@given(
    st.lists(
        st.none() | st.integers() | st.text() | st.binary() | st.tuples(st.integers()),
        max_size=3,
    )
)
@settings(max_examples=50, deadline=None)
def test_the_text_is_the_same_for_all_arguments(args: list[Any]) -> None:
    for kind in (ValueError, KeyError, TerminalError):
        exc = kind(*args)
        assert (type(round_trip(exc)), str(round_trip(exc)), round_trip(exc).args) == (kind, str(exc), tuple(args))


def test_no_init_of_the_users_runs_again() -> None:
    made.clear()
    assert str(round_trip(Explosive())) == "once"


def test_what_cannot_be_stored_is_replaced_by_its_text() -> None:
    class Response:
        def __repr__(self) -> str:
            return "<Response 500>"

        def __str__(self) -> str:
            return "500"

    exc = ValueError(Response(), 1)
    exc.__dict__.update(response=Response(), status=500)
    back = round_trip(round_trip(exc))
    assert back.args == ("<Response 500>", 1)
    assert vars(back) == {"status": 500, "response": "<Response 500>"}
    for other in (ValueError(Response(), "x"), ValueError(Response()), KeyError(Response())):
        assert str(round_trip(round_trip(other))) == str(other)
    assert str(round_trip(ValueError("\ud800"))) == "\\ud800"


def test_a_text_that_is_lost_with_an_attribute_is_kept_in_a_note() -> None:
    back = round_trip(round_trip(Holder(object())))
    assert type(back) is Holder
    assert back.__notes__ == ["Recorded message: holds an object"]


def test_the_cause_comes_back_too() -> None:
    exc = RetryExhaustedError("charge failed 3 times")
    exc.__cause__ = Declined(code=1, reason="r")
    exc.__cause__.__cause__ = KeyError("deep")
    back = round_trip(exc)
    assert isinstance(back.__cause__, Declined)
    assert back.__cause__.reason == "r"
    assert isinstance(back.__cause__.__cause__, KeyError)


def test_a_chain_of_causes_that_never_ends_is_cut() -> None:
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    assert str(round_trip(one).__cause__) == "two"


def test_a_group_comes_back_with_its_members() -> None:
    group = ExceptionGroup("several", [Declined(code=1, reason="r"), ExceptionGroup("more", [KeyError("k")])])
    back = round_trip(group)
    assert isinstance(back, ExceptionGroup)
    assert str(back) == str(group)
    assert isinstance(back.exceptions[0], Declined)
    assert back.subgroup(KeyError) is not None
    assert type(round_trip(Many("own", [ValueError()]))) is Many
    mixed = round_trip(BaseExceptionGroup("mixed", [SystemExit(1), ValueError()]))
    assert isinstance(mixed, ExceptionGroup)
    assert [type(member) for member in mixed.exceptions] == [RemoteError, ValueError]


def test_the_traceback_comes_back_as_one_note_however_often_it_is_passed_on() -> None:
    exc: Exception = ValueError("x")
    exc.add_note("my own")
    hop = round_trip(caught(exc))
    first = list(hop.__notes__)
    assert first[0] == "my own"
    assert first[1].startswith(TRACEBACK_NOTE)
    assert "in caught" in first[1]
    for _ in range(3):
        hop = round_trip(caught(hop))
        assert hop.__notes__ == first
    assert "in caught" in "".join(traceback.format_exception(hop))


def test_a_deep_traceback_is_cut_to_its_last_frames() -> None:
    def fall(depth: int) -> None:
        if depth == 0:
            raise ValueError("bottom")
        fall(depth - 1)

    with pytest.raises(ValueError, match="bottom") as info:
        fall(200)
    data = encode_failure(codec, info.value)
    assert len(data) < 12_000
    assert 'raise ValueError(\\"bottom\\")' in data.decode()


def test_a_failure_that_is_too_large_keeps_its_class_and_the_start_of_its_text() -> None:
    small = Codec(max_bytes=50_000)
    back = decode_failure(small, encode_failure(small, ValueError("x" * 60_000)))
    assert type(back) is ValueError
    assert str(back).startswith("xxx")
    assert len(str(back)) < 20_000


def test_a_class_that_cannot_be_found_is_named() -> None:
    class Local(Exception):
        pass

    back = round_trip(Local("why"))
    assert type(back) is RemoteError
    assert str(back) == f"{__name__}.{Local.__qualname__}: why"
    again = round_trip(back)
    assert (type(again), str(again)) == (RemoteError, str(back))


def test_what_would_end_the_worker_comes_back_as_a_remote_error() -> None:
    for exc in (SystemExit(3), KeyboardInterrupt(), GeneratorExit()):
        back = round_trip(exc)
        assert type(back) is RemoteError
        assert type(exc).__name__ in str(back)


def test_a_pydantic_validation_error_comes_back_as_its_text() -> None:
    with pytest.raises(pydantic.ValidationError) as info:
        pydantic.TypeAdapter(int).validate_python("x")
    back = round_trip(info.value)
    assert type(back) is RemoteError
    assert "ValidationError: 1 validation error for int" in str(back)


def hostile(module: str, qualname: str, **more: Any) -> bytes:
    return codec.encode({"module": module, "qualname": qualname, "message": "id", "args": ("id",)} | more)


@pytest.mark.parametrize(
    ("module", "qualname"),
    [
        ("os", "system"),
        ("builtins", "dict"),
        ("builtins", "eval"),
        ("builtins", "SystemExit"),
        ("builtins", "ValueError.__init__"),
        ("builtins", "ValueError.__class__"),
        ("builtins", ""),
        ("", ""),
        ("antigravity", "Error"),
        ("wsgiref.simple_server", "WSGIServer"),
    ],
)
def test_a_hostile_name_yields_a_remote_error_and_imports_nothing(module: str, qualname: str) -> None:
    loaded = set(sys.modules)
    assert type(decode_failure(codec, hostile(module, qualname))) is RemoteError
    assert set(sys.modules) == loaded


def test_a_modules_own_getattr_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    lazy = ModuleType("lazy")
    vars(lazy)["__getattr__"] = lambda name: pytest.fail("asked")
    monkeypatch.setitem(sys.modules, "lazy", lazy)
    assert type(decode_failure(codec, hostile("lazy", "Error"))) is RemoteError


@pytest.mark.parametrize("value", [None, [], "x", {"module": 1}, {"module": "builtins", "qualname": "ValueError"}])
def test_a_form_that_is_not_known_yields_a_remote_error(value: Any) -> None:
    back = decode_failure(codec, codec.encode(value))
    assert type(back) is RemoteError
    assert "does not know" in str(back)


def test_a_state_cannot_reach_further_than_the_exception() -> None:
    back = decode_failure(
        codec, hostile("builtins", "ValueError", state={"__class__": "x", "__traceback__": 1, "a": 2})
    )
    assert type(back) is ValueError
    assert vars(back) == {"a": 2}


def test_bytes_that_are_no_json_are_a_payload_error() -> None:
    with pytest.raises(PayloadError):
        decode_failure(codec, b"\x80\x04K\x01.")


class WithSlots(Exception):
    __slots__ = ("code",)

    def __init__(self, code: int) -> None:
        self.code = code

    def __str__(self) -> str:
        return f"code {self.code}"


@dataclass(frozen=True)
class Frozen(Exception):
    reason: str


class Sealed(Exception):
    def __setattr__(self, name: str, value: object) -> None:
        raise RuntimeError(f"{name} cannot be set")


def http_error() -> HTTPError:
    return HTTPError("https://pay.example/charge", 402, "Payment Required", Message(), BytesIO(b"no"))


@pytest.mark.parametrize(
    "exc",
    [http_error(), URLError(ConnectionRefusedError(111, "refused")), WithSlots(7), Frozen("declined"), Sealed("no")],
)
def test_an_exception_of_an_unusual_class_comes_back_as_itself(exc: Exception) -> None:
    try:
        raise exc from LookupError("the cause")
    except Exception as raised:
        back = round_trip(raised)
    assert type(back) is type(exc)
    assert repr(back.__cause__) == "LookupError('the cause')"
    assert "Recorded traceback" in "".join(traceback.format_exception(back))
    str(back)
    with pytest.raises(type(exc)):
        raise back


def test_what_an_http_error_is_handled_by_comes_back() -> None:
    back = round_trip(http_error())
    assert isinstance(back, HTTPError)
    assert (back.code, back.reason, str(back)) == (402, "Payment Required", "HTTP Error 402: Payment Required")


class TextLost(Exception):
    """Its text needs an attribute that is not there when it is decoded."""

    def __str__(self) -> str:
        return f"{vars(self)['missing']}"


def test_an_exception_that_cannot_be_put_together_again_is_named() -> None:
    recorded = EncodedException(__name__, "TextLost", "as it was raised")
    back = decode_failure(codec, codec.encode(recorded))
    assert type(back) is RemoteError
    assert str(back) == f"{__name__}.TextLost: as it was raised"
