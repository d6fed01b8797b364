-- What a worker needs to know its own commits again: after a lost answer, a copied process, or a restored file.

-- Written by each batch: two batches with one number, from a process and its copy, are told apart by it.
ALTER TABLE edda_fence ADD COLUMN token INTEGER NOT NULL DEFAULT 0;

-- How many claims of a worker are committed.
CREATE TABLE edda_claim (
    worker      TEXT    PRIMARY KEY NOT NULL,
    n           INTEGER NOT NULL
) WITHOUT ROWID;
INSERT INTO edda_claim (worker, n) SELECT worker, 0 FROM edda_fence;
