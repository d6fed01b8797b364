-- Parked runs, and runs whose process died.

-- When it was parked last: workers that are restarted in a loop do not try it again at each start.
ALTER TABLE edda_sched ADD COLUMN parked_at INTEGER;
-- It was cancelled while it was parked: if it cannot go on, it ends as cancelled.
ALTER TABLE edda_sched ADD COLUMN end_if_parked INTEGER NOT NULL DEFAULT 0;
-- Workers that died while they owned the run, and those of them that had no other run; `died_seq` is the number of the
-- last entry before the first of them, so an entry that is recorded later makes all of them void.
ALTER TABLE edda_sched ADD COLUMN deaths INTEGER NOT NULL DEFAULT 0;
ALTER TABLE edda_sched ADD COLUMN deaths_alone INTEGER NOT NULL DEFAULT 0;
ALTER TABLE edda_sched ADD COLUMN died_seq INTEGER;
-- Its owner claimed it as its only run.
ALTER TABLE edda_sched ADD COLUMN alone INTEGER NOT NULL DEFAULT 0;
-- Stands for `ready_at` while a suspect waits for its turn, so that ordinary claims do not find it.
ALTER TABLE edda_sched ADD COLUMN suspect_at INTEGER;
CREATE INDEX edda_sched_suspect ON edda_sched (suspect_at) WHERE suspect_at IS NOT NULL;
