"""The documented outcome of every input in every state.

| cell | what is true afterwards |
|---|---|
| . | the run is in the state it was in |
| again | a worker has begun its step once more; else as `.` |
| - | the call raised an error, and the run is in the state it was in |
| a status | the run has that status |
| gone | no run has the id any more |
"""

from __future__ import annotations

STATES = {
    "delayed": "was started with `delay`, not due yet",
    "unclaimed": "has a workflow that no worker has",
    "step": "runs an activity",
    "orphan": "ran an activity in a process that has just died",
    "event": "waits for an event",
    "timer": "sleeps",
    "message": "waits for a message",
    "child": "waits for another run",
    "backing_off": "waits for the next attempt of a step",
    "parked": "is parked, with a wait that is registered",
    "parked_child": "is parked while its child runs",
    "compensating": "runs a compensation",
    "compensating_again": "waits for the next attempt of a compensation",
    "settling": "was cancelled and waits for its child to end before it compensates",
    "recurred": "waits for an event in its second generation",
    "completed": "has completed",
    "failed": "has failed",
    "cancelled": "was cancelled",
    "deleted": "was deleted",
}
INPUTS = {
    "event": "an event it could wait for arrives",
    "message": "a message to it arrives",
    "cancel": "it is cancelled",
    "deadline": "its deadline passes",
    "retry": "`retry`",
    "resume": "`resume`",
    "delete": "`delete`",
    "child_end": "its child ends",
    "new_code": "workers restart with code that does not fit",
    "death": "its worker is killed, another one starts",
    "drain": "its worker stops, another one starts",
    "prune": "everything old is pruned",
}

SAME, AGAIN, REFUSED, GONE = ".", "again", "-", "gone"

TABLE = """
                   event     message   cancel    deadline retry     resume delete child_end new_code death drain prune
delayed            .         .         cancelled .        -         -      -      .         .        .     .     .
unclaimed          .         .         .         .        -         -      -      .         .        .     .     .
step               .         .         cancelled failed   -         -      -      .         parked   again again .
orphan             .         .         cancelled failed   -         -      -      .         parked   again again .
event              completed .         cancelled failed   -         .      -      .         .        .     .     .
timer              .         .         cancelled failed   -         .      -      .         .        .     .     .
message            .         completed cancelled failed   -         .      -      .         .        .     .     .
child              .         .         cancelled failed   -         .      -      completed .        .     .     .
backing_off        .         .         cancelled failed   -         .      -      .         parked   .     .     .
parked             .         .         cancelled .        -         .      -      .         .        .     .     .
parked_child       .         .         cancelled .        -         .      -      .         .        .     .     .
compensating       .         .         .         .        -         -      -      .         parked   again again .
compensating_again .         .         .         .        -         .      -      .         parked   .     .     .
settling           .         .         .         .        -         .      -      cancelled .        .     .     .
recurred           completed .         cancelled failed   -         .      -      .         .        .     .     .
completed          .         .         .         .        -         -      gone   .         .        .     .     gone
failed             .         .         .         .        completed -      gone   .         .        .     .     gone
cancelled          .         .         .         .        event     -      gone   .         .        .     .     gone
deleted            gone      gone      -         gone     -         -      -      gone      gone     gone  gone  gone
"""


def rows() -> dict[tuple[str, str], str]:
    """(state, input) to cell."""
    header, *lines = (line.split() for line in TABLE.strip().splitlines())
    for name, *cells in lines:
        assert len(cells) == len(header), f"the row of {name} has {len(cells)} cells, there are {len(header)} inputs"
    return {(name, given): cell for name, *cells in lines for given, cell in zip(header, cells, strict=True)}
