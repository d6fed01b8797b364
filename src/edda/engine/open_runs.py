"""Why a run has not ended, as a sentence for a caller whose wait for its result timed out."""

from __future__ import annotations

from collections.abc import Sequence

from edda.core.model import MICROSECONDS, SUSPECT_DEATHS, RunRecord, WorkerId
from edda.core.queries import WorkerRecord
from edda.core.states import RunStatus
from edda.workflow.context import as_datetime


def explain(record: RunRecord, now: int, workers: Sequence[WorkerRecord]) -> str:
    if record.status is RunStatus.PARKED:
        reason = (record.reason or "no reason is known").rstrip(".")
        parked = f"it is parked and does not go on by itself with this code: {reason}."
        if record.ready_at is None:
            return f"{parked} It is not tried again before `edda runs resume {record.run_id}`"
        return (
            f"{parked} Fix the code and start a worker with it, or cancel the run, which then ends without compensation"
        )
    if record.owner is not None and (lost := describe_lost_owner(record.owner, now, workers)):
        return f"its worker {record.owner} {lost}; another worker takes the run over as soon as one is running"
    if record.deaths >= SUSPECT_DEATHS:
        return (
            f"its process died {record.deaths} times before its steps in flight had ended, so a worker runs it apart "
            "from other runs; if the process goes on to die, it is parked"
        )
    is_due = record.owner is None and record.ready_at is not None and record.ready_at <= now
    if is_due and all(worker.is_lapsed for worker in workers):
        return f"it is ready, but no worker is alive: start a process that has the workflow {record.workflow!r}"
    if is_due:
        waited = (now - (record.ready_at or record.created_at)) / MICROSECONDS
        return (
            f"it has been ready for {waited:.1f} seconds and no worker has claimed it: is a worker running that has "
            f"the workflow {record.workflow!r}, or are all of them busy?"
        )
    if record.owner is None and record.reason:
        return f"it waits for {record.reason}"
    return "it goes on"


def describe_lost_owner(owner: WorkerId, now: int, workers: Sequence[WorkerRecord]) -> str | None:
    """Why the owner of a run does not drive it; None if it is alive. The workers have to be read after the run: else
    the owner may have registered, and claimed the run, in between."""
    found = next((worker for worker in workers if worker.info.id == owner), None)
    if found is None:
        return "is no longer registered"
    if not found.is_lapsed:
        return None
    if found.expires_at > now:  # its process ended on this host, so its lease need not lapse
        return "has died"
    return f"has renewed no lease since {as_datetime(found.expires_at):%Y-%m-%d %H:%M:%S} UTC"
