-- All times are microseconds since 1970 (UTC) on the host's clock.
-- Narrow tables have no rowid (one B-tree instead of two). History and payloads have one: appending wide rows in the
-- order of arrival writes half as many pages per batch as sorting them in by run.
-- SQLite would store a NUL inside a text; other databases do not, and a run has to fit each of them.

-- ---------------------------------------------------------------------------------------------------- workers

CREATE TABLE edda_worker (
    id          TEXT    PRIMARY KEY NOT NULL CHECK (instr(id, char(0)) = 0),
    service     TEXT    NOT NULL CHECK (instr(service, char(0)) = 0),
    host        TEXT    NOT NULL CHECK (instr(host, char(0)) = 0),
    pid         INTEGER NOT NULL,
    started_at  INTEGER NOT NULL,
    expires_at  INTEGER NOT NULL  -- the end of its lease
) WITHOUT ROWID;

-- One row per worker incarnation. Each batch updates it with a compare-and-set, a take-over deletes it.
CREATE TABLE edda_fence (
    worker            TEXT    PRIMARY KEY NOT NULL,
    batch_no          INTEGER NOT NULL,
    ownership_version INTEGER NOT NULL,           -- raised when a run is taken away from a live worker
    token             INTEGER NOT NULL DEFAULT 0  -- random, written by each batch: tells apart two batches with one number
) WITHOUT ROWID;

-- How many claims of a worker are committed.
CREATE TABLE edda_claim (
    worker      TEXT    PRIMARY KEY NOT NULL,
    claims      INTEGER NOT NULL
) WITHOUT ROWID;

-- ------------------------------------------------------------------------------------------------------- runs

CREATE TABLE edda_run (
    id          TEXT    NOT NULL CHECK (instr(id, char(0)) = 0),
    generation  INTEGER NOT NULL,
    workflow    TEXT    NOT NULL CHECK (instr(workflow, char(0)) = 0),
    input       BLOB    NOT NULL,
    created_at  INTEGER NOT NULL,
    deadline    INTEGER,
    parent      TEXT    CHECK (instr(parent, char(0)) = 0),
    parent_step TEXT    CHECK (instr(parent_step, char(0)) = 0),
    depth       INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (id, generation)
);
CREATE INDEX edda_run_created ON edda_run (created_at DESC, id DESC);
CREATE INDEX edda_run_parent ON edda_run (parent) WHERE parent IS NOT NULL;
-- Finds the runs of a rarely started workflow among a million others.
CREATE INDEX edda_run_workflow ON edda_run (workflow, created_at DESC, id DESC);
-- For pruning: a generation is pruned by the age of the generation after it.
CREATE INDEX edda_run_followed ON edda_run (created_at, id, generation) WHERE generation > 0;

CREATE TABLE edda_history (
    run_id      TEXT    NOT NULL,
    generation  INTEGER NOT NULL,
    seq         INTEGER NOT NULL,
    epoch       INTEGER NOT NULL,
    kind        TEXT    NOT NULL,
    step        TEXT    NOT NULL CHECK (instr(step, char(0)) = 0),
    name        TEXT    NOT NULL CHECK (instr(name, char(0)) = 0),
    ok          INTEGER NOT NULL,
    at          INTEGER NOT NULL,
    attempt     INTEGER NOT NULL,
    inbox_no    INTEGER,  -- the inbox item that this entry records
    event       INTEGER,  -- the number of the event that this entry brings
    input       BLOB    NOT NULL,
    value       BLOB    NOT NULL,
    PRIMARY KEY (run_id, generation, seq)
);

CREATE TABLE edda_result (
    run_id      TEXT    PRIMARY KEY NOT NULL,
    generation  INTEGER NOT NULL,
    status      TEXT    NOT NULL CHECK (status IN ('completed', 'failed', 'cancelled', 'recurred')),
    value       BLOB    NOT NULL,
    ended_at    INTEGER NOT NULL
);
-- With the status, so that ends are counted without reading the results.
CREATE INDEX edda_result_ended ON edda_result (ended_at, status);
-- Completed runs are nearly all runs; they add nothing to this index.
CREATE INDEX edda_result_unusual ON edda_result (status, run_id, generation) WHERE status <> 'completed';

-- The only row of a run that is updated, therefore narrow. It is deleted when the run ends.
CREATE TABLE edda_open_run (
    run_id        TEXT    PRIMARY KEY NOT NULL,
    workflow      TEXT    NOT NULL,
    status        TEXT    NOT NULL CHECK (status IN ('running', 'waiting_for_event', 'waiting_for_timer',
                                  'waiting_for_message', 'waiting_for_child', 'compensating', 'parked')),
    owner         TEXT,
    epoch         INTEGER NOT NULL,            -- raised by each claim
    generation    INTEGER NOT NULL,
    event_cursor  INTEGER NOT NULL,            -- the newest event when the run was started
    ready_at      INTEGER,
    inbox_count   INTEGER NOT NULL DEFAULT 0,  -- the number of the last inbox item
    inbox_read    INTEGER NOT NULL DEFAULT 0,  -- the number of the last item that the history has
    cancelled     INTEGER NOT NULL DEFAULT 0,
    attempts      INTEGER NOT NULL DEFAULT 0,  -- how often it was parked in a row
    watchers      INTEGER NOT NULL DEFAULT 0,  -- rows of edda_watcher
    compensating  INTEGER NOT NULL DEFAULT 0,
    reason        TEXT    CHECK (instr(reason, char(0)) = 0),
    parked_at     INTEGER,                     -- when it was parked last
    end_if_parked INTEGER NOT NULL DEFAULT 0,  -- cancelled while parked: if it cannot be replayed, it ends as cancelled
    deaths        INTEGER NOT NULL DEFAULT 0,  -- workers that died while they owned the run
    deaths_alone  INTEGER NOT NULL DEFAULT 0,  -- those of them that owned no other run
    died_seq      INTEGER,                     -- the last entry before the first of these deaths
    alone         INTEGER NOT NULL DEFAULT 0,  -- its owner claimed it as its only run
    suspect_at    INTEGER                      -- replaces ready_at for a suspect: ordinary claims do not see it
) WITHOUT ROWID;
CREATE INDEX edda_open_run_ready   ON edda_open_run (workflow, ready_at) WHERE owner IS NULL;
CREATE INDEX edda_open_run_owner   ON edda_open_run (owner) WHERE owner IS NOT NULL;
CREATE INDEX edda_open_run_inbox   ON edda_open_run (owner) WHERE inbox_count > inbox_read AND owner IS NOT NULL;
CREATE INDEX edda_open_run_parked  ON edda_open_run (workflow) WHERE status = 'parked';
CREATE INDEX edda_open_run_suspect ON edda_open_run (suspect_at) WHERE suspect_at IS NOT NULL;

-- The inbox of a run: other processes insert here, only the owner of the run writes its history.
CREATE TABLE edda_inbox (
    run_id      TEXT    NOT NULL,
    inbox_no    INTEGER NOT NULL,
    kind        TEXT    NOT NULL,
    step        TEXT    NOT NULL CHECK (instr(step, char(0)) = 0),
    at          INTEGER NOT NULL,
    value       BLOB    NOT NULL,
    event       INTEGER,
    PRIMARY KEY (run_id, inbox_no)
);
-- A run receives an event at most once.
CREATE UNIQUE INDEX edda_inbox_event ON edda_inbox (event, run_id) WHERE event IS NOT NULL;
CREATE INDEX edda_inbox_at ON edda_inbox (at);

-- Steps of other runs that receive the end of a run; its parent has no row here. Their number is kept in
-- edda_open_run.watchers, because the end of a run compares it there.
CREATE TABLE edda_watcher (
    run_id      TEXT    NOT NULL,
    watcher     TEXT    NOT NULL CHECK (instr(watcher, char(0)) = 0),
    step        TEXT    NOT NULL CHECK (instr(step, char(0)) = 0),
    PRIMARY KEY (run_id, watcher, step)
) WITHOUT ROWID;

-- A step that was committed in the user's transaction and whose entry is not in the history yet.
CREATE TABLE edda_step_commit (
    run_id      TEXT    NOT NULL,
    generation  INTEGER NOT NULL,
    step        TEXT    NOT NULL CHECK (instr(step, char(0)) = 0),
    attempt     INTEGER NOT NULL,
    value       BLOB    NOT NULL,
    at          INTEGER NOT NULL,
    PRIMARY KEY (run_id, generation, step)
);

-- Values that a run published with ctx.set.
CREATE TABLE edda_run_value (
    run_id      TEXT    NOT NULL,
    name        TEXT    NOT NULL CHECK (instr(name, char(0)) = 0),
    value       BLOB    NOT NULL,
    at          INTEGER NOT NULL,
    PRIMARY KEY (run_id, name)
);

-- ----------------------------------------------------------------------------------------------------- events
-- One process writes at a time, so no other lock is needed here.

-- AUTOINCREMENT: else the number of a pruned event might be given out again.
CREATE TABLE edda_event (
    seq         INTEGER PRIMARY KEY AUTOINCREMENT,
    source      TEXT    NOT NULL CHECK (instr(source, char(0)) = 0),
    id          TEXT    NOT NULL CHECK (instr(id, char(0)) = 0),
    type        TEXT    NOT NULL CHECK (instr(type, char(0)) = 0),
    target      TEXT    CHECK (instr(target, char(0)) = 0),
    received_at INTEGER NOT NULL,
    body        BLOB    NOT NULL
);
CREATE UNIQUE INDEX edda_event_identity ON edda_event (source, id);
CREATE INDEX edda_event_by_type ON edda_event (type, seq);
CREATE INDEX edda_event_received ON edda_event (received_at, seq);

-- One row for each set of match paths of its type that an event has values for.
CREATE TABLE edda_event_key (
    key         BLOB    NOT NULL,
    seq         INTEGER NOT NULL,
    PRIMARY KEY (key, seq)
) WITHOUT ROWID;
CREATE INDEX edda_event_key_seq ON edda_event_key (seq);

CREATE TABLE edda_event_type (
    type        TEXT    PRIMARY KEY NOT NULL CHECK (instr(type, char(0)) = 0),
    version     INTEGER NOT NULL  -- raised with each new row of edda_match_paths
) WITHOUT ROWID;

-- The sets of paths that waits match on. Events with a number above filled_from have their keys.
CREATE TABLE edda_match_paths (
    type        TEXT    NOT NULL CHECK (instr(type, char(0)) = 0),
    paths       TEXT    NOT NULL CHECK (instr(paths, char(0)) = 0),
    filled_from INTEGER NOT NULL,
    PRIMARY KEY (type, paths)
) WITHOUT ROWID;

-- A row exists as long as its step waits; the transaction that deletes it decides how the wait ends.
CREATE TABLE edda_wait (
    run_id      TEXT    NOT NULL,
    step        TEXT    NOT NULL CHECK (instr(step, char(0)) = 0),
    key         BLOB    NOT NULL,
    target_key  BLOB    NOT NULL,  -- the key of events that are addressed to this run
    type        TEXT    NOT NULL CHECK (instr(type, char(0)) = 0),
    match       BLOB    NOT NULL,
    due         INTEGER,
    exclusive   INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (run_id, step)
) WITHOUT ROWID;
CREATE INDEX edda_wait_key ON edda_wait (key);

-- Events and messages that were committed with a step or a transaction and are not in edda_event yet.
-- AUTOINCREMENT: a staged event is deleted by its number, which must not be that of another one by then.
CREATE TABLE edda_staged_event (
    seq         INTEGER PRIMARY KEY AUTOINCREMENT,
    kind        TEXT    NOT NULL CHECK (kind IN ('event', 'message', 'redelivery')),
    body        BLOB    NOT NULL,
    due         INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX edda_staged_event_due ON edda_staged_event (due);

-- Events that the relayer sends to other systems.
CREATE TABLE edda_outbox (
    seq         INTEGER PRIMARY KEY AUTOINCREMENT,
    id          TEXT    NOT NULL CHECK (instr(id, char(0)) = 0),
    order_key   TEXT    NOT NULL CHECK (instr(order_key, char(0)) = 0),
    type        TEXT    NOT NULL CHECK (instr(type, char(0)) = 0),
    source      TEXT    NOT NULL CHECK (instr(source, char(0)) = 0),
    body        BLOB    NOT NULL,
    run_id      TEXT    CHECK (instr(run_id, char(0)) = 0),
    created_at  INTEGER NOT NULL,
    due         INTEGER NOT NULL,
    attempts    INTEGER NOT NULL,
    state       TEXT    NOT NULL CHECK (state IN ('pending', 'sent', 'dead')),
    reason      TEXT    CHECK (instr(reason, char(0)) = 0),
    ended_at    INTEGER
);
-- The same three columns in three orders: the queries for due events, and for events that block them, read no row.
CREATE INDEX edda_outbox_pending ON edda_outbox (seq, due, order_key) WHERE state = 'pending';
CREATE INDEX edda_outbox_due     ON edda_outbox (due, seq, order_key) WHERE state = 'pending';
CREATE INDEX edda_outbox_key     ON edda_outbox (order_key, due, seq) WHERE state = 'pending';
CREATE INDEX edda_outbox_dead    ON edda_outbox (seq) WHERE state = 'dead';
CREATE INDEX edda_outbox_sent    ON edda_outbox (ended_at) WHERE state = 'sent';

-- ------------------------------------------------------------------------------------------ viewer, API and CLI

CREATE TABLE edda_audit (
    seq         INTEGER PRIMARY KEY AUTOINCREMENT,
    at          INTEGER NOT NULL,
    who         TEXT    NOT NULL CHECK (instr(who, char(0)) = 0),
    action      TEXT    NOT NULL CHECK (instr(action, char(0)) = 0),
    subject     TEXT    NOT NULL CHECK (instr(subject, char(0)) = 0),
    origin      TEXT    NOT NULL CHECK (instr(origin, char(0)) = 0),
    details     TEXT    NOT NULL CHECK (instr(details, char(0)) = 0)
);

-- Workflows as the code defines them, and the schemas of the events that they wait for.
CREATE TABLE edda_definition (
    workflow    TEXT    PRIMARY KEY NOT NULL CHECK (instr(workflow, char(0)) = 0),
    service     TEXT    NOT NULL CHECK (instr(service, char(0)) = 0),
    details     BLOB    NOT NULL,
    seen_at     INTEGER NOT NULL
);

CREATE TABLE edda_event_schema (
    workflow    TEXT    NOT NULL CHECK (instr(workflow, char(0)) = 0),
    type        TEXT    NOT NULL CHECK (instr(type, char(0)) = 0),
    schema      BLOB    NOT NULL,
    PRIMARY KEY (workflow, type)
);
