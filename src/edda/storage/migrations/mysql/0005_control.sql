-- For people who look at it and steer it.

-- Who did what, when, and from where.
CREATE TABLE IF NOT EXISTS edda_audit (
    seq         BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    at          BIGINT NOT NULL,
    who         TEXT NOT NULL,
    action      TEXT NOT NULL,
    subject     TEXT NOT NULL,
    origin      TEXT NOT NULL,
    details     MEDIUMTEXT NOT NULL
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Workflows as their code says, and the schemas of the events they wait for.
CREATE TABLE IF NOT EXISTS edda_definition (
    workflow    VARBINARY(255) NOT NULL PRIMARY KEY,
    service     VARCHAR(255) NOT NULL,
    details     LONGBLOB NOT NULL,
    seen_at     BIGINT NOT NULL
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
CREATE TABLE IF NOT EXISTS edda_form (
    workflow    VARBINARY(255) NOT NULL,
    type        VARBINARY(1020) NOT NULL,
    `schema`    LONGBLOB NOT NULL,
    PRIMARY KEY (workflow, type)
) ENGINE = InnoDB;

-- A workflow that is rarely started is found among a million runs of others, and what failed among a million that did
-- not. MySQL has no IF NOT EXISTS for an index: it is made by a statement that is put together only if it is not there.
SET @edda_index = IF((SELECT COUNT(*) FROM information_schema.statistics WHERE table_schema = DATABASE()
    AND table_name = 'edda_run' AND index_name = 'edda_run_workflow') > 0,
    'DO 0', 'CREATE INDEX edda_run_workflow ON edda_run (workflow, created_at, id)');
PREPARE edda_statement FROM @edda_index;
EXECUTE edda_statement;
SET @edda_index = IF((SELECT COUNT(*) FROM information_schema.statistics WHERE table_schema = DATABASE()
    AND table_name = 'edda_result' AND index_name = 'edda_result_status') > 0,
    'DO 0', 'CREATE INDEX edda_result_status ON edda_result (status, ended_at)');
PREPARE edda_statement FROM @edda_index;
EXECUTE edda_statement;
DEALLOCATE PREPARE edda_statement;
