"""The check of `make check` finds a private word wherever one can stand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import vocabulary

HERE = Path("module.py")


@pytest.mark.parametrize(
    "source",
    [
        "def read_letters(): ...",
        "class MailBox: ...",
        "self._herald = None",
        "MOST_ROWS = 10",
        "LOCK_PATIENCE = 1.0",
        "# the worker is buried",
        'text = "a bundle of entries"',
        '"""Nobody judges the run."""',
    ],
)
def test_a_private_word_is_found(source: str) -> None:
    assert list(vocabulary.find_in_python(HERE, source))


@pytest.mark.parametrize(
    "source", ["def read_inbox(): ...", "MAX_ROWS = 10", "# the worker is removed", 'text = "letters and digits"']
)
def test_a_conventional_word_is_not(source: str) -> None:
    assert not list(vocabulary.find_in_python(HERE, source))


def test_the_project_has_none() -> None:
    assert vocabulary.main() == 0
