"""Exceptions to bytes and back.

An exception is decoded as its own class if that class is loaded in this process, else as a `RemoteError` that names it.
Nothing is imported, and no `__init__` of user classes is called: it may need other arguments than `args`, or have side
effects. An attribute that cannot be stored, such as the response of an HTTP error, comes back as its `repr`. Always
decoded as `RemoteError` are: classes defined inside functions, which cannot be found by name; those that are not an
`Exception`, such as SystemExit, which would end a worker; and exceptions that cannot be put together again. Decoding
never raises because of the class: a run whose history holds such an exception could not be replayed.
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

from .codec import Codec, is_storable
from .value_path import repr_short, truncate

MAX_CAUSES = 8
MAX_FRAMES = 20
MAX_TRACEBACK = 8192
MAX_ATTRIBUTE = 200
"""Characters of the text that replaces an attribute."""
MAX_MESSAGE = 16_384
"""Characters of the message that are kept of a failure over the size limit."""

UNWRITABLE = " that cannot be written: "
MESSAGE_NOTE = "Recorded message: "
TRACEBACK_NOTE = "Recorded traceback (most recent call last):\n"


class EncodedArgument(str):
    """Replaces an argument or attribute that cannot be stored: its text, which `repr` shows without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class EncodedException(Struct, frozen=True):
    module: str
    qualname: str
    message: str
    args: tuple[Any, ...] = ()
    written: frozenset[int] = frozenset()
    """Indexes of the arguments that are stored as text only."""
    state: dict[str, Any] = {}
    texts: dict[str, str] = {}
    """The attributes that are stored as text only."""
    notes: tuple[str, ...] = ()
    traceback: str = ""
    cause: EncodedException | None = None
    members: tuple[EncodedException, ...] = ()
    """The exceptions of an ExceptionGroup."""


def encode_failure(codec: Codec, exc: BaseException) -> bytes:
    recorded = _record(exc, MAX_CAUSES)
    try:
        return codec.encode(recorded)
    except PayloadError:  # over the size limit: keep the class and the beginning of the message
        message = truncate(recorded.message, MAX_MESSAGE)
        return codec.encode(EncodedException(recorded.module, recorded.qualname, message, (message,), frozenset({0})))


def format_exception(exc: BaseException) -> str:
    """`Class: message`; also for exceptions whose `__str__` raises."""
    name, text = type(exc).__qualname__, _text(exc)
    return f"{name}: {text}" if text else name


def decode_failure(codec: Codec, data: bytes) -> Exception:
    recorded = codec.decode(data, EncodedException)
    if not isinstance(recorded, EncodedException):
        return RemoteError(f"an error was recorded in a format that this release does not know: {repr_short(recorded)}")
    return _rebuild(recorded)


def _record(exc: BaseException, depth: int) -> EncodedException:
    kind = type(exc)
    args, state = _content(exc)
    written = frozenset(i for i, arg in enumerate(args) if _is_text_only(arg))
    message, deeper = _text(exc), depth > 0
    members = exc.exceptions if isinstance(exc, BaseExceptionGroup) else ()
    return EncodedException(
        module=kind.__module__,
        qualname=kind.__qualname__,
        message=message,
        # A single argument is the exception's text, which has used str() or repr() already.
        args=tuple(
            arg if i not in written else message if len(args) == 1 else _text(arg, repr) for i, arg in enumerate(args)
        ),
        written=written,
        state={name: value for name, value in state.items() if not _is_text_only(value)},
        texts={
            name: truncate(_text(value, repr), MAX_ATTRIBUTE) for name, value in state.items() if _is_text_only(value)
        },
        notes=tuple(_clean(note) for note in _notes(exc) if not note.startswith(TRACEBACK_NOTE)),
        traceback=_clean(_traceback(exc)),
        cause=_record(exc.__cause__, depth - 1) if exc.__cause__ and deeper else None,
        members=tuple(_record(member, depth - 1) for member in members) if deeper else (),
    )


def _is_text_only(value: Any) -> bool:
    return isinstance(value, EncodedArgument) or not is_storable(value)


def _content(exc: BaseException) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`args` and attributes, from `__reduce__` of the built-in base class: an OSError's file name is not in `args`."""
    reduced: Any = _builtin_base(type(exc)).__reduce__(exc)
    args, state = reduced[1], {**(reduced[2] if len(reduced) > 2 else {}), **_slots(exc)}
    state.pop("__notes__", None)
    return (args[:1], state) if isinstance(exc, BaseExceptionGroup) else (args, state)


def _slots(exc: BaseException) -> dict[str, Any]:
    """The attributes of `__slots__`, which `__reduce__` of the built-in base class leaves out."""
    slots = [vars(kind).get("__slots__", ()) for kind in type(exc).__mro__]
    names = {name for one in slots for name in ((one,) if isinstance(one, str) else one) if not name.startswith("__")}
    found = {}
    for name in names:
        with suppress(Exception):  # not set, or a property of the same name that raises
            found[name] = object.__getattribute__(exc, name)
    return found


def _builtin_base(kind: type[BaseException]) -> type[BaseException]:
    return next(base for base in kind.__mro__ if base.__module__ == "builtins" and issubclass(base, BaseException))


def _text(value: Any, write: Callable[[Any], str] = str) -> str:
    try:
        return _clean(write(value))
    except Exception as error:  # __str__ or __repr__ of a user class may raise anything
        return f"<{type(value).__qualname__}{UNWRITABLE}{type(error).__qualname__}>"


def _clean(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


def _notes(exc: BaseException) -> list[str]:
    return [note for note in getattr(exc, "__notes__", ()) if isinstance(note, str)]


def _traceback(exc: BaseException) -> str:
    """The traceback of the first raise: a decoded exception keeps the recorded one in a note."""
    recorded = next((note for note in _notes(exc) if note.startswith(TRACEBACK_NOTE)), None)
    if recorded is not None:
        return recorded.removeprefix(TRACEBACK_NOTE)
    frames = traceback.extract_tb(exc.__traceback__, limit=-MAX_FRAMES)
    return "".join(traceback.format_list(frames))[-MAX_TRACEBACK:]


def _rebuild(recorded: EncodedException) -> Exception:
    kind = _find(recorded.module, recorded.qualname)
    if kind is not None:
        with suppress(Exception):  # a class of the user's may refuse anything: arguments, attributes, its own text
            exc = _complete(_revive(kind, recorded), recorded)
            if UNWRITABLE not in recorded.message:
                str(exc)  # as when it was raised: code that logs it must not fail
            return exc
    return _complete(RemoteError(f"{recorded.module}.{recorded.qualname}: {recorded.message}"), recorded)


def _complete(exc: Exception, recorded: EncodedException) -> Exception:
    """With its cause and its notes, set without the class, whose `__setattr__` may refuse (a frozen dataclass)."""
    notes = list(recorded.notes)
    lost = MESSAGE_NOTE + recorded.message
    if recorded.message not in _text(exc) and not any(note.startswith(MESSAGE_NOTE) for note in notes):
        notes.insert(0, lost)  # the message used an attribute that could not be stored
    if recorded.traceback:
        notes.append(TRACEBACK_NOTE + recorded.traceback)
    object.__setattr__(exc, "__cause__", _rebuild(recorded.cause) if recorded.cause else None)
    if notes:
        object.__setattr__(exc, "__notes__", notes)
    return exc


def _find(module: str, qualname: str) -> type[Exception] | None:
    """Looks up the class with `vars`, because a module's `__getattr__` may import."""
    found: Any = sys.modules.get(module)
    for name in qualname.split("."):
        if not isinstance(found, ModuleType | type):
            return None
        found = vars(found).get(name)
    if found is BaseExceptionGroup:
        return ExceptionGroup  # its decoded members are Exceptions
    return found if isinstance(found, type) and issubclass(found, Exception) else None


def _revive(kind: type[Exception], recorded: EncodedException) -> Exception:
    """Raises if the class cannot be constructed like a built-in exception, as pydantic's ValidationError."""
    base = _builtin_base(kind)
    args = tuple(EncodedArgument(arg) if i in recorded.written else arg for i, arg in enumerate(recorded.args))
    if issubclass(kind, ExceptionGroup):
        args = (*args, [_rebuild(member) for member in recorded.members])
    exc: Exception = base.__new__(kind, *args)
    base.__init__(exc, *args)
    texts = {name: EncodedArgument(text) for name, text in recorded.texts.items()}
    for name, value in (recorded.state | texts).items():
        with suppress(AttributeError, TypeError):  # a property without a setter: computed from other attributes
            object.__setattr__(exc, name, value)
    return exc
