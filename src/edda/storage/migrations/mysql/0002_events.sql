-- The log of events, and who waits for which.

-- What acceptors and registrars lock before they look: 0 to 255 for types, 256 to 511 for keys, 512 to 767 for the
-- ids of events, so that two who bring the same event do not meet in its index.
CREATE TABLE IF NOT EXISTS edda_bucket (
    b           INT NOT NULL PRIMARY KEY
) ENGINE = InnoDB;
INSERT IGNORE INTO edda_bucket
SELECT h.d * 64 + m.d * 8 + l.d
  FROM (SELECT 0 d UNION SELECT 1 UNION SELECT 2 UNION SELECT 3 UNION SELECT 4 UNION SELECT 5 UNION SELECT 6 UNION SELECT 7
        UNION SELECT 8 UNION SELECT 9 UNION SELECT 10 UNION SELECT 11) h,
       (SELECT 0 d UNION SELECT 1 UNION SELECT 2 UNION SELECT 3 UNION SELECT 4 UNION SELECT 5 UNION SELECT 6 UNION SELECT 7) m,
       (SELECT 0 d UNION SELECT 1 UNION SELECT 2 UNION SELECT 3 UNION SELECT 4 UNION SELECT 5 UNION SELECT 6 UNION SELECT 7) l;

CREATE TABLE IF NOT EXISTS edda_event (
    seq         BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    source      VARBINARY(1024) NOT NULL,
    id          VARBINARY(1024) NOT NULL,
    type        VARBINARY(1020) NOT NULL,
    target      VARBINARY(255),
    received_at BIGINT NOT NULL,
    body        LONGBLOB NOT NULL,
    UNIQUE KEY edda_event_once (source, id),
    KEY edda_event_type (type, seq),
    KEY edda_event_received (received_at, seq)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- One row for each shape of its type that an event fits.
CREATE TABLE IF NOT EXISTS edda_event_key (
    `key`       BINARY(16) NOT NULL,
    seq         BIGINT NOT NULL,
    PRIMARY KEY (`key`, seq),
    KEY edda_event_key_seq (seq)
) ENGINE = InnoDB;

CREATE TABLE IF NOT EXISTS edda_event_type (
    type        VARBINARY(1020) NOT NULL PRIMARY KEY,
    version     INT NOT NULL
) ENGINE = InnoDB;

-- The sets of paths that waits match on. Events after `filled_from` have their keys.
CREATE TABLE IF NOT EXISTS edda_shape (
    type        VARBINARY(1020) NOT NULL,
    shape       VARBINARY(2000) NOT NULL,
    filled_from BIGINT NOT NULL,
    PRIMARY KEY (type, shape)
) ENGINE = InnoDB;

-- A row is there as long as its step waits: whoever deletes it decides how the waiting ends.
CREATE TABLE IF NOT EXISTS edda_wait (
    run_id      VARBINARY(255) NOT NULL,
    step        VARBINARY(2000) NOT NULL,
    `key`       BINARY(16) NOT NULL,
    own_key     BINARY(16) NOT NULL,
    type        VARBINARY(1020) NOT NULL,
    `match`     LONGBLOB NOT NULL,
    due         BIGINT,
    once        BOOLEAN NOT NULL DEFAULT FALSE,
    PRIMARY KEY (run_id, step),
    KEY edda_wait_key (`key`)
) ENGINE = InnoDB;
