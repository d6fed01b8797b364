"""`python -m benchmarks`, also `make bench`. For a quick look: `--only A,B --systems ours,raw --rounds 1 --quick`."""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from . import databases, machine, venvs
from .bench import Plan, carry_out
from .databases import KINDS
from .effort import QUICK, Effort
from .plot import draw
from .results import Results
from .scenarios import SCENARIOS
from .systems import SYSTEMS
from .table import report

OUT = Path(__file__).parent / "out"
Choice = TypeVar("Choice")


def some_of(choices: Mapping[str, Choice]) -> Callable[[str], list[Choice]]:
    def parse(text: str) -> list[Choice]:
        unknown = [name for name in text.split(",") if name not in choices]
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not one of {', '.join(choices)}")
        return [choices[name] for name in text.split(",")]

    return parse


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__)
    scenarios, systems, kinds = dict(SCENARIOS), dict(SYSTEMS), {kind: kind for kind in KINDS}
    parser.add_argument("--only", type=some_of(scenarios), default=list(scenarios.values()), help=",".join(scenarios))
    parser.add_argument("--systems", type=some_of(systems), default=list(systems.values()), help=",".join(systems))
    parser.add_argument("--databases", type=some_of(kinds), default=list(kinds), help=",".join(kinds))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="shorter measurements, for trying things out")
    parser.add_argument("--out", type=Path, default=OUT, help="where results.json and the plots go")
    return parser.parse_args()


async def bench(plan: Plan) -> Results:
    # A polite end is like Ctrl-C: drivers are ended and databases dropped on the way out.
    main_task = asyncio.current_task()
    assert main_task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, main_task.cancel)
    for system in plan.systems:
        if system.requirements:
            venvs.prepare(system.name, system.requirements)
    databases.find({turn.database for turn in plan.turns()})
    described = await machine.describe(plan.systems, plan.databases)
    return Results(described, await carry_out(plan))


def publish(plan: Plan, results: Results, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    results.save(out / "results.json")
    print(report(plan, results))
    plots = draw(plan, results, out)
    print("\nmedians over rounds; written:", *(out / "results.json", *plots))


def main() -> None:
    chosen = parse_arguments()
    effort = QUICK if chosen.quick else Effort()
    plan = Plan(chosen.only, chosen.databases, chosen.systems, chosen.rounds, effort)
    try:
        results = asyncio.run(bench(plan))
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise SystemExit("\ninterrupted; databases dropped, processes ended") from None
    publish(plan, results, chosen.out)


if __name__ == "__main__":
    main()
