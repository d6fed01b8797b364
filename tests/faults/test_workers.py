"""Real worker processes, one fault at a time."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from edda import EddaApp
from faults.audit_triggers import COUNT_TAKEOVERS
from faults.effect_log import Effect, read_ledgers
from faults.final_state import read_remains
from faults.fork_server import ROOT
from faults.invariants import violations
from faults.rolling_restart import keep_busy, leave, roll, service
from faults.sql_client import Row
from faults.target_databases import KINDS, Place, crashable, fresh
from faults.worker_fleet import Fleet, Member
from faults.workload import errand, gated, long

from .conftest import PATIENCE, MakeFleet, client_of, until

RECOVERY = {"postgres": 20.0, "mysql": 20.0, "sqlite": 3.0}
"""Seconds from the kill to the last result, with the settings that users get."""
STEADY_LEASE = 1.5

WRITTEN = (
    "SELECT run_id, generation, seq, epoch, kind, step, ok, at, attempt, value FROM edda_history ORDER BY 1, 2, 3",
    "SELECT run_id, generation, status, value, ended_at FROM edda_result ORDER BY 1",
)


def effects(folder: Path, step: str) -> list[Effect]:
    return [effect for effect in read_ledgers(folder).effects if effect.step == step]


async def written(place: Place) -> list[list[Row]]:
    line = place.line()
    try:
        return [await line.rows(statement) for statement in WRITTEN]
    finally:
        line.close()


async def assert_sound(place: Place, folder: Path, acked: set[str]) -> None:
    line = place.line()
    remains, told = await read_remains(line), read_ledgers(folder)
    line.close()
    told.acked |= acked
    assert list(violations(remains, told)) == []


async def stop_between_transactions(member: Member, place: Place) -> None:
    """A process that is stopped while it holds a file's lock stops everybody: no fence can help against that."""
    storage = place.storage()
    await storage.open()
    while True:
        member.send(signal.SIGSTOP)
        turn = asyncio.ensure_future(storage.wake_parked([]))
        done, _ = await asyncio.wait({turn}, timeout=1)
        if done:
            break
        member.send(signal.SIGCONT)
        await turn
    await storage.close()


@pytest.mark.processes
async def test_a_zombie_writes_not_one_row_and_goes_on_as_a_new_worker(
    place: Place, client: EddaApp, make_fleet: MakeFleet, tmp_path: Path
) -> None:
    fleet, gate = make_fleet(place), tmp_path / "gate"
    zombie = fleet.launch()
    run_id = await client.start(gated, str(gate))
    await until(lambda: bool(effects(tmp_path, "pass_gate:1")), "the run is in its second step")
    await stop_between_transactions(zombie, place)
    heir = fleet.launch()
    gate.touch()
    await client.handle(run_id).result(PATIENCE)
    before = await written(place)
    zombie.send(signal.SIGCONT)
    await until(lambda: "lost its lease" in zombie.log, "the zombie has heard of its end")
    fleet.kill(heir)
    await client.handle(await client.start(errand)).result(PATIENCE)
    after = await written(place)
    assert [[row for row in table if row in before[n]] for n, table in enumerate(after)] == before
    assert [row for row in after[0] if row[0] == before[0][0][0]] == before[0], "the zombie's run has not grown"
    await assert_sound(place, tmp_path, {run_id})


@pytest.mark.timed
@pytest.mark.timeout(180)
async def test_a_healthy_step_ten_times_as_long_as_the_lease_is_neither_taken_nor_repeated(
    make_fleet: MakeFleet, tmp_path: Path
) -> None:
    with ExitStack() as places:
        each = [places.enter_context(fresh(database, tmp_path)) for database in KINDS]
        await asyncio.gather(*(_hold_lease(place, make_fleet, tmp_path) for place in each))


async def _hold_lease(place: Place, make_fleet: MakeFleet, folder: Path) -> None:
    await place.prepare()
    fleet = make_fleet(place, lease=STEADY_LEASE)
    for _ in range(2):
        fleet.launch()
    async with client_of(place) as client:
        run_id = await client.start(long, STEADY_LEASE * 10)
        await client.handle(run_id).result(PATIENCE)
    assert [effect.epoch for effect in effects(folder, "effect:1") if effect.run_id == run_id] == [1]
    line = place.line()
    assert await line.rows(COUNT_TAKEOVERS) == [(0,)]
    line.close()


@pytest.mark.timed
@pytest.mark.timeout(180)
async def test_two_hundred_running_workflows_go_on_after_a_kill_with_the_settings_users_get(
    place: Place, client: EddaApp, make_fleet: MakeFleet, tmp_path: Path
) -> None:
    fleet, gate = make_fleet(place, lease=None), tmp_path / "gate"
    doomed = fleet.launch()
    run_ids = await asyncio.gather(*(client.start(gated, str(gate)) for _ in range(200)))
    await until(lambda: len(effects(tmp_path, "pass_gate:1")) == 200, "all runs are in their second step")
    fleet.launch()
    fleet.wait_until_ready()
    fleet.kill(doomed)
    killed = time.monotonic()
    gate.touch()
    await asyncio.gather(*(client.handle(run_id).result(PATIENCE) for run_id in run_ids))
    assert time.monotonic() - killed < RECOVERY[place.kind]
    await assert_sound(place, tmp_path, set(run_ids))
    assert len(effects(tmp_path, "effect:1")) == 200, "a recorded step did not run again"


@pytest.mark.timed
async def test_processes_on_one_file_share_the_work(make_fleet: MakeFleet, tmp_path: Path) -> None:
    with fresh("sqlite", tmp_path) as place:
        await place.prepare()
        fleet = make_fleet(place, lease=STEADY_LEASE)
        members = [fleet.launch() for _ in range(3)]
        fleet.wait_until_ready()
        async with client_of(place) as client:
            run_ids = await asyncio.gather(*(client.start(errand) for _ in range(150)))
            await asyncio.gather(*(client.handle(run_id).result(PATIENCE) for run_id in run_ids))
        assert all(member.orders.file("ledger").read_text() for member in members), "one of them did nothing"
        await assert_sound(place, tmp_path, set(run_ids))


@pytest.mark.timed
@pytest.mark.timeout(180)
async def test_a_worker_that_is_told_to_go_loses_nothing_repeats_nothing_and_goes_soon(
    place: Place, tmp_path: Path
) -> None:
    rolled = await roll(place, tmp_path, times=3)
    assert rolled.violations == ()
    assert rolled.repeated == 0
    assert rolled.codes == {0}
    assert rolled.slowest < 5


@pytest.mark.timed
async def test_what_cannot_finish_in_the_grace_is_handed_over_within_a_second(
    place: Place, client: EddaApp, tmp_path: Path
) -> None:
    gate = str(tmp_path / "gate")
    async with service(place, tmp_path, "--grace", "0.2") as first:
        run_ids = [await client.start(gated, gate) for _ in range(20)]
        await until(lambda: len(effects(tmp_path, "pass_gate:1")) == 20, "all runs are in their second step")
        async with service(place, tmp_path):
            assert (await leave(first)).code == 0
            gone = time.monotonic()
            await until(lambda: len(effects(tmp_path, "pass_gate:1")) == 40, "all runs went on elsewhere")
            assert time.monotonic() - gone < 1
            (tmp_path / "gate").touch()
            await asyncio.gather(*(client.handle(run_id).result(PATIENCE) for run_id in run_ids))
    await assert_sound(place, tmp_path, set(run_ids))


@pytest.mark.timed
async def test_a_second_signal_ends_the_worker_at_once(place: Place, client: EddaApp, tmp_path: Path) -> None:
    async with service(place, tmp_path) as process:
        await client.start(gated, str(tmp_path / "gate"))
        await until(lambda: bool(effects(tmp_path, "pass_gate:1")), "the run is in a step that takes long")
        process.send_signal(signal.SIGTERM)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(process.wait()), 0.5)
        departure = await leave(process)
    assert departure.code == 1
    assert departure.seconds < 1


@pytest.mark.timed
@pytest.mark.timeout(180)
@pytest.mark.parametrize("database", ["postgres", "mysql"])
async def test_work_resumes_soon_after_the_database_crashed(
    database: str, make_fleet: MakeFleet, tmp_path: Path
) -> None:
    with crashable(database) as (place, crasher):
        await place.prepare()
        fleet = make_fleet(place, lease=None)
        for _ in range(2):
            fleet.launch()
        fleet.wait_until_ready()
        async with client_of(place) as client:
            load = asyncio.create_task(keep_busy(client))
            await until(lambda: len(read_ledgers(tmp_path).effects) > 50, "there is work under way")
            for _ in range(2):
                await asyncio.to_thread(crasher.crash)
                await asyncio.to_thread(crasher.restart)
                await _assert_work_goes_on(place, fleet, within=3.0)
            load.cancel()
            started = await load
            await asyncio.gather(*(client.handle(run_id).result(PATIENCE) for run_id in started))
        await assert_sound(place, tmp_path, started)


async def _assert_work_goes_on(place: Place, fleet: Fleet, within: float) -> None:
    """Runs end that had not ended when the port answered again."""
    line = place.line()
    before = {row[0] for row in await line.rows("SELECT run_id FROM edda_result")}

    async def more_ended() -> bool:
        return len(await line.rows("SELECT run_id FROM edda_result")) >= len(before) + 5

    await until(more_ended, "work goes on", within)
    assert not fleet.deserters()
    line.close()


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_memory_does_not_grow_with_the_number_of_runs() -> None:
    """In a process of its own; the long form is `python -m faults memory`."""
    options = ["--runs", "5000", "--warm-up", "1000", "--bound", "10"]
    command = [sys.executable, "-m", "faults", "memory", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
