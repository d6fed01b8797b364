-- What people look at and do.

-- Pages of one workflow, newest first: without it one that is seldom used is looked for among all runs.
CREATE INDEX edda_run_workflow ON edda_run (workflow, created_at DESC, id DESC);

-- Most runs complete, and cost nothing here. The others are what people look for.
CREATE INDEX edda_result_unusual ON edda_result (status, run_id, gen) WHERE status <> 'completed';

-- The same as before and with the status, so that ends are counted without reading the results.
DROP INDEX edda_result_ended;
CREATE INDEX edda_result_ended ON edda_result (ended_at, status);

CREATE TABLE edda_audit (
    seq         INTEGER PRIMARY KEY AUTOINCREMENT,
    at          INTEGER NOT NULL,
    who         TEXT    NOT NULL CHECK (instr(who, char(0)) = 0),
    action      TEXT    NOT NULL CHECK (instr(action, char(0)) = 0),
    subject     TEXT    NOT NULL CHECK (instr(subject, char(0)) = 0),
    origin      TEXT    NOT NULL CHECK (instr(origin, char(0)) = 0),
    details     TEXT    NOT NULL CHECK (instr(details, char(0)) = 0)
);

-- What the code says of its workflows, for processes that have not got the code.
CREATE TABLE edda_definition (
    workflow    TEXT    PRIMARY KEY NOT NULL CHECK (instr(workflow, char(0)) = 0),
    service     TEXT    NOT NULL CHECK (instr(service, char(0)) = 0),
    details     BLOB    NOT NULL,
    seen_at     INTEGER NOT NULL
);

CREATE TABLE edda_form (
    workflow    TEXT    NOT NULL CHECK (instr(workflow, char(0)) = 0),
    type        TEXT    NOT NULL CHECK (instr(type, char(0)) = 0),
    schema      BLOB    NOT NULL,
    PRIMARY KEY (workflow, type)
);
