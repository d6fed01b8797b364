-- The log of events, and who waits for which.

-- No cache: numbers must be given out in the order they are asked for. The first one is spent here, because a fresh
-- sequence cannot be told from one that gave out its first number.
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
CREATE UNIQUE INDEX edda_event_once ON edda_event (source, id);
CREATE INDEX edda_event_log ON edda_event (type, seq);
CREATE INDEX edda_event_received ON edda_event (received_at, seq);

-- One row for each shape of its type that an event fits.
CREATE TABLE edda_event_key (
    key         bytea  NOT NULL,
    seq         bigint NOT NULL,
    PRIMARY KEY (key, seq)
);
CREATE INDEX edda_event_key_seq ON edda_event_key (seq);

CREATE TABLE edda_event_type (
    type        text COLLATE "C" PRIMARY KEY,
    version     integer NOT NULL
);

-- The sets of paths that waits match on. Events after `filled_from` have their keys.
CREATE TABLE edda_shape (
    type        text COLLATE "C" NOT NULL,
    shape       text COLLATE "C" NOT NULL,
    filled_from bigint NOT NULL,
    PRIMARY KEY (type, shape)
);

-- A row is there as long as its step waits: whoever deletes it decides how the waiting ends.
CREATE TABLE edda_wait (
    run_id      text COLLATE "C" NOT NULL,
    step        text COLLATE "C" NOT NULL,
    key         bytea  NOT NULL,
    own_key     bytea  NOT NULL,
    type        text COLLATE "C" NOT NULL,
    match       bytea  NOT NULL,
    due         bigint,
    once        boolean NOT NULL DEFAULT false,
    PRIMARY KEY (run_id, step)
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX edda_wait_key ON edda_wait (key);

-- The rows of a batch and of a post. As those of 0001: never changed.
CREATE TYPE edda_wait_row AS (
    run_id text, step text, key bytea, own_key bytea, type text, match bytea, due bigint, once boolean);
-- A move, once for each of its waits, or once without.
CREATE TYPE edda_ask_row AS (
    run_id text, move text, absorbed integer, ready_at bigint, status text, reason text, undoing boolean,
    watchers integer, settled integer, step text, key bytea, own_key bytea, type text, match bytea, due bigint,
    once boolean, floor bigint);
CREATE TYPE edda_drop_row AS (run_id text, step text);
CREATE TYPE edda_free_row AS (run_id text, n integer);
-- `place` says which event of the post it is, and to which one a key or a start belongs.
CREATE TYPE edda_event_row AS (place integer, source text, id text, type text, target text, body bytea);
CREATE TYPE edda_key_row AS (place integer, plain bytea, kept bytea);
CREATE TYPE edda_start_row AS (
    place integer, id text, workflow text, input bytea, created_at bigint, ready_at bigint, deadline bigint,
    parent text, parent_step text, depth integer);
-- What a claimed run has: its history, and the letters it has not read.
CREATE TYPE edda_entry_row AS (
    seq integer, kind text, step text, name text, ok boolean, at bigint, input bytea, value bytea, attempt integer,
    n integer, event bigint);
CREATE TYPE edda_letter_row AS (
    run_id text, n integer, kind text, at bigint, step text, value bytea, event bigint);
