-- What runs say: to the log of events, to others, and of themselves; and what their steps did in users' transactions.

-- A step whose effect is in the same commit, and whose entry is not in the history yet.
CREATE TABLE edda_done (
    run_id      text COLLATE "C" NOT NULL,
    gen         integer NOT NULL,
    step        text COLLATE "C" NOT NULL,
    attempt     integer NOT NULL,
    value       bytea   NOT NULL,
    at          bigint  NOT NULL,
    PRIMARY KEY (run_id, gen, step)
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);

-- On its way into the log of events. No cache: numbers must be given out in the order they are asked for.
CREATE TABLE edda_dispatch (
    seq         bigint GENERATED ALWAYS AS IDENTITY (CACHE 1) PRIMARY KEY,
    kind        text   NOT NULL CHECK (kind IN ('event', 'message', 'offer')),
    body        bytea  NOT NULL,
    due         bigint NOT NULL DEFAULT 0
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);

-- Events for others.
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

-- What a run says of itself.
CREATE TABLE edda_fact (
    run_id      text COLLATE "C" NOT NULL,
    name        text COLLATE "C" NOT NULL,
    value       bytea  NOT NULL,
    at          bigint NOT NULL,
    PRIMARY KEY (run_id, name)
);

-- The rows of a batch. As those of 0001: never changed.
CREATE TYPE edda_recorded_row AS (run_id text, gen integer, step text);
CREATE TYPE edda_dispatch_row AS (kind text, body bytea);
CREATE TYPE edda_outgoing_row AS (
    id text, order_key text, type text, source text, body bytea, run_id text, created_at bigint);
CREATE TYPE edda_fact_row AS (run_id text, name text, value bytea);
-- What a claimed run has besides.
CREATE TYPE edda_done_row AS (step text, attempt integer, value bytea, at bigint);
