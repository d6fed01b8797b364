"""Small forms of what `make environments` does at length: databases that refuse for a while."""

from __future__ import annotations

import os
import shutil

import pytest

from environments import max_connections, read_only

pytestmark = pytest.mark.processes


async def test_runs_outlast_a_database_that_refuses_to_write() -> None:
    await read_only.check_postgres(runs=8, seconds=1.0)


@pytest.mark.skipif(os.geteuid() == 0 and not shutil.which("setpriv"), reason="root may write to everything")
def test_a_file_that_may_not_be_written_to_is_refused_by_name() -> None:
    read_only.check_sqlite()


async def test_runs_outlast_a_server_without_free_connections() -> None:
    await max_connections.check(runs=8, seconds=1.0)
