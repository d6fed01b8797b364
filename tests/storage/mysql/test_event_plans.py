"""With 100,000 events and waits, accepting, registering waits and pruning read through indexes only."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from edda.core.model import AckInbox, Event, EventKey, NewEvent, RunId, RunWrite, Wait
from edda.storage.mysql.accept_sql import FIND_KNOWN, FIND_WAITS, VERSIONS, lookup_statements
from edda.storage.mysql.accept_sql import WaitLookup as Looking
from edda.storage.mysql.batch_sql import DROP_WAIT, END_WAITS, EventInboxRow, insert_event_items
from edda.storage.mysql.claims import FIND_INBOXES, READ_WAITS, read_inbox_items
from edda.storage.mysql.connection import MySQLSession
from edda.storage.mysql.decisions import find_events
from edda.storage.mysql.events import (
    EVENTS_OF_TYPE,
    EVENTS_UNDER_KEY,
    FIND_EVENT,
    LAST_EVENT,
    LAST_EVENT_BEFORE,
    LOCK_EVENTS_SHARED,
    MATCH_PATHS,
)
from edda.storage.mysql.locks import LOCK_EXCLUSIVE, LOCK_SHARED
from edda.storage.mysql.pruning import (
    DELETE_EVENTS,
    DELETE_INBOX_ITEMS,
    DELETE_KEYS,
    DELETE_OF_RUNS,
    FIND_ENDED,
    FIND_KEYED,
    FIND_OLD,
    FIND_READ,
    FIND_USED,
)
from edda.storage.mysql.statement import Statement, join_values, quote_text

from .test_plans import NUMBERS, Look, look, look_at

# Event i, received at i, has a key of its own and the busy one; those up to 1,000 have lost their keys, as if pruned.
# Run i waits for a later event; 'reader' has received every other event and has read all but ten, and one of these ten
# events has lost its keys. 2,000 runs have ended.
SEEDS = (
    f"""INSERT INTO edda_event (seq, source, id, type, received_at, body)
    SELECT i + 1, 'shop', CONCAT('order', i + 1), CONCAT('type', (i + 1) % 5), i + 1, REPEAT('x', 100)
      FROM ({NUMBERS}) n ORDER BY i""",
    "INSERT INTO edda_event_key SELECT UNHEX(MD5(CONCAT('event', seq))), seq FROM edda_event WHERE seq > 1000",
    "INSERT INTO edda_event_key SELECT UNHEX(MD5('busy')), seq FROM edda_event WHERE seq > 1000",
    "INSERT INTO edda_event_type VALUES ('type0', 1), ('type1', 1), ('type2', 1)",
    "INSERT INTO edda_match_paths VALUES ('type0', 'a', 0), ('type1', 'a', 0), ('type2', 'a', 0)",
    f"""INSERT INTO edda_open_run (run_id, workflow, status, epoch, generation, event_cursor)
    SELECT CONCAT('run', LPAD(i, 8, '0')), 'checkout', 'waiting_for_event', 1, 0, 99990 FROM ({NUMBERS}) n""",
    """INSERT INTO edda_open_run (run_id, workflow, status, owner, epoch, generation, event_cursor, inbox_count,
        inbox_read)
    VALUES ('reader', 'checkout', 'running', 'worker', 1, 0, 0, 50000, 49990)""",
    """INSERT INTO edda_wait (run_id, step, `key`, target_key, type, `match`)
    SELECT run_id, 'ship', UNHEX(MD5(CONCAT('wait', run_id))), UNHEX(MD5(CONCAT('own', run_id))), 'type1', ''
      FROM edda_open_run WHERE run_id <> 'reader'""",
    """INSERT INTO edda_inbox (run_id, inbox_no, kind, step, at, value, event)
    SELECT 'reader', seq DIV 2, 'event', 'ship', seq, '', seq FROM edda_event WHERE seq % 2 = 0""",
    """INSERT INTO edda_inbox (run_id, inbox_no, kind, step, at, value)
    SELECT CONCAT('ended', seq), 1, 'cancel', '', 200000 + seq, '' FROM edda_event WHERE seq <= 2000""",
    """INSERT INTO edda_result (run_id, generation, status, value, ended_at)
    SELECT CONCAT('ended', seq), 0, 'completed', '', seq FROM edda_event WHERE seq <= 2000""",
    """INSERT INTO edda_run (id, generation, workflow, input, created_at)
    SELECT CONCAT('ended', seq), 0, 'checkout', '', seq FROM edda_event WHERE seq <= 2000""",
    """INSERT INTO edda_history (run_id, generation, seq, epoch, kind, step, name, ok, at, attempt, input, value)
    SELECT CONCAT('ended', seq), 0, 1, 1, 'step', '1', 'pay', TRUE, 1, 1, '', '' FROM edda_event WHERE seq <= 2000""",
    """ANALYZE TABLE edda_event, edda_event_key, edda_event_type, edda_match_paths, edda_open_run, edda_wait,
        edda_inbox,
    edda_result, edda_run, edda_history""",
)

MD5_OF = b"SELECT UNHEX(MD5(%b))"
BORN = [RunId(f"run{i:08}") for i in range(10)]


async def key(session: MySQLSession, name: str) -> bytes:
    return bytes((await session.run(MD5_OF, name)).rows[0][0])


async def ask(session: MySQLSession, run: str, name: str, cursor: int | None) -> Look:
    wait = Wait("step", await key(session, name), await key(session, "nobody's"), "type1", b"", cursor=cursor)
    (seen,) = await look_at(session, *find_events([RunWrite(RunId(run), 1, 0, transition=AckInbox(0), waits=(wait,))]))
    return seen


def selects(column: str, values: Sequence[str]) -> list[bytes]:
    return [b"SELECT %b AS %b" % (quote_text(value), column.encode()) for value in values]


# Registering waits


@pytest.mark.parametrize("cursor", [99_990, None])
async def test_asking_for_the_next_event_of_a_busy_key_reads_a_handful_of_rows(
    session: MySQLSession, cursor: int | None
) -> None:
    seen = await ask(session, "run00000001", "busy", cursor)
    assert seen.rows == 1
    assert "ALL" not in seen.plan
    assert seen.reads <= 12


async def test_what_a_run_has_read_below_its_cursor_is_not_looked_at(session: MySQLSession) -> None:
    seen = await ask(session, "reader", "busy", 99_990)
    assert seen.rows == 1
    assert seen.reads <= 12


async def test_asking_for_an_event_that_did_not_come_reads_next_to_nothing(session: MySQLSession) -> None:
    seen = await ask(session, "run00000001", "unheard of", None)
    assert seen.rows == 0
    assert seen.reads <= 10


async def test_a_hundred_waits_are_looked_up_one_by_one(session: MySQLSession) -> None:
    own = await key(session, "nobody's")
    waits = [Wait(f"step{i}", await key(session, f"event{2000 + i}"), own, "type1", b"", cursor=0) for i in range(100)]
    run_writes = [RunWrite(RunId("reader"), 1, 0, transition=AckInbox(0), waits=tuple(waits))]
    seen = await look_at(session, *find_events(run_writes))
    assert sum(look.rows for look in seen) == 50  # the reader has the others
    assert sum(look.reads for look in seen) <= 100 * 10


async def test_the_control_a_bound_from_another_table_reads_the_whole_key(session: MySQLSession) -> None:
    wait = Wait("step", await key(session, "busy"), await key(session, "nobody's"), "type1", b"", cursor=99_990)
    (statement,) = find_events([RunWrite(RunId("reader"), 1, 0, transition=AckInbox(0), waits=(wait,))])
    unbounded = statement.body.replace(b"k.seq > 99990", b"k.seq + 0 > 99990")
    (seen,) = await look_at(session, Statement("", unbounded))
    assert seen.reads > 10_000


# Accepting events


async def test_a_post_is_compared_with_what_is_there_by_index(session: MySQLSession) -> None:
    plain = [await key(session, f"wait{run}") for run in BORN]
    post = [
        NewEvent(Event("shop", f"order{50_000 + i}", "type1", None, b""), (EventKey(plain[i], plain[i]),))
        for i in range(10)
    ]
    seen = {}
    for statement in lookup_statements(Looking(post, 8), ()):
        if statement.label.startswith("SELECT"):
            (seen[statement.label.encode()],) = await look_at(session, statement)
    assert seen[FIND_KNOWN].rows == seen[FIND_WAITS].rows == 10
    assert "edda_event_identity" in seen[FIND_KNOWN].plan
    assert "edda_wait_key" in seen[FIND_WAITS].plan
    assert seen[FIND_KNOWN].reads <= 60
    assert seen[FIND_WAITS].reads <= 30
    assert seen[VERSIONS].reads <= 4


@pytest.mark.parametrize("template", [LOCK_SHARED, LOCK_EXCLUSIVE])
async def test_locking_buckets_touches_no_others(session: MySQLSession, template: bytes) -> None:
    for count in (1, 20, 200):
        seen = await look(session, template, range(256, 256 + 2 * count, 2))
        assert seen.rows == count
        assert "range" in seen.plan or "const" in seen.plan
        assert seen.reads <= 2 * count + 2


async def test_delivering_touches_the_runs_it_is_for(session: MySQLSession) -> None:
    items = [EventInboxRow(run, 1, "ship", 99_999) for run in BORN]
    statements = [statement for statement in insert_event_items(items) if "sql_mode" not in statement.label]
    assert len(statements) == 4
    for seen in await look_at(session, *statements):
        assert seen.reads <= 80


@pytest.mark.parametrize("template", [DROP_WAIT, END_WAITS])
async def test_ending_waits_touches_the_runs_they_are_of(session: MySQLSession, template: bytes) -> None:
    rows = [b"SELECT %b AS run_id, 'ship' AS step" % quote_text(run) for run in BORN]
    (seen,) = await look_at(session, *join_values(template, rows))
    assert seen.reads <= 60


# Reading events


async def test_the_waits_of_claimed_runs_are_read_run_by_run(session: MySQLSession) -> None:
    seen = await look(session, READ_WAITS, BORN)
    assert seen.rows == 10
    assert seen.reads <= 30


async def test_items_that_were_read_are_not_read_again(session: MySQLSession) -> None:
    found = await look(session, FIND_INBOXES, "worker")
    assert found.rows == 1
    assert found.reads <= 2
    inboxes = [(b"reader", 49_990), *((run.encode(), 0) for run in BORN)]
    (seen,) = await look_at(session, *read_inbox_items(inboxes))
    assert seen.rows == 10
    assert seen.reads <= 60


async def test_the_log_is_read_from_where_one_was(session: MySQLSession) -> None:
    seen = await look(session, EVENTS_OF_TYPE, "type1", 50_000, 99_000, 10)
    assert seen.rows == 10
    assert seen.reads <= 15


async def test_a_key_is_read_from_where_one_was(session: MySQLSession) -> None:
    seen = await look(session, EVENTS_UNDER_KEY, await key(session, "busy"), 50_000, 10)
    assert seen.rows == 10
    assert seen.reads <= 25


async def test_the_newest_event_is_the_end_of_an_index(session: MySQLSession) -> None:
    assert (await look(session, LAST_EVENT)).reads <= 3
    assert (await look(session, LAST_EVENT_BEFORE, 50_000)).reads <= 3


async def test_single_events_and_the_path_sets_of_types_are_looked_up(session: MySQLSession) -> None:
    assert (await look(session, FIND_EVENT, "shop", "order77")).reads <= 2
    assert (await look(session, LOCK_EVENTS_SHARED, [7, 8, 9])).reads <= 8
    assert (await look(session, MATCH_PATHS, ["type0"])).reads <= 10


# Pruning


async def test_the_keys_of_old_events_are_the_first_of_their_index(session: MySQLSession) -> None:
    seen = await look(session, FIND_KEYED, 50_000, 50_000, 10)
    assert seen.rows == 10
    assert "edda_event_key_seq" in seen.plan
    assert seen.reads <= 100


async def test_looking_for_keys_of_old_events_ends_where_the_young_ones_begin(session: MySQLSession) -> None:
    seen = await look(session, FIND_KEYED, 1_000, 1_000, 10)
    assert seen.rows == 0
    assert seen.reads <= 5


async def test_deleting_keys_touches_those_of_its_events(session: MySQLSession) -> None:
    rows = [b"SELECT %d AS seq" % seq for seq in range(2_000, 2_010)]
    (seen,) = await look_at(session, *join_values(DELETE_KEYS, rows))
    assert seen.reads <= 120


async def test_old_events_without_keys_are_found_from_the_oldest_on(session: MySQLSession) -> None:
    seen = await look(session, FIND_OLD, 900, 100_000, 10)
    assert seen.rows == 10
    assert "edda_event_received" in seen.plan
    assert seen.reads <= 120


async def test_what_keeps_an_event_is_looked_up_event_by_event(session: MySQLSession) -> None:
    seqs = [99_998, 99_999, 100_000, 1, 2]
    seen = await look(session, FIND_USED, seqs, seqs)
    assert seen.rows == 3
    assert seen.reads <= 60
    (seen,) = await look_at(session, *join_values(DELETE_EVENTS, [b"SELECT %d AS seq" % seq for seq in range(1, 11)]))
    assert seen.reads <= 60


async def test_items_are_found_from_the_oldest_on(session: MySQLSession) -> None:
    seen = await look(session, FIND_READ, 100, 10)
    assert seen.rows == 0  # their events are still there
    assert "edda_inbox_at" in seen.plan
    assert seen.reads <= 50 * 5
    rows = [b"SELECT 'reader' AS run_id, %d AS inbox_no" % n for n in range(1, 11)]
    (seen,) = await look_at(session, *join_values(DELETE_INBOX_ITEMS, rows))
    assert seen.reads <= 60


async def test_ended_runs_are_found_from_the_oldest_on_and_deleted_one_by_one(session: MySQLSession) -> None:
    seen = await look(session, FIND_ENDED, 1_500, 10)
    assert seen.rows == 10
    assert "edda_result_ended" in seen.plan
    assert seen.reads <= 60
    rows = selects("run_id", [f"ended{i}" for i in range(10)])
    for template in DELETE_OF_RUNS:
        (deleted,) = await look_at(session, *join_values(template, rows))
        assert deleted.reads <= 80
