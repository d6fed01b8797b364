-- Runs that others wait for, and runs that begin anew.

-- Who is told the end of a run, besides its parent. Their number is kept in the run's own sched row, because that row
-- is what its end locks: whoever ends it sees there whether it knows them all.
CREATE TABLE IF NOT EXISTS edda_watcher (
    run_id      VARBINARY(255) NOT NULL,
    watcher     VARBINARY(255) NOT NULL,
    step        VARBINARY(2000) NOT NULL,
    PRIMARY KEY (run_id, watcher, step)
) ENGINE = InnoDB;

-- Generations that another one followed, and since when: what pruning looks for. Not an index of edda_run, which would
-- hold every run there is.
CREATE TABLE IF NOT EXISTS edda_past (
    run_id      VARBINARY(255) NOT NULL,
    gen         INT NOT NULL,
    ended_at    BIGINT NOT NULL,
    PRIMARY KEY (run_id, gen),
    KEY edda_past_ended (ended_at)
) ENGINE = InnoDB;
