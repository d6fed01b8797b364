"""Exceptions to bytes and back.

An exception comes back as its own class if that class is loaded in this process, else as a `RemoteError` that names it.
Nothing is imported, and no `__init__` of the user's runs: it may want other arguments than `args`, or do things.
Classes made inside functions cannot be found again, and what is no `Exception` (SystemExit, say) must not end a worker:
both come back as `RemoteError`.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import Any

from msgspec import Struct

from edda.errors import PayloadError, RemoteError

from .codec import Codec
from .json_values import is_storable
from .value_path import repr_short, truncate

MAX_CAUSES = 8
MAX_FRAMES = 20
MAX_TRACEBACK = 8192
MAX_MESSAGE = 16_384
"""Used only for a failure that would be too large as a whole."""

MESSAGE_NOTE = "Recorded message: "
TRACEBACK_NOTE = "Recorded traceback (most recent call last):\n"


class EncodedArgument(str):
    """Stands among an exception's `args` for what could not be stored, and reads as that did: without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class EncodedException(Struct, frozen=True):
    module: str
    qualname: str
    message: str
    args: tuple[Any, ...] = ()
    written: frozenset[int] = frozenset()
    """Which of the arguments are only what they read as."""
    state: dict[str, Any] = {}
    notes: tuple[str, ...] = ()
    traceback: str = ""
    cause: EncodedException | None = None
    members: tuple[EncodedException, ...] = ()
    """Of an ExceptionGroup."""


def encode_failure(codec: Codec, exc: BaseException) -> bytes:
    recorded = _record(exc, MAX_CAUSES)
    try:
        return codec.encode(recorded)
    except PayloadError:  # too large as a whole; its class and the start of its message are what matters most
        message = truncate(recorded.message, MAX_MESSAGE)
        return codec.encode(EncodedException(recorded.module, recorded.qualname, message, (message,), frozenset({0})))


def tell(exc: BaseException) -> str:
    """`Class: message` on as many lines as the message has, whatever its `__str__` does."""
    name, text = type(exc).__qualname__, _text(exc)
    return f"{name}: {text}" if text else name


def decode_failure(codec: Codec, data: bytes) -> Exception:
    recorded = codec.decode(data, EncodedException)
    if not isinstance(recorded, EncodedException):
        return RemoteError(f"an error was recorded in a form that this release does not know: {repr_short(recorded)}")
    return _rebuild(recorded)


def _record(exc: BaseException, depth: int) -> EncodedException:
    kind = type(exc)
    args, state = _content(exc)
    written = frozenset(i for i, arg in enumerate(args) if isinstance(arg, EncodedArgument) or not is_storable(arg))
    message, deeper = _text(exc), depth > 0
    return EncodedException(
        module=kind.__module__,
        qualname=kind.__qualname__,
        message=message,
        args=tuple(_write(args, i, message) if i in written else arg for i, arg in enumerate(args)),
        written=written,
        state={name: value for name, value in state.items() if name != "__notes__" and is_storable(value)},
        notes=tuple(_clean(note) for note in _notes(exc) if not note.startswith(TRACEBACK_NOTE)),
        traceback=_clean(_traceback(exc)),
        cause=_record(exc.__cause__, depth - 1) if exc.__cause__ and deeper else None,
        members=tuple(_record(member, depth - 1) for member in _members(exc)) if deeper else (),
    )


def _content(exc: BaseException) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the exception is made of. The built-in base knows: an OSError's file name is not in its `args`."""
    reduced: Any = _builtin_base(type(exc)).__reduce__(exc)
    args, state = reduced[1], reduced[2] if len(reduced) > 2 else {}
    return (args[:1], state) if isinstance(exc, BaseExceptionGroup) else (args, state)


def _builtin_base(kind: type[BaseException]) -> type[BaseException]:
    return next(base for base in kind.__mro__ if base.__module__ == "builtins" and issubclass(base, BaseException))


def _write(args: tuple[Any, ...], index: int, message: str) -> str:
    # Of a single argument the exception's own text is made, and it knows whether by str() or by repr().
    return message if len(args) == 1 else _text(args[index], repr)


def _text(value: Any, write: Callable[[Any], str] = str) -> str:
    try:
        return _clean(write(value))
    except Exception as error:  # the class is the user's: its __str__ or __repr__ may raise anything
        return f"<{type(value).__qualname__} that cannot be written: {type(error).__qualname__}>"


def _clean(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


def _notes(exc: BaseException) -> list[str]:
    return [note for note in getattr(exc, "__notes__", ()) if isinstance(note, str)]


def _members(exc: BaseException) -> tuple[BaseException, ...]:
    return exc.exceptions if isinstance(exc, BaseExceptionGroup) else ()


def _traceback(exc: BaseException) -> str:
    """Where it was raised first: one that was recorded before keeps that traceback, however often it is passed on."""
    before = next((note for note in _notes(exc) if note.startswith(TRACEBACK_NOTE)), None)
    if before is not None:
        return before.removeprefix(TRACEBACK_NOTE)
    frames = traceback.extract_tb(exc.__traceback__, limit=-MAX_FRAMES)
    return "".join(traceback.format_list(frames))[-MAX_TRACEBACK:]


def _rebuild(recorded: EncodedException) -> Exception:
    kind = _find(recorded.module, recorded.qualname)
    exc = _revive(kind, recorded) if kind else None
    if exc is None:
        exc = RemoteError(f"{recorded.module}.{recorded.qualname}: {recorded.message}")
    exc.__cause__ = _rebuild(recorded.cause) if recorded.cause else None
    lost = MESSAGE_NOTE + recorded.message
    if recorded.message not in _text(exc) and lost not in recorded.notes:
        exc.add_note(lost)  # made of an attribute that could not be stored
    for note in recorded.notes:
        exc.add_note(note)
    if recorded.traceback:
        exc.add_note(TRACEBACK_NOTE + recorded.traceback)
    return exc


def _find(module: str, qualname: str) -> type[Exception] | None:
    """By `vars` only, since a module's `__getattr__` may import."""
    found: Any = sys.modules.get(module)
    for name in qualname.split("."):
        if not isinstance(found, ModuleType | type):
            return None
        found = vars(found).get(name)
    if found is BaseExceptionGroup:
        return ExceptionGroup  # its members have become Exceptions
    return found if isinstance(found, type) and issubclass(found, Exception) else None


def _revive(kind: type[Exception], recorded: EncodedException) -> Exception | None:
    base = _builtin_base(kind)
    args = tuple(EncodedArgument(arg) if i in recorded.written else arg for i, arg in enumerate(recorded.args))
    if issubclass(kind, ExceptionGroup):
        args = (*args, [_rebuild(member) for member in recorded.members])
    try:
        exc: Exception = base.__new__(kind, *args)
        base.__init__(exc, *args)
    except (TypeError, ValueError):  # made in another way than Python's own, as pydantic's ValidationError
        return None
    for name, value in recorded.state.items():
        _set(exc, name, value)
    return exc


def _set(exc: Exception, name: str, value: Any) -> None:
    with suppress(AttributeError, TypeError):  # a property: it is computed from what else is set
        object.__setattr__(exc, name, value)
