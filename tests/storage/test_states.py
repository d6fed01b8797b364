"""The CHECK constraints of the schemas have the statuses of the code."""

from __future__ import annotations

import re

import pytest

from edda.core.states import ENDED, OPEN, TRANSITIONS, RunStatus
from edda.storage.shared.migrations import migrations


def checked(dialect: str, table: str) -> set[str]:
    """The names in the CHECK on a table's status."""
    sql = "\n".join(migration.sql for migration in migrations(dialect))
    create = re.search(rf"CREATE TABLE (?:IF NOT EXISTS )?{table} .*?;\n", sql, re.DOTALL)
    assert create is not None
    check = re.search(r"status\s+IN\s+\((.*?)\)", create.group(), re.DOTALL)
    assert check is not None
    return set(re.findall(r"'(\w+)'", check.group(1)))


@pytest.mark.parametrize("dialect", ["postgres", "mysql", "sqlite"])
def test_the_constraints_of_a_schema_mirror_the_states(dialect: str) -> None:
    assert checked(dialect, "edda_open_run") == {status.value for status in OPEN}
    assert checked(dialect, "edda_result") == {status.value for status in ENDED}


def test_every_state_has_its_transitions_and_an_end_has_none() -> None:
    assert set(TRANSITIONS) == set(RunStatus)
    assert all(not TRANSITIONS[status] for status in ENDED)
