"""Small forms of what `make environments` does at length."""

from __future__ import annotations

import shutil

import pytest

from environments import pgbouncer
from tests.tiers import skip_unless_ci

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def need_pgbouncer() -> None:
    if shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin"):
        return
    skip_unless_ci("no pgbouncer: install the package of that name")


async def test_each_update_happens_once_where_server_connections_are_shared() -> None:
    await pgbouncer.check("transaction", runs=5, processes=2, servers=5, pool_size=5)


@pytest.mark.parametrize("option", ["", "session"])
async def test_each_update_happens_once_where_clients_have_connections_of_their_own(option: str) -> None:
    await pgbouncer.check("session", runs=3, processes=1, servers=30, pool_size=1, option=option)


async def test_a_sender_that_is_stopped_lets_go_of_its_keys() -> None:
    await pgbouncer.stop_sender()
