-- Runs, their history, and who may write it. Times are microseconds since 1970 (UTC) on the database's clock.

CREATE TABLE edda_worker (
    id          text COLLATE "C" PRIMARY KEY,
    service     text   NOT NULL,
    host        text   NOT NULL,
    pid         bigint NOT NULL,
    started_at  bigint NOT NULL,
    expires_at  bigint NOT NULL
);

-- One row per worker incarnation; every batch bumps it. Room on the page keeps those updates in place.
CREATE TABLE edda_fence (
    worker      text COLLATE "C" PRIMARY KEY,
    batch_no    bigint NOT NULL,
    moves       bigint NOT NULL
) WITH (fillfactor = 10);

CREATE TABLE edda_run (
    id          text COLLATE "C" NOT NULL,
    gen         integer NOT NULL,
    workflow    text COLLATE "C" NOT NULL,
    input       bytea   NOT NULL,
    created_at  bigint  NOT NULL,
    deadline    bigint,
    parent      text COLLATE "C",
    parent_step text,
    depth       integer NOT NULL DEFAULT 0,
    PRIMARY KEY (id, gen)
);
CREATE INDEX edda_run_created ON edda_run (created_at DESC, id DESC);
CREATE INDEX edda_run_parent ON edda_run (parent) WHERE parent IS NOT NULL;
-- Generations that followed another one: what they followed is pruned by their age.
CREATE INDEX edda_run_followed ON edda_run (created_at, id) WHERE gen > 0;

CREATE TABLE edda_hist (
    run_id      text COLLATE "C" NOT NULL,
    gen         integer NOT NULL,
    seq         integer NOT NULL,
    epoch       integer NOT NULL,
    kind        text    NOT NULL,
    step        text    NOT NULL,
    name        text    NOT NULL,
    ok          boolean NOT NULL,
    at          bigint  NOT NULL,
    attempt     integer NOT NULL,
    n           integer,
    event       bigint,
    input       bytea   NOT NULL,
    value       bytea   NOT NULL,
    PRIMARY KEY (run_id, gen, seq)
);

CREATE TABLE edda_result (
    run_id      text COLLATE "C" PRIMARY KEY,
    gen         integer NOT NULL,
    status      text    NOT NULL CHECK (status IN ('completed', 'failed', 'cancelled', 'recurred')),
    value       bytea   NOT NULL,
    ended_at    bigint  NOT NULL
);
CREATE INDEX edda_result_ended ON edda_result (ended_at);

-- The only row of a run that is ever updated, so it is narrow; it is deleted when the run ends.
CREATE TABLE edda_sched (
    run_id      text COLLATE "C" PRIMARY KEY,
    workflow    text COLLATE "C" NOT NULL,
    status      text    NOT NULL CHECK (status IN ('running', 'waiting_for_event', 'waiting_for_timer',
                                'waiting_for_message', 'waiting_for_child', 'compensating', 'parked')),
    owner       text COLLATE "C",
    epoch       integer NOT NULL,
    gen         integer NOT NULL,
    start_seq   bigint NOT NULL,
    ready_at    bigint,
    delivered   integer NOT NULL DEFAULT 0,
    absorbed    integer NOT NULL DEFAULT 0,
    cancelled   boolean NOT NULL DEFAULT false,
    attempts    integer NOT NULL DEFAULT 0,
    watchers    integer NOT NULL DEFAULT 0,
    undoing     boolean NOT NULL DEFAULT false,
    reason      text
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX edda_sched_ready  ON edda_sched (workflow, ready_at) WHERE owner IS NULL;
CREATE INDEX edda_sched_owner  ON edda_sched (owner) WHERE owner IS NOT NULL;
CREATE INDEX edda_sched_mail   ON edda_sched (owner) WHERE delivered > absorbed AND owner IS NOT NULL;
CREATE INDEX edda_sched_parked ON edda_sched (workflow) WHERE status = 'parked';

-- The inbox of a run: outsiders write here, only the owner writes history.
CREATE TABLE edda_delivery (
    run_id      text COLLATE "C" NOT NULL,
    n           integer NOT NULL,
    kind        text    NOT NULL,
    step        text    NOT NULL,
    at          bigint  NOT NULL,
    value       bytea   NOT NULL,
    event       bigint,
    PRIMARY KEY (run_id, n)
);
-- No run gets an event twice.
CREATE UNIQUE INDEX edda_delivery_once ON edda_delivery (event, run_id) WHERE event IS NOT NULL;
CREATE INDEX edda_delivery_at ON edda_delivery (at);

-- The rows of a batch, as the journal sends them. Never changed: a release that needs other columns adds other types.
CREATE TYPE edda_run_row AS (
    id text, gen integer, workflow text, input bytea, created_at bigint, deadline bigint, parent text,
    parent_step text, depth integer);
CREATE TYPE edda_sched_row AS (
    run_id text, workflow text, gen integer, epoch integer, owner text, status text, reason text, ready_at bigint,
    absorbed integer, attempts integer, undoing boolean);
CREATE TYPE edda_hist_row AS (
    run_id text, gen integer, epoch integer, seq integer, kind text, step text, name text, ok boolean, at bigint,
    attempt integer, n integer, event bigint, input bytea, value bytea);
CREATE TYPE edda_move_row AS (
    run_id text, move text, absorbed integer, ready_at bigint, status text, reason text, undoing boolean,
    watchers integer, settled integer);
CREATE TYPE edda_result_row AS (
    run_id text, gen integer, status text, value bytea, ended_at bigint);
