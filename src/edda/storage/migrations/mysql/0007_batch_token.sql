-- What a worker needs to know its own commits again: after a lost answer, a copied process, or a failover.

-- Written by each batch: two batches with one number, from a process and its copy, are told apart by it.
-- MySQL has no IF NOT EXISTS for a column: the statement is put together only if the column is not there.
SET @edda_column = IF((SELECT COUNT(*) FROM information_schema.columns WHERE table_schema = DATABASE()
    AND table_name = 'edda_fence' AND column_name = 'token') > 0,
    'DO 0', 'ALTER TABLE edda_fence ADD COLUMN token BIGINT NOT NULL DEFAULT 0');
PREPARE edda_statement FROM @edda_column;
EXECUTE edda_statement;
DEALLOCATE PREPARE edda_statement;

-- How many claims of a worker are committed. Apart from its fence: a claim and a batch do not wait for each other.
CREATE TABLE IF NOT EXISTS edda_claim (
    worker      VARBINARY(255) NOT NULL PRIMARY KEY,
    n           BIGINT NOT NULL
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
INSERT IGNORE INTO edda_claim (worker, n) SELECT worker, 0 FROM edda_fence;
