"""An audit kept by the database itself: triggers that write down every move of a run, as it is committed.

A claim is noted with the number of history rows it found. If rows of older epochs were added later, a worker wrote
after its runs had passed on; that number is the only trace it leaves. Nobody may ever change history or results.
"""

from __future__ import annotations

from msgspec import Struct

COLUMNS = "what, run_id, old_owner, new_owner, old_epoch, new_epoch, old_status, new_status, seen, fenced, since"
READ = f"SELECT {COLUMNS} FROM torture_audit ORDER BY n"
COUNT_TAKEOVERS = "SELECT count(*) FROM torture_audit WHERE what = 'left'"
FIND_TAMPERING = "SELECT run_id FROM torture_audit WHERE what = 'tampered'"


class Note(Struct, frozen=True):
    what: str
    """born, moved, ended: a run. left: a worker. tampered: a row that nobody may touch."""
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


_NOTE = f"INSERT INTO torture_audit ({COLUMNS})"
_BORN = f"""{_NOTE}
VALUES ('born', NEW.run_id, NULL, NEW.owner, NULL, NEW.epoch, NULL, NEW.status, NULL, NULL, NEW.start_seq)"""
_ENDED = f"{_NOTE} VALUES ('ended', OLD.run_id, OLD.owner, NULL, OLD.epoch, NULL, OLD.status, NULL, NULL, NULL, NULL)"
_LEFT = f"{_NOTE} VALUES ('left', '', OLD.id, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL)"
_TAMPERED = f"{_NOTE} VALUES ('tampered', OLD.run_id, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL)"
_SEEN = "(SELECT count(*) FROM edda_hist WHERE run_id = NEW.run_id)"
_FENCED = "(SELECT count(*) FROM edda_fence WHERE worker = OLD.owner)"
_CLAIMED, _LET_GO = "OLD.epoch <> NEW.epoch", "OLD.owner IS NOT NULL AND NEW.owner IS NULL"
_MOVED_VALUES = """
VALUES ('moved', OLD.run_id, OLD.owner, NEW.owner, OLD.epoch, NEW.epoch, OLD.status, NEW.status,
        {seen}, {fenced}, NULL)"""
_MOVED = _NOTE + _MOVED_VALUES.format(
    seen=f"CASE WHEN {_CLAIMED} THEN {_SEEN} END", fenced=f"CASE WHEN {_LET_GO} THEN {_FENCED} END"
)
# MariaDB would read the fence, and lock it, before it looks at the CASE: that makes deadlocks of the audit's own.
_MOVED_MYSQL = f"""BEGIN
    DECLARE seen, fenced int;
    IF {_CLAIMED} THEN SET seen = {_SEEN}; END IF;
    IF {_LET_GO} THEN SET fenced = {_FENCED}; END IF;
    {_NOTE + _MOVED_VALUES.format(seen="seen", fenced="fenced")};
END"""

_TABLE = """CREATE TABLE torture_audit (n {serial} PRIMARY KEY, what varchar(10) NOT NULL, run_id {id} NOT NULL,
    old_owner {id}, new_owner {id}, old_epoch int, new_epoch int, old_status varchar(32), new_status varchar(32),
    seen int, fenced int, since bigint)"""

_EVENTS = (
    ("born", "INSERT ON edda_sched", _BORN),
    ("moved", "UPDATE ON edda_sched", _MOVED),
    ("ended", "DELETE ON edda_sched", _ENDED),
    ("left", "DELETE ON edda_worker", _LEFT),
    ("history_changed", "UPDATE ON edda_hist", _TAMPERED),
    ("history_lost", "DELETE ON edda_hist", _TAMPERED),
    ("result_changed", "UPDATE ON edda_result", _TAMPERED),
    ("result_lost", "DELETE ON edda_result", _TAMPERED),
)


def _postgres() -> tuple[str, ...]:
    """A function sees what is committed at its own time, not at the time of the statement that called it."""
    texts = [_TABLE.format(serial="bigserial", id="text")]
    for name, event, note in _EVENTS:
        body = f"BEGIN {note}; RETURN NULL; END"
        texts += [
            f"CREATE FUNCTION torture_{name}() RETURNS trigger LANGUAGE plpgsql AS $$ {body} $$",
            f"CREATE TRIGGER torture_{name} AFTER {event} FOR EACH ROW EXECUTE FUNCTION torture_{name}()",
        ]
    return tuple(texts)


def _mysql() -> tuple[str, ...]:
    table = _TABLE.format(serial="bigint AUTO_INCREMENT", id="varbinary(255)")
    notes = [(n, event, _MOVED_MYSQL if note is _MOVED else note) for n, event, note in _EVENTS]
    return (table, *(f"CREATE TRIGGER torture_{n} AFTER {event} FOR EACH ROW {note}" for n, event, note in notes))


def _sqlite() -> tuple[str, ...]:
    table = _TABLE.format(serial="integer", id="text")
    return (table, *(f"CREATE TRIGGER torture_{n} AFTER {event} BEGIN {note}; END" for n, event, note in _EVENTS))


INSTALL = {"postgres": _postgres(), "mysql": _mysql(), "sqlite": _sqlite()}
