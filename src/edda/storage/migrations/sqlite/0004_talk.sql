-- What runs say: to the log of events, to the outside world, and of themselves.

-- A step whose effect is in the same commit, and whose entry is not in the history yet.
CREATE TABLE edda_done (
    run_id      TEXT    NOT NULL,
    gen         INTEGER NOT NULL,
    step        TEXT    NOT NULL CHECK (instr(step, char(0)) = 0),
    attempt     INTEGER NOT NULL,
    value       BLOB    NOT NULL,
    at          INTEGER NOT NULL,
    PRIMARY KEY (run_id, gen, step)
);

-- AUTOINCREMENT: who forwards a dispatch deletes it by its number, which must not be another's by then.
CREATE TABLE edda_dispatch (
    seq         INTEGER PRIMARY KEY AUTOINCREMENT,
    kind        TEXT    NOT NULL CHECK (kind IN ('event', 'message', 'offer')),
    body        BLOB    NOT NULL,
    due         INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX edda_dispatch_due ON edda_dispatch (due);

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
-- The same three columns in three orders: whoever looks for what is due, and for what holds it up, reads no row.
CREATE INDEX edda_outbox_pending ON edda_outbox (seq, due, order_key) WHERE state = 'pending';
CREATE INDEX edda_outbox_due     ON edda_outbox (due, seq, order_key) WHERE state = 'pending';
CREATE INDEX edda_outbox_key     ON edda_outbox (order_key, due, seq) WHERE state = 'pending';
CREATE INDEX edda_outbox_dead    ON edda_outbox (seq) WHERE state = 'dead';
CREATE INDEX edda_outbox_sent    ON edda_outbox (ended_at) WHERE state = 'sent';

CREATE TABLE edda_fact (
    run_id      TEXT    NOT NULL,
    name        TEXT    NOT NULL CHECK (instr(name, char(0)) = 0),
    value       BLOB    NOT NULL,
    at          INTEGER NOT NULL,
    PRIMARY KEY (run_id, name)
);
