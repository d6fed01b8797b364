-- The log of events, and who waits for which. One process writes at a time, so nothing else needs a lock here.

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
CREATE UNIQUE INDEX edda_event_once ON edda_event (source, id);
CREATE INDEX edda_event_by_type ON edda_event (type, seq);
CREATE INDEX edda_event_received ON edda_event (received_at, seq);

-- One row for each shape of its type that an event fits.
CREATE TABLE edda_event_key (
    key         BLOB    NOT NULL,
    seq         INTEGER NOT NULL,
    PRIMARY KEY (key, seq)
) WITHOUT ROWID;
CREATE INDEX edda_event_key_seq ON edda_event_key (seq);

CREATE TABLE edda_event_type (
    type        TEXT    PRIMARY KEY NOT NULL CHECK (instr(type, char(0)) = 0),
    version     INTEGER NOT NULL
) WITHOUT ROWID;

-- The sets of paths that waits match on. Events after `filled_from` have their keys.
CREATE TABLE edda_shape (
    type        TEXT    NOT NULL CHECK (instr(type, char(0)) = 0),
    shape       TEXT    NOT NULL CHECK (instr(shape, char(0)) = 0),
    filled_from INTEGER NOT NULL,
    PRIMARY KEY (type, shape)
) WITHOUT ROWID;

-- A row is there as long as its step waits: whoever deletes it decides how the waiting ends.
CREATE TABLE edda_wait (
    run_id      TEXT    NOT NULL,
    step        TEXT    NOT NULL CHECK (instr(step, char(0)) = 0),
    key         BLOB    NOT NULL,
    own_key     BLOB    NOT NULL,
    type        TEXT    NOT NULL CHECK (instr(type, char(0)) = 0),
    match       BLOB    NOT NULL,
    due         INTEGER,
    once        INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (run_id, step)
) WITHOUT ROWID;
CREATE INDEX edda_wait_key ON edda_wait (key);
