-- Parked runs, and runs whose process died.

-- parked_at      when it was parked last: workers that are restarted in a loop do not try it again at each start
-- end_if_parked  it was cancelled while it was parked: if it cannot go on, it ends as cancelled
-- deaths, deaths_alone, died_seq
--                workers that died while they owned the run, and those of them that had no other run; `died_seq` is the
--                number of the last entry before the first of them, so an entry that is recorded later makes all void
-- alone          its owner claimed it as its only run
-- suspect_at     stands for `ready_at` while a suspect waits for its turn, so that ordinary claims do not find it
-- One statement, which is done as a whole or not at all; MySQL has no IF NOT EXISTS for a column, so it is put together
-- only if the last of them is not there.
SET @edda_columns = IF((SELECT COUNT(*) FROM information_schema.columns WHERE table_schema = DATABASE()
    AND table_name = 'edda_sched' AND column_name = 'suspect_at') > 0,
    'DO 0', 'ALTER TABLE edda_sched
    ADD COLUMN parked_at BIGINT,
    ADD COLUMN end_if_parked BOOLEAN NOT NULL DEFAULT FALSE,
    ADD COLUMN deaths INT NOT NULL DEFAULT 0,
    ADD COLUMN deaths_alone INT NOT NULL DEFAULT 0,
    ADD COLUMN died_seq INT,
    ADD COLUMN alone BOOLEAN NOT NULL DEFAULT FALSE,
    ADD COLUMN suspect_at BIGINT,
    ADD KEY edda_sched_suspect (suspect_at)');
PREPARE edda_statement FROM @edda_columns;
EXECUTE edda_statement;
DEALLOCATE PREPARE edda_statement;
