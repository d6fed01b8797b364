-- What a worker needs to know its own commits again: after a lost answer, a copied process, or a failover.

-- Written by each batch: two batches with one number, from a process and its copy, are told apart by it.
ALTER TABLE edda_fence ADD COLUMN token bigint NOT NULL DEFAULT 0;

-- How many claims of a worker are committed. Apart from its fence: a claim and a batch do not wait for each other.
CREATE TABLE edda_claim (
    worker      text COLLATE "C" PRIMARY KEY,
    n           bigint NOT NULL
) WITH (fillfactor = 10);
INSERT INTO edda_claim (worker, n) SELECT worker, 0 FROM edda_fence;
