-- Runs that others wait for.

-- Who is told the end of a run, besides its parent. Their number is kept in the run's own sched row, because that row
-- is what its end locks: whoever ends it sees there whether it knows them all.
CREATE TABLE edda_watcher (
    run_id      text COLLATE "C" NOT NULL,
    watcher     text COLLATE "C" NOT NULL,
    step        text COLLATE "C" NOT NULL,
    PRIMARY KEY (run_id, watcher, step)
);

-- The rows of a batch. As those of 0001: never changed.
-- `place` is that of the letter in the batch, `run_id` whose inbox it goes to.
CREATE TYPE edda_post_row AS (
    place integer, sender text, run_id text, kind text, step text, value bytea);
-- `gen` is the generation that ends.
CREATE TYPE edda_recur_row AS (run_id text, gen integer, input bytea, created_at bigint);
