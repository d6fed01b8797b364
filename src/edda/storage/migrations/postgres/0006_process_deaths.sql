-- Parked runs, and runs whose process died.

ALTER TABLE edda_sched
    -- When it was parked last: workers that are restarted in a loop do not try it again at each start.
    ADD COLUMN parked_at bigint,
    -- It was cancelled while it was parked: if it cannot go on, it ends as cancelled.
    ADD COLUMN end_if_parked boolean NOT NULL DEFAULT false,
    -- Workers that died while they owned the run, and those of them that had no other run; `died_seq` is the number of
    -- the last entry before the first of them, so an entry that is recorded later makes all of them void.
    ADD COLUMN deaths integer NOT NULL DEFAULT 0,
    ADD COLUMN deaths_alone integer NOT NULL DEFAULT 0,
    ADD COLUMN died_seq integer,
    -- Its owner claimed it as its only run.
    ADD COLUMN alone boolean NOT NULL DEFAULT false,
    -- Stands for `ready_at` while a suspect waits for its turn, so that ordinary claims do not find it.
    ADD COLUMN suspect_at bigint;
CREATE INDEX edda_sched_suspect ON edda_sched (suspect_at) WHERE suspect_at IS NOT NULL;
