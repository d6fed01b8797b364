"""Answers that hold until somebody writes: who asks the same again of a database at rest sends it no statement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, TypeVarTuple

from .connection import Connection, Version

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class ReadCache:
    """Belongs to one connection. Only for few questions with small answers: all of them stay until the next commit."""

    def __init__(self) -> None:
        self._version: Version | None = None
        self._answers: dict[tuple[Any, ...], Any] = {}

    def get(self, db: Connection, ask: Callable[[Connection, *Ts], T], *args: *Ts) -> T:
        version = db.version()  # looked at before the answer, which may be newer than it but never older
        if version != self._version:
            self._version, self._answers = version, {}
        question = (ask, *args)
        if question not in self._answers:
            self._answers[question] = ask(db, *args)
        answer: T = self._answers[question]
        return answer
