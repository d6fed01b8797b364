-- All times are microseconds since 1970 (UTC) on the database's clock.
-- Ids are VARBINARY: they compare byte by byte, without case folding and without ignoring trailing spaces.
-- IF NOT EXISTS: each CREATE commits by itself here, so a migration that was interrupted is run again from its start.

-- ---------------------------------------------------------------------------------------------------- workers

CREATE TABLE IF NOT EXISTS edda_worker (
    id          VARBINARY(255) NOT NULL PRIMARY KEY,
    service     VARCHAR(255) NOT NULL,
    host        VARCHAR(255) NOT NULL,
    pid         BIGINT NOT NULL,
    started_at  BIGINT NOT NULL,
    expires_at  BIGINT NOT NULL  -- the end of its lease
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- One row per worker incarnation. Each batch updates it with a compare-and-set, a take-over deletes it.
-- Galera compares the rows that two transactions write and does not know which rows they locked. Where a lock excludes
-- another transaction, a number in the locked row is raised: `claims` here, `records` of edda_open_run, `version` of
-- edda_lock_bucket. Without a cluster these three columns are not written.
CREATE TABLE IF NOT EXISTS edda_fence (
    worker            VARBINARY(255) NOT NULL PRIMARY KEY,
    batch_no          BIGINT NOT NULL,
    ownership_version BIGINT NOT NULL,            -- raised when a run is taken away from a live worker
    token             BIGINT NOT NULL DEFAULT 0,  -- random, written by each batch: tells apart two batches with one number
    claims            BIGINT NOT NULL DEFAULT 0
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- How many claims of a worker are committed. Not a column of edda_fence, so that a claim and a batch of the same worker
-- do not wait for each other's row lock.
CREATE TABLE IF NOT EXISTS edda_claim (
    worker      VARBINARY(255) NOT NULL PRIMARY KEY,
    claims      BIGINT NOT NULL
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- ------------------------------------------------------------------------------------------------------- runs

CREATE TABLE IF NOT EXISTS edda_run (
    id          VARBINARY(255) NOT NULL,
    generation  INT NOT NULL,
    workflow    VARBINARY(255) NOT NULL,
    input       LONGBLOB NOT NULL,
    created_at  BIGINT NOT NULL,
    deadline    BIGINT,
    parent      VARBINARY(255),
    parent_step TEXT,
    depth       INT NOT NULL DEFAULT 0,
    PRIMARY KEY (id, generation),
    KEY edda_run_created (created_at, id),
    KEY edda_run_parent (parent),
    KEY edda_run_workflow (workflow, created_at, id)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS edda_history (
    run_id      VARBINARY(255) NOT NULL,
    generation  INT NOT NULL,
    seq         INT NOT NULL,
    epoch       INT NOT NULL,
    kind        VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    step        TEXT NOT NULL,
    name        VARCHAR(255) NOT NULL,
    ok          BOOLEAN NOT NULL,
    at          BIGINT NOT NULL,
    attempt     INT NOT NULL,
    inbox_no    INT,     -- the inbox item that this entry records
    event       BIGINT,  -- the number of the event that this entry brings
    input       LONGBLOB NOT NULL,
    value       LONGBLOB NOT NULL,
    PRIMARY KEY (run_id, generation, seq)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS edda_result (
    run_id      VARBINARY(255) NOT NULL PRIMARY KEY,
    generation  INT NOT NULL,
    status      VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    value       LONGBLOB NOT NULL,
    ended_at    BIGINT NOT NULL,
    KEY edda_result_ended (ended_at),
    KEY edda_result_status (status, ended_at),
    CONSTRAINT edda_result_status CHECK (status IN ('completed', 'failed', 'cancelled', 'recurred'))
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- The only row of a run that is updated, therefore narrow. It is deleted when the run ends.
-- There are no partial indexes here. `ready_at` is NULL while a run has an owner, which serves the ready index;
-- `inbox` and `parked` are NULL except for the rows their indexes are for.
CREATE TABLE IF NOT EXISTS edda_open_run (
    run_id        VARBINARY(255) NOT NULL PRIMARY KEY,
    workflow      VARBINARY(255) NOT NULL,
    status        VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    owner         VARBINARY(255),
    epoch         INT NOT NULL,                    -- raised by each claim
    generation    INT NOT NULL,
    event_cursor  BIGINT NOT NULL,                 -- the newest event when the run was started
    ready_at      BIGINT,
    inbox_count   INT NOT NULL DEFAULT 0,          -- the number of the last inbox item
    inbox_read    INT NOT NULL DEFAULT 0,          -- the number of the last item that the history has
    cancelled     BOOLEAN NOT NULL DEFAULT FALSE,
    attempts      INT NOT NULL DEFAULT 0,          -- how often it was parked in a row
    watchers      INT NOT NULL DEFAULT 0,          -- rows of edda_watcher
    compensating  BOOLEAN NOT NULL DEFAULT FALSE,
    reason        MEDIUMTEXT,
    inbox         VARBINARY(255) GENERATED ALWAYS AS (CASE WHEN inbox_count > inbox_read THEN owner END) STORED,
    parked        VARBINARY(255) GENERATED ALWAYS AS (CASE WHEN status = 'parked' THEN workflow END) STORED,
    parked_at     BIGINT,                          -- when it was parked last
    end_if_parked BOOLEAN NOT NULL DEFAULT FALSE,  -- cancelled while parked: if it cannot be replayed, it ends as cancelled
    deaths        INT NOT NULL DEFAULT 0,          -- workers that died while they owned the run
    deaths_alone  INT NOT NULL DEFAULT 0,          -- those of them that owned no other run
    died_seq      INT,                             -- the last entry before the first of these deaths
    alone         BOOLEAN NOT NULL DEFAULT FALSE,  -- its owner claimed it as its only run
    suspect_at    BIGINT,                          -- replaces ready_at for a suspect: ordinary claims do not see it
    records       BIGINT NOT NULL DEFAULT 0,       -- raised by step commits in a cluster
    KEY edda_open_run_ready (workflow, ready_at),
    KEY edda_open_run_owner (owner),
    KEY edda_open_run_inbox (inbox),
    KEY edda_open_run_parked (parked),
    KEY edda_open_run_suspect (suspect_at),
    CONSTRAINT edda_open_run_owned CHECK (owner IS NULL OR ready_at IS NULL),
    CONSTRAINT edda_open_run_status CHECK (status IN ('running', 'waiting_for_event', 'waiting_for_timer',
                                           'waiting_for_message', 'waiting_for_child', 'compensating', 'parked'))
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- The inbox of a run: other processes insert here, only the owner of the run writes its history.
-- A run receives an event at most once (edda_inbox_event).
CREATE TABLE IF NOT EXISTS edda_inbox (
    run_id      VARBINARY(255) NOT NULL,
    inbox_no    INT NOT NULL,
    kind        VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    step        TEXT NOT NULL,
    at          BIGINT NOT NULL,
    value       LONGBLOB NOT NULL,
    event       BIGINT,
    PRIMARY KEY (run_id, inbox_no),
    UNIQUE KEY edda_inbox_event (event, run_id),
    KEY edda_inbox_at (at)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Steps of other runs that receive the end of a run; its parent has no row here. Their number is kept in
-- edda_open_run.watchers, because the end of a run locks that row and compares the number.
CREATE TABLE IF NOT EXISTS edda_watcher (
    run_id      VARBINARY(255) NOT NULL,
    watcher     VARBINARY(255) NOT NULL,
    step        VARBINARY(2000) NOT NULL,
    PRIMARY KEY (run_id, watcher, step)
) ENGINE = InnoDB;

-- For pruning: generations that were followed by another one, and since when. Not an index of edda_run, which would
-- hold every run.
CREATE TABLE IF NOT EXISTS edda_old_generation (
    run_id      VARBINARY(255) NOT NULL,
    generation  INT NOT NULL,
    ended_at    BIGINT NOT NULL,
    PRIMARY KEY (run_id, generation),
    KEY edda_old_generation_ended (ended_at)
) ENGINE = InnoDB;

-- A step that was committed in the user's transaction and whose entry is not in the history yet.
CREATE TABLE IF NOT EXISTS edda_step_commit (
    run_id      VARBINARY(255) NOT NULL,
    generation  INT NOT NULL,
    step        VARBINARY(2000) NOT NULL,
    attempt     INT NOT NULL,
    value       LONGBLOB NOT NULL,
    at          BIGINT NOT NULL,
    PRIMARY KEY (run_id, generation, step)
) ENGINE = InnoDB;

-- Values that a run published with ctx.set.
CREATE TABLE IF NOT EXISTS edda_run_value (
    run_id      VARBINARY(255) NOT NULL,
    name        VARBINARY(1020) NOT NULL,
    value       LONGBLOB NOT NULL,
    at          BIGINT NOT NULL,
    PRIMARY KEY (run_id, name)
) ENGINE = InnoDB;

-- ----------------------------------------------------------------------------------------------------- events

-- Rows that transactions lock before they read: 0 to 255 for event types, 256 to 511 for event keys, 512 to 767 for the
-- ids of events (so that two transactions with the same event do not deadlock in its index), 768 for the outbox, 769 for
-- pruning events and backfilling their keys.
CREATE TABLE IF NOT EXISTS edda_lock_bucket (
    b           INT NOT NULL PRIMARY KEY,
    version     BIGINT NOT NULL DEFAULT 0
) ENGINE = InnoDB;
INSERT IGNORE INTO edda_lock_bucket (b)
SELECT h.d * 64 + m.d * 8 + l.d
  FROM (SELECT 0 d UNION SELECT 1 UNION SELECT 2 UNION SELECT 3 UNION SELECT 4 UNION SELECT 5 UNION SELECT 6 UNION SELECT 7
        UNION SELECT 8 UNION SELECT 9 UNION SELECT 10 UNION SELECT 11) h,
       (SELECT 0 d UNION SELECT 1 UNION SELECT 2 UNION SELECT 3 UNION SELECT 4 UNION SELECT 5 UNION SELECT 6 UNION SELECT 7) m,
       (SELECT 0 d UNION SELECT 1 UNION SELECT 2 UNION SELECT 3 UNION SELECT 4 UNION SELECT 5 UNION SELECT 6 UNION SELECT 7) l;
INSERT IGNORE INTO edda_lock_bucket (b) VALUES (768), (769);

CREATE TABLE IF NOT EXISTS edda_event (
    seq         BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    source      VARBINARY(1024) NOT NULL,
    id          VARBINARY(1024) NOT NULL,
    type        VARBINARY(1020) NOT NULL,
    target      VARBINARY(255),
    received_at BIGINT NOT NULL,
    body        LONGBLOB NOT NULL,
    UNIQUE KEY edda_event_identity (source, id),
    KEY edda_event_type (type, seq),
    KEY edda_event_received (received_at, seq)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- One row for each set of match paths of its type that an event has values for.
CREATE TABLE IF NOT EXISTS edda_event_key (
    `key`       BINARY(16) NOT NULL,
    seq         BIGINT NOT NULL,
    PRIMARY KEY (`key`, seq),
    KEY edda_event_key_seq (seq)
) ENGINE = InnoDB;

CREATE TABLE IF NOT EXISTS edda_event_type (
    type        VARBINARY(1020) NOT NULL PRIMARY KEY,
    version     INT NOT NULL  -- raised with each new row of edda_match_paths
) ENGINE = InnoDB;

-- The sets of paths that waits match on. Events with a number above filled_from have their keys.
CREATE TABLE IF NOT EXISTS edda_match_paths (
    type        VARBINARY(1020) NOT NULL,
    paths       VARBINARY(2000) NOT NULL,
    filled_from BIGINT NOT NULL,
    PRIMARY KEY (type, paths)
) ENGINE = InnoDB;

-- A row exists as long as its step waits; the transaction that deletes it decides how the wait ends.
CREATE TABLE IF NOT EXISTS edda_wait (
    run_id      VARBINARY(255) NOT NULL,
    step        VARBINARY(2000) NOT NULL,
    `key`       BINARY(16) NOT NULL,
    target_key  BINARY(16) NOT NULL,  -- the key of events that are addressed to this run
    type        VARBINARY(1020) NOT NULL,
    `match`     LONGBLOB NOT NULL,
    due         BIGINT,
    exclusive   BOOLEAN NOT NULL DEFAULT FALSE,
    PRIMARY KEY (run_id, step),
    KEY edda_wait_key (`key`)
) ENGINE = InnoDB;

-- Events and messages that were committed with a step or a transaction and are not in edda_event yet.
CREATE TABLE IF NOT EXISTS edda_staged_event (
    seq         BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    kind        VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    body        LONGBLOB NOT NULL,
    due         BIGINT NOT NULL DEFAULT 0,
    CONSTRAINT edda_staged_event_kind CHECK (kind IN ('event', 'message', 'redelivery'))
) ENGINE = InnoDB;

-- Events that the relayer sends to other systems. Each index ends with the number: what is due at one time, or of one
-- key, or in one state, is read in the order of its number.
CREATE TABLE IF NOT EXISTS edda_outbox (
    seq         BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    id          VARBINARY(1024) NOT NULL,
    order_key   VARBINARY(1024) NOT NULL,
    type        VARBINARY(1020) NOT NULL,
    source      VARBINARY(1024) NOT NULL,
    body        LONGBLOB NOT NULL,
    run_id      VARBINARY(255),
    created_at  BIGINT NOT NULL,
    due         BIGINT NOT NULL,
    attempts    INT NOT NULL,
    state       VARCHAR(16) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    reason      MEDIUMTEXT,
    ended_at    BIGINT,
    KEY edda_outbox_due (state, due, seq, order_key),
    KEY edda_outbox_key (order_key, state, seq),
    KEY edda_outbox_state (state, seq),
    KEY edda_outbox_ended (state, ended_at),
    CONSTRAINT edda_outbox_state CHECK (state IN ('pending', 'sent', 'dead'))
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- ------------------------------------------------------------------------------------------ viewer, API and CLI

CREATE TABLE IF NOT EXISTS edda_audit (
    seq         BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    at          BIGINT NOT NULL,
    who         TEXT NOT NULL,
    action      TEXT NOT NULL,
    subject     TEXT NOT NULL,
    origin      TEXT NOT NULL,
    details     MEDIUMTEXT NOT NULL
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Workflows as the code defines them, and the schemas of the events that they wait for.
CREATE TABLE IF NOT EXISTS edda_definition (
    workflow    VARBINARY(255) NOT NULL PRIMARY KEY,
    service     VARCHAR(255) NOT NULL,
    details     LONGBLOB NOT NULL,
    seen_at     BIGINT NOT NULL
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
CREATE TABLE IF NOT EXISTS edda_event_schema (
    workflow    VARBINARY(255) NOT NULL,
    type        VARBINARY(1020) NOT NULL,
    `schema`    LONGBLOB NOT NULL,
    PRIMARY KEY (workflow, type)
) ENGINE = InnoDB;
