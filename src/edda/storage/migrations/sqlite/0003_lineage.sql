-- Runs that others wait for.

-- Who is told the end of a run, besides its parent. Their number is kept in the run's own sched row, because that row
-- is what its end looks at: whoever ends it sees there whether it knows them all.
CREATE TABLE edda_watcher (
    run_id      TEXT    NOT NULL,
    watcher     TEXT    NOT NULL CHECK (instr(watcher, char(0)) = 0),
    step        TEXT    NOT NULL CHECK (instr(step, char(0)) = 0),
    PRIMARY KEY (run_id, watcher, step)
) WITHOUT ROWID;

-- For pruning: when a generation was followed by the next is known by the next one.
CREATE INDEX edda_run_followed ON edda_run (created_at, id, gen) WHERE gen > 0;
