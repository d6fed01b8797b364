"""Every state of a run against every input: what happens is the row of a table, on every database."""
