"""The environments that take some seconds; `make environments` runs them all."""

from __future__ import annotations

import pytest

from environments.catalogue import Environment, catalogue
from tests.servers import Unavailable
from tests.tiers import skip_unless_ci

pytestmark = [pytest.mark.timed, pytest.mark.timeout(180)]
QUICK = [one for one in catalogue().values() if one.is_quick]


@pytest.mark.parametrize("environment", QUICK, ids=lambda one: one.name)
def test_edda_holds_in(environment: Environment) -> None:
    try:
        figures = environment.run()
    except Unavailable as error:
        skip_unless_ci(str(error))
    assert figures


def test_every_environment_has_a_name_of_its_own_and_returns_figures() -> None:
    assert {"galera", "sigstop", "clocks", "hidepid", "full_disk", "memory_limit"} <= catalogue().keys()
