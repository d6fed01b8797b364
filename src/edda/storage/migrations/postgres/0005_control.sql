-- For people who look at it and steer it.

-- Who did what, when, and from where.
CREATE TABLE edda_audit (
    seq         bigint GENERATED ALWAYS AS IDENTITY (CACHE 1) PRIMARY KEY,
    at          bigint NOT NULL,
    who         text   NOT NULL,
    action      text   NOT NULL,
    subject     text   NOT NULL,
    origin      text   NOT NULL,
    details     text   NOT NULL
);

-- Workflows as their code says, and the schemas of the events they wait for.
CREATE TABLE edda_definition (
    workflow    text COLLATE "C" PRIMARY KEY,
    service     text   NOT NULL,
    details     bytea  NOT NULL,
    seen_at     bigint NOT NULL
);
CREATE TABLE edda_form (
    workflow    text COLLATE "C" NOT NULL,
    type        text COLLATE "C" NOT NULL,
    schema      bytea  NOT NULL,
    PRIMARY KEY (workflow, type)
);

-- A workflow that is rarely started is found among a million runs of others.
CREATE INDEX edda_run_workflow ON edda_run (workflow, created_at DESC, id DESC);
-- What failed or was cancelled. Those that completed pay nothing for it: they are nearly all there are.
CREATE INDEX edda_result_status ON edda_result (status, ended_at) INCLUDE (run_id, gen) WHERE status <> 'completed';
