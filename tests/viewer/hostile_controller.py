"""A controller whose every result is hostile: each field of a view contains every hostile string.

Views are filled in by their types, so that a new field is hostile without a change here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

from msgspec import Struct, inspect

from edda.control.controller import OPERATIONS
from tests.viewer.hostile import PAYLOADS
from tests.viewer.showcase import structure_as

EVERYTHING = "\n".join(PAYLOADS)
STEP = f"{PAYLOADS[0]}\"'><img src=x onerror=alert(1)> {{{{7*7}}}}"
"""Short enough for a URL."""

PLAIN: dict[type[inspect.Type], Any] = {
    inspect.IntType: 1,
    inspect.FloatType: 1.0,
    inspect.BoolType: True,
    inspect.DateTimeType: datetime.now(UTC) - timedelta(seconds=9),
}
FIXED: dict[str, Any] = {
    # Values that decide what is drawn.
    "RunView.status": "failed",
    "WaitView.kind": "event",
    "WaitView.mode": None,
    "RunDetail.may": ("cancel", "retry", "resume", "delete"),
    "OutboxView.state": "dead",
    "Bar.step": STEP,
}


def mark(field: str) -> str:
    """The text that proves that the field is on a page."""
    return f"«{field}»"


def hostile_schema(field: str) -> dict[str, Any]:
    said = EVERYTHING + mark(field)
    words = {"title": said, "description": said}
    return {
        "type": "object",
        **words,
        "properties": {
            said: {"type": "string", **words, "default": said},
            "choice": {"enum": [said, *PAYLOADS[:5]], **words},
            "rows": {"type": "array", **words, "items": {"type": "object", "properties": {said: {"type": "string"}}}},
            "number": {"type": "integer", "minimum": 3, **words, "default": said},
            "time": {"type": "string", "format": "date-time", **words, "default": said},
            "other": {"type": "string", "format": said, **words},
            "anything": {**words, "default": {said: said}},
        },
        "required": [said, "choice"],
    }


class Filler:
    """Makes results; a field of any JSON has a third of the strings, another third each time, as keys and as values."""

    def __init__(self) -> None:
        self._turn = count()
        self.more = ""

    def fill(self, kind: inspect.Type, field: str) -> Any:
        if field in FIXED:
            return FIXED[field]
        match kind:
            case inspect.StructType():
                return self._struct(kind)
            case inspect.StrType():
                return EVERYTHING + mark(field) + self.more
            case inspect.EnumType():
                return next(iter(kind.cls))
            case inspect.VarTupleType():
                return tuple(self.fill(kind.item_type, field) for _ in range(2 if field == "Bar.attempts" else 1))
            case inspect.DictType() | inspect.AnyType():
                return self._json(kind, field)
            case inspect.UnionType():
                return self.fill(next(one for one in kind.types if not isinstance(one, inspect.NoneType)), field)
            case _:
                return PLAIN[type(kind)]

    def _struct(self, kind: inspect.StructType) -> Struct:
        name = kind.cls.__name__
        made: Struct = kind.cls(**{one.name: self.fill(one.type, f"{name}.{one.name}") for one in kind.fields})
        return made

    def _json(self, kind: inspect.Type, field: str) -> Any:
        if isinstance(kind, inspect.DictType) and isinstance(kind.value_type, inspect.IntType):
            return {"failed": 1}
        if field.endswith(".schema"):
            return hostile_schema(field)
        if field == "DefinitionView.structure":
            return structure_as(lambda text: f"{EVERYTHING}{mark(field)}{text}")
        said = PAYLOADS[next(self._turn) % 3 :: 3]
        return {mark(field): mark(field), **{payload: payload for payload in said}}


class Chorus:
    """Answers every operation of the control interface."""

    def __init__(self) -> None:
        self._filler = Filler()
        self._answers = {operation.name: operation.response for operation in OPERATIONS}
        self._changed = asyncio.Event()

    def sing(self, more: str) -> None:
        """From now on each text also contains this, and watchers are notified."""
        self._filler.more = more
        self._changed.set()

    def __getattr__(self, name: str) -> Any:
        if name not in self._answers:
            raise AttributeError(name)

        async def answer(*_: object) -> Any:
            return self._filler.fill(inspect.type_info(self._answers[name]), name)

        return answer

    async def get_run_and_timeline(self, run_id: str, generation: int | None = None) -> Any:
        return await self.get_run(run_id), await self.get_timeline(run_id, generation)

    async def watch(self) -> AsyncIterator[str]:
        yield "before"
        await self._changed.wait()
        yield "after"
        await asyncio.Event().wait()
