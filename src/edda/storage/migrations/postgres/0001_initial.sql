-- All times are microseconds since 1970 (UTC) on the database's clock.

-- ---------------------------------------------------------------------------------------------------- workers

CREATE TABLE edda_worker (
    id          text COLLATE "C" PRIMARY KEY,
    service     text   NOT NULL,
    host        text   NOT NULL,
    pid         bigint NOT NULL,
    started_at  bigint NOT NULL,
    expires_at  bigint NOT NULL  -- the end of its lease
);

-- One row per worker incarnation. Each batch updates it with a compare-and-set, a take-over deletes it.
-- The low fillfactor leaves room for these updates on the same page.
CREATE TABLE edda_fence (
    worker            text COLLATE "C" PRIMARY KEY,
    batch_no          bigint NOT NULL,
    ownership_version bigint NOT NULL,            -- raised when a run is taken away from a live worker
    token             bigint NOT NULL DEFAULT 0   -- random, written by each batch: tells apart two batches with one number
) WITH (fillfactor = 10);

-- How many claims of a worker are committed. Not a column of edda_fence, so that a claim and a batch of the same worker
-- do not wait for each other's row lock.
CREATE TABLE edda_claim (
    worker      text COLLATE "C" PRIMARY KEY,
    claims      bigint NOT NULL
) WITH (fillfactor = 10);

-- ------------------------------------------------------------------------------------------------------- runs

CREATE TABLE edda_run (
    id          text COLLATE "C" NOT NULL,
    generation  integer NOT NULL,
    workflow    text COLLATE "C" NOT NULL,
    input       bytea   NOT NULL,
    created_at  bigint  NOT NULL,
    deadline    bigint,
    parent      text COLLATE "C",
    parent_step text,
    depth       integer NOT NULL DEFAULT 0,
    PRIMARY KEY (id, generation)
);
CREATE INDEX edda_run_created ON edda_run (created_at DESC, id DESC);
CREATE INDEX edda_run_parent ON edda_run (parent) WHERE parent IS NOT NULL;
-- Finds the runs of a rarely started workflow among a million others.
CREATE INDEX edda_run_workflow ON edda_run (workflow, created_at DESC, id DESC);
-- For pruning: a generation is pruned by the age of the generation after it.
CREATE INDEX edda_run_followed ON edda_run (created_at, id) WHERE generation > 0;

CREATE TABLE edda_history (
    run_id      text COLLATE "C" NOT NULL,
    generation  integer NOT NULL,
    seq         integer NOT NULL,
    epoch       integer NOT NULL,
    kind        text    NOT NULL,
    step        text    NOT NULL,
    name        text    NOT NULL,
    ok          boolean NOT NULL,
    at          bigint  NOT NULL,
    attempt     integer NOT NULL,
    inbox_no    integer,  -- the inbox item that this entry records
    event       bigint,   -- the number of the event that this entry brings
    input       bytea   NOT NULL,
    value       bytea   NOT NULL,
    PRIMARY KEY (run_id, generation, seq)
);

CREATE TABLE edda_result (
    run_id      text COLLATE "C" PRIMARY KEY,
    generation  integer NOT NULL,
    status      text    NOT NULL CHECK (status IN ('completed', 'failed', 'cancelled', 'recurred')),
    value       bytea   NOT NULL,
    ended_at    bigint  NOT NULL
);
CREATE INDEX edda_result_ended ON edda_result (ended_at);
-- Completed runs are nearly all runs; they add nothing to this index.
CREATE INDEX edda_result_status ON edda_result (status, ended_at) INCLUDE (run_id, generation)
    WHERE status <> 'completed';

-- The only row of a run that is updated, therefore narrow. It is deleted when the run ends.
CREATE TABLE edda_open_run (
    run_id        text COLLATE "C" PRIMARY KEY,
    workflow      text COLLATE "C" NOT NULL,
    status        text    NOT NULL CHECK (status IN ('running', 'waiting_for_event', 'waiting_for_timer',
                                  'waiting_for_message', 'waiting_for_child', 'compensating', 'parked')),
    owner         text COLLATE "C",
    epoch         integer NOT NULL,              -- raised by each claim
    generation    integer NOT NULL,
    event_cursor  bigint NOT NULL,               -- the newest event when the run was started
    ready_at      bigint,
    inbox_count   integer NOT NULL DEFAULT 0,    -- the number of the last inbox item
    inbox_read    integer NOT NULL DEFAULT 0,    -- the number of the last item that the history has
    cancelled     boolean NOT NULL DEFAULT false,
    attempts      integer NOT NULL DEFAULT 0,    -- how often it was parked in a row
    watchers      integer NOT NULL DEFAULT 0,    -- rows of edda_watcher
    compensating  boolean NOT NULL DEFAULT false,
    reason        text,
    parked_at     bigint,                        -- when it was parked last
    end_if_parked boolean NOT NULL DEFAULT false,-- cancelled while parked: if it cannot be replayed, it ends as cancelled
    deaths        integer NOT NULL DEFAULT 0,    -- workers that died while they owned the run
    deaths_alone  integer NOT NULL DEFAULT 0,    -- those of them that owned no other run
    died_seq      integer,                       -- the last entry before the first of these deaths
    alone         boolean NOT NULL DEFAULT false,-- its owner claimed it as its only run
    suspect_at    bigint                         -- replaces ready_at for a suspect: ordinary claims do not see it
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX edda_open_run_ready   ON edda_open_run (workflow, ready_at) WHERE owner IS NULL;
CREATE INDEX edda_open_run_owner   ON edda_open_run (owner) WHERE owner IS NOT NULL;
CREATE INDEX edda_open_run_inbox   ON edda_open_run (owner) WHERE inbox_count > inbox_read AND owner IS NOT NULL;
CREATE INDEX edda_open_run_parked  ON edda_open_run (workflow) WHERE status = 'parked';
CREATE INDEX edda_open_run_suspect ON edda_open_run (suspect_at) WHERE suspect_at IS NOT NULL;

-- The inbox of a run: other processes insert here, only the owner of the run writes its history.
CREATE TABLE edda_inbox (
    run_id      text COLLATE "C" NOT NULL,
    inbox_no    integer NOT NULL,
    kind        text    NOT NULL,
    step        text    NOT NULL,
    at          bigint  NOT NULL,
    value       bytea   NOT NULL,
    event       bigint,
    PRIMARY KEY (run_id, inbox_no)
);
-- A run receives an event at most once.
CREATE UNIQUE INDEX edda_inbox_event ON edda_inbox (event, run_id) WHERE event IS NOT NULL;
CREATE INDEX edda_inbox_at ON edda_inbox (at);

-- Steps of other runs that receive the end of a run; its parent has no row here. Their number is kept in
-- edda_open_run.watchers, because the end of a run locks that row and compares the number.
CREATE TABLE edda_watcher (
    run_id      text COLLATE "C" NOT NULL,
    watcher     text COLLATE "C" NOT NULL,
    step        text COLLATE "C" NOT NULL,
    PRIMARY KEY (run_id, watcher, step)
);

-- A step that was committed in the user's transaction and whose entry is not in the history yet.
CREATE TABLE edda_step_commit (
    run_id      text COLLATE "C" NOT NULL,
    generation  integer NOT NULL,
    step        text COLLATE "C" NOT NULL,
    attempt     integer NOT NULL,
    value       bytea   NOT NULL,
    at          bigint  NOT NULL,
    PRIMARY KEY (run_id, generation, step)
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);

-- Values that a run published with ctx.set.
CREATE TABLE edda_run_value (
    run_id      text COLLATE "C" NOT NULL,
    name        text COLLATE "C" NOT NULL,
    value       bytea  NOT NULL,
    at          bigint NOT NULL,
    PRIMARY KEY (run_id, name)
);

-- ----------------------------------------------------------------------------------------------------- events

-- CACHE 1: numbers must be given out in the order in which sessions ask for them. The first number is used up here,
-- because last_value of a new sequence looks the same before and after its first nextval().
CREATE SEQUENCE edda_event_seq CACHE 1;
SELECT nextval('edda_event_seq');

CREATE TABLE edda_event (
    seq         bigint PRIMARY KEY,
    source      text COLLATE "C" NOT NULL,
    id          text COLLATE "C" NOT NULL,
    type        text COLLATE "C" NOT NULL,
    target      text COLLATE "C",
    received_at bigint NOT NULL,
    body        bytea  NOT NULL
);
CREATE UNIQUE INDEX edda_event_identity ON edda_event (source, id);
CREATE INDEX edda_event_log ON edda_event (type, seq);
CREATE INDEX edda_event_received ON edda_event (received_at, seq);

-- One row for each set of match paths of its type that an event has values for.
CREATE TABLE edda_event_key (
    key         bytea  NOT NULL,
    seq         bigint NOT NULL,
    PRIMARY KEY (key, seq)
);
CREATE INDEX edda_event_key_seq ON edda_event_key (seq);

CREATE TABLE edda_event_type (
    type        text COLLATE "C" PRIMARY KEY,
    version     integer NOT NULL  -- raised with each new row of edda_match_paths
);

-- The sets of paths that waits match on. Events with a number above filled_from have their keys.
CREATE TABLE edda_match_paths (
    type        text COLLATE "C" NOT NULL,
    paths       text COLLATE "C" NOT NULL,
    filled_from bigint NOT NULL,
    PRIMARY KEY (type, paths)
);

-- A row exists as long as its step waits; the transaction that deletes it decides how the wait ends.
CREATE TABLE edda_wait (
    run_id      text COLLATE "C" NOT NULL,
    step        text COLLATE "C" NOT NULL,
    key         bytea  NOT NULL,
    target_key  bytea  NOT NULL,  -- the key of events that are addressed to this run
    type        text COLLATE "C" NOT NULL,
    match       bytea  NOT NULL,
    due         bigint,
    exclusive   boolean NOT NULL DEFAULT false,
    PRIMARY KEY (run_id, step)
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX edda_wait_key ON edda_wait (key);

-- Events and messages that were committed with a step or a transaction and are not in edda_event yet.
-- CACHE 1 as above.
CREATE TABLE edda_staged_event (
    seq         bigint GENERATED ALWAYS AS IDENTITY (CACHE 1) PRIMARY KEY,
    kind        text   NOT NULL CHECK (kind IN ('event', 'message', 'redelivery')),
    body        bytea  NOT NULL,
    due         bigint NOT NULL DEFAULT 0
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);

-- Events that the relayer sends to other systems.
CREATE TABLE edda_outbox (
    seq         bigint GENERATED ALWAYS AS IDENTITY (CACHE 1) PRIMARY KEY,
    id          text COLLATE "C" NOT NULL,
    order_key   text COLLATE "C" NOT NULL,
    type        text    NOT NULL,
    source      text    NOT NULL,
    body        bytea   NOT NULL,
    run_id      text COLLATE "C",
    created_at  bigint  NOT NULL,
    due         bigint  NOT NULL,
    attempts    integer NOT NULL,
    state       text COLLATE "C" NOT NULL CHECK (state IN ('pending', 'sent', 'dead')),
    reason      text,
    ended_at    bigint
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX edda_outbox_due   ON edda_outbox (due, seq) WHERE state = 'pending';
CREATE INDEX edda_outbox_key   ON edda_outbox (order_key, seq) WHERE state = 'pending';
CREATE INDEX edda_outbox_ended ON edda_outbox (ended_at) WHERE state = 'sent';
CREATE INDEX edda_outbox_open  ON edda_outbox (state, seq) WHERE state <> 'sent';

-- ------------------------------------------------------------------------------------------ viewer, API and CLI

CREATE TABLE edda_audit (
    seq         bigint GENERATED ALWAYS AS IDENTITY (CACHE 1) PRIMARY KEY,
    at          bigint NOT NULL,
    who         text   NOT NULL,
    action      text   NOT NULL,
    subject     text   NOT NULL,
    origin      text   NOT NULL,
    details     text   NOT NULL
);

-- Workflows as the code defines them, and the schemas of the events that they wait for.
CREATE TABLE edda_definition (
    workflow    text COLLATE "C" PRIMARY KEY,
    service     text   NOT NULL,
    details     bytea  NOT NULL,
    seen_at     bigint NOT NULL
);
CREATE TABLE edda_event_schema (
    workflow    text COLLATE "C" NOT NULL,
    type        text COLLATE "C" NOT NULL,
    schema      bytea  NOT NULL,
    PRIMARY KEY (workflow, type)
);

-- ------------------------------------------------------------------------------------------------- row types

-- The rows of a batch, as the journal sends them. Never changed after a release: a release that needs other columns
-- adds other types.
CREATE TYPE edda_run_row AS (
    id text, generation integer, workflow text, input bytea, created_at bigint, deadline bigint, parent text,
    parent_step text, depth integer);
CREATE TYPE edda_open_run_row AS (
    run_id text, workflow text, generation integer, epoch integer, owner text, status text, reason text,
    ready_at bigint, inbox_read integer, attempts integer, compensating boolean);
CREATE TYPE edda_history_row AS (
    run_id text, generation integer, epoch integer, seq integer, kind text, step text, name text, ok boolean,
    at bigint, attempt integer, inbox_no integer, event bigint, input bytea, value bytea);
CREATE TYPE edda_transition_row AS (
    run_id text, transition text, inbox_read integer, ready_at bigint, status text, reason text,
    compensating boolean, watchers integer, expected_inbox_count integer);
CREATE TYPE edda_result_row AS (
    run_id text, generation integer, status text, value bytea, ended_at bigint);
CREATE TYPE edda_wait_row AS (
    run_id text, step text, key bytea, target_key bytea, type text, match bytea, due bigint, exclusive boolean);
-- A transition, repeated for each wait that comes with it; without waits one row whose step is null.
CREATE TYPE edda_wait_request_row AS (
    run_id text, transition text, inbox_read integer, ready_at bigint, status text, reason text,
    compensating boolean, watchers integer, expected_inbox_count integer, step text, key bytea, target_key bytea,
    type text, match bytea, due bigint, exclusive boolean, cursor bigint);
CREATE TYPE edda_cancelled_wait_row AS (run_id text, step text);
CREATE TYPE edda_released_item_row AS (run_id text, inbox_no integer);
-- `place` is the position of the signal in the batch, `run_id` the run whose inbox it goes to.
CREATE TYPE edda_signal_row AS (
    place integer, sender text, run_id text, kind text, step text, value bytea);
-- `generation` is the one that ends.
CREATE TYPE edda_recur_row AS (run_id text, generation integer, input bytea, created_at bigint);
CREATE TYPE edda_recorded_step_row AS (run_id text, generation integer, step text);
CREATE TYPE edda_staged_event_row AS (kind text, body bytea);
CREATE TYPE edda_outbox_row AS (
    id text, order_key text, type text, source text, body bytea, run_id text, created_at bigint);
CREATE TYPE edda_run_value_row AS (run_id text, name text, value bytea);

-- The rows of accepted events. `place` is the position of the event; keys and starts refer to it.
CREATE TYPE edda_event_row AS (place integer, source text, id text, type text, target text, body bytea);
CREATE TYPE edda_key_row AS (place integer, wait_key bytea, stored_key bytea);
CREATE TYPE edda_start_row AS (
    place integer, id text, workflow text, input bytea, created_at bigint, ready_at bigint, deadline bigint,
    parent text, parent_step text, depth integer);

-- What a claim returns with a run: its history, its unread inbox items, its step commits.
CREATE TYPE edda_entry_row AS (
    seq integer, kind text, step text, name text, ok boolean, at bigint, input bytea, value bytea, attempt integer,
    inbox_no integer, event bigint);
CREATE TYPE edda_inbox_row AS (
    run_id text, inbox_no integer, kind text, at bigint, step text, value bytea, event bigint);
CREATE TYPE edda_step_commit_row AS (step text, attempt integer, value bytea, at bigint);
