-- What steps and runs say besides their history: records in a user's own transaction, dispatches, events for others, facts.

-- Steps whose effect was committed together with this row; it goes when the history has their entry.
CREATE TABLE IF NOT EXISTS edda_done (
    run_id      VARBINARY(255) NOT NULL,
    gen         INT NOT NULL,
    step        VARBINARY(2000) NOT NULL,
    attempt     INT NOT NULL,
    value       LONGBLOB NOT NULL,
    at          BIGINT NOT NULL,
    PRIMARY KEY (run_id, gen, step)
) ENGINE = InnoDB;

-- On the way into the log of events.
CREATE TABLE IF NOT EXISTS edda_dispatch (
    seq         BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    kind        VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    body        LONGBLOB NOT NULL,
    due         BIGINT NOT NULL DEFAULT 0,
    CONSTRAINT edda_dispatch_kind CHECK (kind IN ('event', 'message', 'offer'))
) ENGINE = InnoDB;

-- Events for others. What is due at one moment, or of one key, or in one state, is read in the order of its number.
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
-- What those who change the outbox lock before they look.
INSERT IGNORE INTO edda_bucket VALUES (768);

-- What a run says of itself; it stays as long as the run is known.
CREATE TABLE IF NOT EXISTS edda_fact (
    run_id      VARBINARY(255) NOT NULL,
    name        VARBINARY(1020) NOT NULL,
    value       LONGBLOB NOT NULL,
    at          BIGINT NOT NULL,
    PRIMARY KEY (run_id, name)
) ENGINE = InnoDB;
