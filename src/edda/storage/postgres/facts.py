"""What runs have said of themselves."""

from __future__ import annotations

from edda.core.model import RunId, RunValue

from .pool import Pool

FACTS = "SELECT name, value FROM edda_fact WHERE run_id = $1 ORDER BY name"
FACT = "SELECT name, value FROM edda_fact WHERE run_id = $1 AND name = $2"


class PostgresFacts:
    _pool: Pool

    async def run_values(self, run_id: RunId, name: str | None = None) -> tuple[RunValue, ...]:
        async with self._pool.session() as session:
            if name is None:
                rows = await session.fetch(FACTS, run_id)
            else:
                rows = await session.fetch(FACT, run_id, name)
        return tuple(RunValue(row["name"], row["value"]) for row in rows)
