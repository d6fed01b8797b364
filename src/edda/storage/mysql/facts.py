"""What runs say of themselves."""

from __future__ import annotations

from edda.core.model import RunId, RunValue

from .clock import NOW
from .pool import Pool
from .rows import fact
from .statement import quote_bytes, quote_text

INSERT_FACT = b"INSERT INTO edda_fact (run_id, name, value, at) VALUES "
OR_REPLACE = b" ON DUPLICATE KEY UPDATE value = VALUES(value), at = VALUES(at)"
FACTS = b"SELECT name, value FROM edda_fact WHERE run_id = %b ORDER BY name"
FACT = b"SELECT name, value FROM edda_fact WHERE run_id = %b AND name = %b"


def fact_row(run_id: RunId, fact: RunValue) -> bytes:
    return b"(%b,%b,%b,%b)" % (quote_text(run_id), quote_text(fact.name), quote_bytes(fact.value), NOW)


class MySQLFacts:
    _pool: Pool

    async def run_values(self, run_id: RunId, name: str | None = None) -> tuple[RunValue, ...]:
        asked = self._pool.run(FACTS, run_id) if name is None else self._pool.run(FACT, run_id, name)
        return tuple(map(fact, (await asked).rows))
