-- Runs, their history, and who may write it. Times are microseconds since 1970 (UTC) on the database's clock.
-- Ids are VARBINARY: they compare byte by byte, without case folding and without ignoring blanks at the end.
-- IF NOT EXISTS: every CREATE commits by itself here, so a migration that was cut off is simply run again.

CREATE TABLE IF NOT EXISTS edda_worker (
    id          VARBINARY(255) NOT NULL PRIMARY KEY,
    service     VARCHAR(255) NOT NULL,
    host        VARCHAR(255) NOT NULL,
    pid         BIGINT NOT NULL,
    started_at  BIGINT NOT NULL,
    expires_at  BIGINT NOT NULL
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- One row per worker incarnation; every batch bumps it.
CREATE TABLE IF NOT EXISTS edda_fence (
    worker      VARBINARY(255) NOT NULL PRIMARY KEY,
    batch_no    BIGINT NOT NULL,
    moves       BIGINT NOT NULL
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS edda_run (
    id          VARBINARY(255) NOT NULL,
    gen         INT NOT NULL,
    workflow    VARBINARY(255) NOT NULL,
    input       LONGBLOB NOT NULL,
    created_at  BIGINT NOT NULL,
    deadline    BIGINT,
    parent      VARBINARY(255),
    parent_step TEXT,
    depth       INT NOT NULL DEFAULT 0,
    PRIMARY KEY (id, gen),
    KEY edda_run_created (created_at, id),
    KEY edda_run_parent (parent)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS edda_hist (
    run_id      VARBINARY(255) NOT NULL,
    gen         INT NOT NULL,
    seq         INT NOT NULL,
    epoch       INT NOT NULL,
    kind        VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    step        TEXT NOT NULL,
    name        VARCHAR(255) NOT NULL,
    ok          BOOLEAN NOT NULL,
    at          BIGINT NOT NULL,
    attempt     INT NOT NULL,
    n           INT,
    event       BIGINT,
    input       LONGBLOB NOT NULL,
    value       LONGBLOB NOT NULL,
    PRIMARY KEY (run_id, gen, seq)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS edda_result (
    run_id      VARBINARY(255) NOT NULL PRIMARY KEY,
    gen         INT NOT NULL,
    status      VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    value       LONGBLOB NOT NULL,
    ended_at    BIGINT NOT NULL,
    KEY edda_result_ended (ended_at),
    CONSTRAINT edda_result_status CHECK (status IN ('completed', 'failed', 'cancelled', 'recurred'))
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- The only row of a run that is ever updated, so it is narrow; it is deleted when the run ends.
-- There are no partial indexes here. `ready_at` is NULL while a run has an owner, which serves the ready index;
-- `inbox` and `parked` are NULL except for the rows their indexes are for.
CREATE TABLE IF NOT EXISTS edda_sched (
    run_id      VARBINARY(255) NOT NULL PRIMARY KEY,
    workflow    VARBINARY(255) NOT NULL,
    status      VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    owner       VARBINARY(255),
    epoch       INT NOT NULL,
    gen         INT NOT NULL,
    start_seq   BIGINT NOT NULL,
    ready_at    BIGINT,
    delivered   INT NOT NULL DEFAULT 0,
    absorbed    INT NOT NULL DEFAULT 0,
    cancelled   BOOLEAN NOT NULL DEFAULT FALSE,
    attempts    INT NOT NULL DEFAULT 0,
    watchers    INT NOT NULL DEFAULT 0,
    undoing     BOOLEAN NOT NULL DEFAULT FALSE,
    reason      MEDIUMTEXT,
    inbox       VARBINARY(255) GENERATED ALWAYS AS (CASE WHEN delivered > absorbed THEN owner END) STORED,
    parked      VARBINARY(255) GENERATED ALWAYS AS (CASE WHEN status = 'parked' THEN workflow END) STORED,
    KEY edda_sched_ready (workflow, ready_at),
    KEY edda_sched_owner (owner),
    KEY edda_sched_inbox (inbox),
    KEY edda_sched_parked (parked),
    CONSTRAINT edda_sched_owned CHECK (owner IS NULL OR ready_at IS NULL),
    CONSTRAINT edda_sched_status CHECK (status IN ('running', 'waiting_for_event', 'waiting_for_timer',
                                        'waiting_for_message', 'waiting_for_child', 'compensating', 'parked'))
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- The inbox of a run: outsiders write here, only the owner writes history. No run gets an event twice.
CREATE TABLE IF NOT EXISTS edda_delivery (
    run_id      VARBINARY(255) NOT NULL,
    n           INT NOT NULL,
    kind        VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    step        TEXT NOT NULL,
    at          BIGINT NOT NULL,
    value       LONGBLOB NOT NULL,
    event       BIGINT,
    PRIMARY KEY (run_id, n),
    UNIQUE KEY edda_delivery_once (event, run_id),
    KEY edda_delivery_at (at)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
