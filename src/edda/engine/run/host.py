"""How the parts of a run hand it what has to go into its history."""

from __future__ import annotations

from typing import Protocol

from edda.core.model import EntryKind


class AppendEntry(Protocol):
    """Gives an entry its place in the history and lets the workflow's code go on with it."""

    def __call__(
        self,
        kind: EntryKind,
        step: str = "",
        name: str = "",
        *,
        at: int | None = None,
        ok: bool = True,
        input: bytes = b"",
        value: bytes = b"",
        attempt: int = 1,
        n: int | None = None,
        event: int | None = None,
    ) -> None: ...
