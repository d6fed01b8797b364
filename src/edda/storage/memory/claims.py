"""Claiming runs in dictionaries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from edda.core.model import Claim, ClaimedRun, InboxItem, WorkerId, unpark_pause
from edda.core.states import RunStatus

from .runs import MemoryRuns
from .tables import OpenRun


class MemoryClaims(MemoryRuns):
    def claim(self, worker: WorkerId, workflows: Sequence[str], limit: int, known_claims: int = 0) -> Claim:
        now = self.now()
        number = self._count_claim(worker, known_claims)
        if number is None:
            return Claim(now, ())
        due = [(ready_at, run.run_id) for ready_at, run in self._unowned(workflows) if ready_at <= now]
        runs = tuple(self._claim(worker, self.open_runs[run_id]) for _, run_id in sorted(due)[:limit])
        return Claim(now, runs, number)

    def _count_claim(self, worker: WorkerId, known_claims: int) -> int | None:
        """None if the worker was taken over, or some of its claims are lost."""
        fence = self.fences.get(worker)
        if fence is None or fence.claims < known_claims:
            return None
        self.fences[worker] = replace(fence, claims=fence.claims + 1)
        return fence.claims + 1

    def claim_suspects(
        self, worker: WorkerId, workflows: Sequence[str], limit: int, alone: bool, known_claims: int = 0
    ) -> Claim:
        now = self.now()
        number = self._count_claim(worker, known_claims)
        if number is None:
            return Claim(now, ())
        suspects = sorted(
            (-run.suspect_at, run.run_id)
            for run in self.open_runs.values()
            if run.suspect_at is not None and run.workflow in workflows
        )
        chosen = [self.open_runs[run_id] for group, run_id in suspects if group == suspects[0][0]][:limit]
        for run in chosen:
            run.suspect_at, run.is_alone = None, alone and len(chosen) == 1
        return Claim(now, tuple(self._claim(worker, run) for run in chosen), number)

    def has_suspects(self, workflows: Sequence[str]) -> bool:
        return any(run.suspect_at is not None and run.workflow in workflows for run in self.open_runs.values())

    def _unowned(self, workflows: Sequence[str]) -> Iterable[tuple[int, OpenRun]]:
        for run in self.open_runs.values():
            if run.owner is None and run.ready_at is not None and run.workflow in workflows:
                yield run.ready_at, run

    def _claim(self, worker: WorkerId, run: OpenRun) -> ClaimedRun:
        run.owner, run.epoch, run.ready_at = worker, run.epoch + 1, None
        run.status, run.reason = RunStatus.RUNNING, None
        start = self.runs[run.run_id][run.generation]
        return ClaimedRun(
            run_id=run.run_id,
            workflow=run.workflow,
            generation=run.generation,
            epoch=run.epoch,
            input=start.input,
            created_at=start.created_at,
            deadline=start.deadline,
            inbox_read=run.inbox_read,
            attempts=run.attempts,
            entries=self.history(run.run_id, run.generation),
            inbox=self._unread(run),
            waits=tuple((step, wait.key) for step, wait in sorted(self.wait_rows.get(run.run_id, {}).items())),
            event_cursor=run.event_cursor,
            parent=start.parent,
            parent_step=start.parent_step,
            depth=start.depth,
            watchers=self.watchers(run.run_id),
            compensating=run.compensating,
            end_if_parked=run.end_if_parked,
            crashes=run.crashes,
        )

    def next_due(self, workflows: Sequence[str]) -> int | None:
        first = min((ready_at for ready_at, _ in self._unowned(workflows)), default=None)
        return None if first is None else max(0, first - self.now())

    def wake_parked(self, workflows: Sequence[str]) -> int:
        now, moved = self.now(), 0
        for ready_at, run in self._unowned(workflows):
            due = max(now, (run.parked_at or 0) + unpark_pause(run.attempts))
            if run.status is RunStatus.PARKED and due < ready_at:
                run.ready_at = due  # its status and reason stay until a worker claims it
                moved += 1
        return moved

    def read_inboxes(self, worker: WorkerId) -> tuple[InboxItem, ...]:
        owned = sorted(self.owned_by(worker), key=lambda run: run.run_id)
        return tuple(item for run in owned for item in self._unread(run))

    def _unread(self, run: OpenRun) -> tuple[InboxItem, ...]:
        inbox = self.inboxes.get(run.run_id, {})
        numbers = range(run.inbox_read + 1, run.inbox_count + 1)
        return tuple(self._with_body(inbox[inbox_no]) for inbox_no in numbers if inbox_no in inbox)

    def _with_body(self, item: InboxItem) -> InboxItem:
        """The inbox item of an event stores the event's number only."""
        stored = None if item.event is None else self.events.get(item.event)
        return replace(item, value=stored.event.body) if stored else item
