-- What a cluster of several writable nodes certifies. Galera compares the rows that two transactions write, and does not
-- know which rows they locked. Where a lock excludes another transaction, a number in the locked row is raised.
-- Without a cluster nothing writes these columns. MySQL has no IF NOT EXISTS for a column.
SET @edda_column = IF((SELECT COUNT(*) FROM information_schema.columns WHERE table_schema = DATABASE()
    AND table_name = 'edda_bucket' AND column_name = 'turn') > 0,
    'DO 0', 'ALTER TABLE edda_bucket ADD COLUMN /*M! IF NOT EXISTS */ turn BIGINT NOT NULL DEFAULT 0');
PREPARE edda_statement FROM @edda_column;
EXECUTE edda_statement;
SET @edda_column = IF((SELECT COUNT(*) FROM information_schema.columns WHERE table_schema = DATABASE()
    AND table_name = 'edda_fence' AND column_name = 'claims') > 0,
    'DO 0', 'ALTER TABLE edda_fence ADD COLUMN /*M! IF NOT EXISTS */ claims BIGINT NOT NULL DEFAULT 0');
PREPARE edda_statement FROM @edda_column;
EXECUTE edda_statement;
SET @edda_column = IF((SELECT COUNT(*) FROM information_schema.columns WHERE table_schema = DATABASE()
    AND table_name = 'edda_sched' AND column_name = 'records') > 0,
    'DO 0', 'ALTER TABLE edda_sched ADD COLUMN /*M! IF NOT EXISTS */ records BIGINT NOT NULL DEFAULT 0');
PREPARE edda_statement FROM @edda_column;
EXECUTE edda_statement;
DEALLOCATE PREPARE edda_statement;

-- What those write who remove old events or give them keys.
INSERT IGNORE INTO edda_bucket (b) VALUES (769);
