"""A worker is stopped (SIGSTOP, as `docker pause` and Ctrl-Z do) for a while, alone and beside another."""

from __future__ import annotations

import asyncio

from faults.target_databases import fresh

from .trial import LEASE, Trial, folder

STALL_LIMIT = 2.0
LENGTHS = (0.5 * LEASE, 1.5 * LEASE, STALL_LIMIT + 1.5 * LEASE)
RUNS = 10


def run() -> dict[str, object]:
    slowest, lines, runs = 0.0, 0, 0
    for workers in (1, 2):
        for seconds in LENGTHS:
            with folder() as place_folder, fresh("postgres", place_folder) as place:
                trial = Trial(place, place_folder, workers, stall_limit=STALL_LIMIT)
                slowest = max(slowest, asyncio.run(_stop(trial, seconds)))
                lines += trial.log_lines
                runs += len(trial.runs)
    lengths = ", ".join(f"{seconds:g}" for seconds in LENGTHS)
    return {
        "done": f"stopped for {lengths} s, lease {LEASE:g} s, alone and beside another",
        "runs": runs,
        "recovered": slowest,
        "log lines": lines,
    }


async def _stop(trial: Trial, seconds: float) -> float:
    async with trial.open():
        await trial.start(RUNS)
        trial.fleet.stop(trial.fleet.members[0], seconds)
        await asyncio.sleep(seconds)
        trial.fleet.wake(all=True)
        await trial.start(RUNS)
        recovered = await trial.finish()
        await trial.check()
        return recovered
