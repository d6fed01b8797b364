"""An audit kept by the database itself: triggers that write down every move of a run, as it is committed.

A claim is noted with the number of history rows it found. If rows of older epochs were added later, a worker wrote
after its runs had passed on; that number is the only trace it leaves. A step's record in a transaction of its own is
noted with who owned the run then. Nobody may ever change history or results.
"""

from __future__ import annotations

from msgspec import Struct

COUNT_TAKEOVERS = "SELECT count(*) FROM faults_audit WHERE what = 'left'"
FIND_TAMPERING = "SELECT run_id FROM faults_audit WHERE what = 'tampered'"


class Note(Struct, frozen=True):
    what: str
    """born, moved, ended: a run. left: a worker. done: a step. tampered: a row that nobody may touch."""
    run_id: str
    old_owner: str | None
    new_owner: str | None
    old_epoch: int | None
    new_epoch: int | None
    old_status: str | None
    new_status: str | None
    seen: int | None
    """History rows that were there at a claim."""
    fenced: int | None
    """Whether the old owner still had its fence row when it let go; after a takeover it has none."""
    since: int | None
    """The newest event when the run was born."""
    unread: int | None
    """Letters that were not read when the next generation began."""
    cancelled: int | None
    """Whether the run had been asked to stop when it ended."""
    generation: int | None
    step: str | None


READ = f"SELECT {', '.join(Note.__struct_fields__)} FROM faults_audit ORDER BY n"


def _note(what: str, **facts: str) -> str:
    facts = {"what": f"'{what}'", **facts}
    return f"INSERT INTO faults_audit ({', '.join(facts)}) VALUES ({', '.join(facts.values())})"


def _status_of(row: str) -> str:
    """A run that undoes is in that state wherever its row says that it waits."""
    return f"CASE WHEN {row}.compensating AND {row}.status <> 'parked' THEN 'compensating' ELSE {row}.status END"


def _note_move(seen: str, fenced: str) -> str:
    return _note(
        "moved",
        run_id="OLD.run_id",
        old_owner="OLD.owner",
        new_owner="NEW.owner",
        old_epoch="OLD.epoch",
        new_epoch="NEW.epoch",
        old_status=_status_of("OLD"),
        new_status=_status_of("NEW"),
        seen=seen,
        fenced=fenced,
        unread="CASE WHEN OLD.generation <> NEW.generation THEN NEW.inbox_count - NEW.inbox_read END",
    )


_BORN = _note(
    "born",
    run_id="NEW.run_id",
    new_owner="NEW.owner",
    new_epoch="NEW.epoch",
    new_status=_status_of("NEW"),
    since="NEW.event_cursor",
)
_ENDED = _note(
    "ended",
    run_id="OLD.run_id",
    old_owner="OLD.owner",
    old_epoch="OLD.epoch",
    old_status=_status_of("OLD"),
    cancelled="CASE WHEN OLD.cancelled THEN 1 ELSE 0 END",
)
_LEFT = _note("left", run_id="''", old_owner="OLD.id")
_DONE = """INSERT INTO faults_audit (what, run_id, generation, step, old_owner, old_epoch)
    SELECT 'done', NEW.run_id, NEW.generation, NEW.step, owner, epoch FROM edda_open_run WHERE run_id = NEW.run_id"""
_TAMPERED = _note("tampered", run_id="OLD.run_id")
_SEEN = "(SELECT count(*) FROM edda_history WHERE run_id = NEW.run_id)"
_FENCED = "(SELECT count(*) FROM edda_fence WHERE worker = OLD.owner)"
_CLAIMED, _LET_GO = "OLD.epoch <> NEW.epoch", "OLD.owner IS NOT NULL AND NEW.owner IS NULL"
_MOVED = _note_move(f"CASE WHEN {_CLAIMED} THEN {_SEEN} END", f"CASE WHEN {_LET_GO} THEN {_FENCED} END")
# MariaDB would read the fence, and lock it, before it looks at the CASE: that makes deadlocks of the audit's own.
_MOVED_MYSQL = f"""BEGIN
    DECLARE seen_now, fenced_now int;
    IF {_CLAIMED} THEN SET seen_now = {_SEEN}; END IF;
    IF {_LET_GO} THEN SET fenced_now = {_FENCED}; END IF;
    {_note_move("seen_now", "fenced_now")};
END"""

_TABLE = """CREATE TABLE faults_audit (n {serial} PRIMARY KEY, what varchar(10) NOT NULL, run_id {id} NOT NULL,
    old_owner {id}, new_owner {id}, old_epoch int, new_epoch int, old_status varchar(32), new_status varchar(32),
    seen int, fenced int, since bigint, unread int, cancelled int, generation int, step {step})"""

_EVENTS = (
    ("born", "INSERT ON edda_open_run", _BORN),
    ("moved", "UPDATE ON edda_open_run", _MOVED),
    ("ended", "DELETE ON edda_open_run", _ENDED),
    ("left", "DELETE ON edda_worker", _LEFT),
    ("done", "INSERT ON edda_step_commit", _DONE),
    ("history_changed", "UPDATE ON edda_history", _TAMPERED),
    ("history_lost", "DELETE ON edda_history", _TAMPERED),
    ("result_changed", "UPDATE ON edda_result", _TAMPERED),
    ("result_lost", "DELETE ON edda_result", _TAMPERED),
)


def _postgres() -> tuple[str, ...]:
    """A function sees what is committed at its own time, not at the time of the statement that called it."""
    texts = [_TABLE.format(serial="bigserial", id="text", step="text")]
    for name, event, note in _EVENTS:
        body = f"BEGIN {note}; RETURN NULL; END"
        texts += [
            f"CREATE FUNCTION faults_{name}() RETURNS trigger LANGUAGE plpgsql AS $$ {body} $$",
            f"CREATE TRIGGER faults_{name} AFTER {event} FOR EACH ROW EXECUTE FUNCTION faults_{name}()",
        ]
    return tuple(texts)


def _mysql() -> tuple[str, ...]:
    table = _TABLE.format(serial="bigint AUTO_INCREMENT", id="varbinary(255)", step="varbinary(2000)")
    notes = [(n, event, _MOVED_MYSQL if note is _MOVED else note) for n, event, note in _EVENTS]
    return (table, *(f"CREATE TRIGGER faults_{n} AFTER {event} FOR EACH ROW {note}" for n, event, note in notes))


def _sqlite() -> tuple[str, ...]:
    table = _TABLE.format(serial="integer", id="text", step="text")
    return (table, *(f"CREATE TRIGGER faults_{n} AFTER {event} BEGIN {note}; END" for n, event, note in _EVENTS))


INSTALL = {"postgres": _postgres(), "mysql": _mysql(), "sqlite": _sqlite()}
