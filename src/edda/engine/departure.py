"""How a run leaves for good: it ends, or goes on as the next generation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from edda.core.codec import Codec
from edda.core.model import NO_CRASHES, ClaimedRun, End, EndWatcher, Entry, EntryKind, Recur, RunSignal
from edda.core.signature import Signature
from edda.workflow.children import RunEnded
from edda.workflow.context import RunContext
from edda.workflow.execution import Execution, RecurRequested

from .clock import Clock
from .draft import RunWriteBuffer
from .endings import EndRecords
from .herald import RunHooks
from .waits import EventWaits

Completion = tuple[End | Recur, tuple[RunSignal, ...]]


class RunCompletion:
    def __init__(
        self,
        claimed: ClaimedRun,
        codec: Codec,
        clock: Clock,
        draft: RunWriteBuffer,
        waits: EventWaits,
        context: RunContext,
        signature: Signature,
        herald: RunHooks | None,
        limit: int,
    ) -> None:
        self.watchers = claimed.watchers
        """Who is told, besides the parent."""
        self._claimed = claimed
        self._clock = clock
        self._draft = draft
        self._waits = waits
        self._context = context
        self._endings = EndRecords(
            f"{claimed.workflow} {claimed.run_id}", codec, signature, clock, herald, limit, self._count_rejected
        )
        self._end: End | None = None

    def complete(self, execution: Execution, stops: Sequence[EntryKind]) -> Completion:
        """For a run whose code is done; `stops` are what stopped it. Raises `ParkedError` if it has not ended either.

        Asked again if the run could not leave, it gives the same end, but with all that is known by then.
        """
        if self._end is None:
            try:
                self._end = self._endings.to_end(execution, stops[0] if stops else None)
            except RecurRequested as recurrence:
                if execution.late_cancel is None:
                    return self._recur(execution, recurrence.input), ()
                self._end = self._endings.cancelled(execution.late_cancel)
        return self._with_signals(self._end)

    def encode(self, result: Any) -> bytes:
        """What a workflow returned; raises `PayloadError` if it cannot be stored."""
        return self._endings.encode(result)

    def failed(self, error: BaseException) -> tuple[End, tuple[RunSignal, ...]]:
        self._end = self._endings.failed(error)
        return self._with_signals(self._end)

    def cancelled_unread(self, reason: str) -> tuple[End, tuple[RunSignal, ...]]:
        """Of a run whose code did not read the inbox: it happens only if nothing came in since that was recorded."""
        end, letters = self._with_signals(self._endings.cancelled(reason))
        return replace(end, settled=self._draft.absorbed), letters

    def _count_rejected(self) -> int:
        before = sum(entry.kind is EntryKind.REJECTED for entry in self._claimed.entries)
        return before + self._draft.rejected

    def history_limit_reached(self) -> Completion:
        return self.failed(self._endings.limit_error())

    @property
    def reason(self) -> str:
        """Why the run failed or was cancelled, for people."""
        return self._endings.reason

    def _with_signals(self, end: End) -> tuple[End, tuple[RunSignal, ...]]:
        """With a letter for everybody who waits for it."""
        claimed, watchers = self._claimed, self.watchers
        if claimed.parent is not None and claimed.parent_step is not None:
            watchers = (EndWatcher(claimed.parent, claimed.parent_step), *watchers)
        letters = self._signals_to(watchers, end) if watchers else ()
        settled = self._draft.absorbed if self._waits.may_have_exclusive_messages else None
        return replace(end, watchers=len(self.watchers), settled=settled), letters

    def _signals_to(self, watchers: Sequence[EndWatcher], end: End) -> tuple[RunSignal, ...]:
        told = RunEnded(self._claimed.run_id, end.status, end.value).pack()
        return tuple(RunSignal(one.run_id, EntryKind.CHILD, one.step, told) for one in watchers)

    def _recur(self, execution: Execution, input: bytes) -> Recur:
        at = max(self._clock.now(), execution.now)
        entry = Entry(
            1, EntryKind.RECUR, "", "", True, at, value=self._waits.export_cursors(self._context.subscriptions)
        )
        return Recur(self._draft.absorbed, input, at, entry)

    def next_generation(self, recur: Recur) -> ClaimedRun:
        """The next generation, as it would be claimed."""
        return replace(
            self._claimed,
            gen=self._claimed.gen + 1,
            input=recur.input,
            created_at=recur.at,
            absorbed=recur.absorbed,
            attempts=0,
            entries=(recur.entry,),
            mail=(),
            waits=(),
            done=(),
            watchers=self.watchers,
            undoing=False,
            end_if_parked=False,
            crashes=NO_CRASHES,
        )
