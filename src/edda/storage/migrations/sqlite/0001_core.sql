-- Runs, their history, and who may write it. Times are microseconds since 1970 (UTC) on the host's clock.
-- Narrow tables have no rowid (one tree instead of two). History and payloads have one: appending wide rows to
-- a table in order of arrival writes half as many pages per batch as sorting them in by run.
-- SQLite would take a NUL inside a text; other databases do not, and a run has to fit each of them.

CREATE TABLE edda_worker (
    id          TEXT    PRIMARY KEY NOT NULL CHECK (instr(id, char(0)) = 0),
    service     TEXT    NOT NULL CHECK (instr(service, char(0)) = 0),
    host        TEXT    NOT NULL CHECK (instr(host, char(0)) = 0),
    pid         INTEGER NOT NULL,
    started_at  INTEGER NOT NULL,
    expires_at  INTEGER NOT NULL
) WITHOUT ROWID;

-- One row per worker incarnation; every batch bumps it.
CREATE TABLE edda_fence (
    worker      TEXT    PRIMARY KEY NOT NULL,
    batch_no    INTEGER NOT NULL,
    moves       INTEGER NOT NULL
) WITHOUT ROWID;

CREATE TABLE edda_run (
    id          TEXT    NOT NULL CHECK (instr(id, char(0)) = 0),
    gen         INTEGER NOT NULL,
    workflow    TEXT    NOT NULL CHECK (instr(workflow, char(0)) = 0),
    input       BLOB    NOT NULL,
    created_at  INTEGER NOT NULL,
    deadline    INTEGER,
    parent      TEXT    CHECK (instr(parent, char(0)) = 0),
    parent_step TEXT    CHECK (instr(parent_step, char(0)) = 0),
    depth       INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (id, gen)
);
CREATE INDEX edda_run_created ON edda_run (created_at DESC, id DESC);
CREATE INDEX edda_run_parent ON edda_run (parent) WHERE parent IS NOT NULL;

CREATE TABLE edda_hist (
    run_id      TEXT    NOT NULL,
    gen         INTEGER NOT NULL,
    seq         INTEGER NOT NULL,
    epoch       INTEGER NOT NULL,
    kind        TEXT    NOT NULL,
    step        TEXT    NOT NULL CHECK (instr(step, char(0)) = 0),
    name        TEXT    NOT NULL CHECK (instr(name, char(0)) = 0),
    ok          INTEGER NOT NULL,
    at          INTEGER NOT NULL,
    attempt     INTEGER NOT NULL,
    n           INTEGER,
    event       INTEGER,
    input       BLOB    NOT NULL,
    value       BLOB    NOT NULL,
    PRIMARY KEY (run_id, gen, seq)
);

CREATE TABLE edda_result (
    run_id      TEXT    PRIMARY KEY NOT NULL,
    gen         INTEGER NOT NULL,
    status      TEXT    NOT NULL CHECK (status IN ('completed', 'failed', 'cancelled', 'recurred')),
    value       BLOB    NOT NULL,
    ended_at    INTEGER NOT NULL
);
CREATE INDEX edda_result_ended ON edda_result (ended_at);

-- The only row of a run that is ever updated, so it is narrow; it is deleted when the run ends.
CREATE TABLE edda_sched (
    run_id      TEXT    PRIMARY KEY NOT NULL,
    workflow    TEXT    NOT NULL,
    status      TEXT    NOT NULL CHECK (status IN ('running', 'waiting_for_event', 'waiting_for_timer',
                                'waiting_for_message', 'waiting_for_child', 'compensating', 'parked')),
    owner       TEXT,
    epoch       INTEGER NOT NULL,
    gen         INTEGER NOT NULL,
    start_seq   INTEGER NOT NULL,
    ready_at    INTEGER,
    delivered   INTEGER NOT NULL DEFAULT 0,
    absorbed    INTEGER NOT NULL DEFAULT 0,
    cancelled   INTEGER NOT NULL DEFAULT 0,
    attempts    INTEGER NOT NULL DEFAULT 0,
    watchers    INTEGER NOT NULL DEFAULT 0,
    undoing     INTEGER NOT NULL DEFAULT 0,
    reason      TEXT    CHECK (instr(reason, char(0)) = 0)
) WITHOUT ROWID;
CREATE INDEX edda_sched_ready  ON edda_sched (workflow, ready_at) WHERE owner IS NULL;
CREATE INDEX edda_sched_owner  ON edda_sched (owner) WHERE owner IS NOT NULL;
CREATE INDEX edda_sched_mail   ON edda_sched (owner) WHERE delivered > absorbed AND owner IS NOT NULL;
CREATE INDEX edda_sched_parked ON edda_sched (workflow) WHERE status = 'parked';

-- The inbox of a run: outsiders write here, only the owner writes history.
CREATE TABLE edda_delivery (
    run_id      TEXT    NOT NULL,
    n           INTEGER NOT NULL,
    kind        TEXT    NOT NULL,
    step        TEXT    NOT NULL CHECK (instr(step, char(0)) = 0),
    at          INTEGER NOT NULL,
    value       BLOB    NOT NULL,
    event       INTEGER,
    PRIMARY KEY (run_id, n)
);
-- No run gets an event twice.
CREATE UNIQUE INDEX edda_delivery_once ON edda_delivery (event, run_id) WHERE event IS NOT NULL;
CREATE INDEX edda_delivery_at ON edda_delivery (at);
