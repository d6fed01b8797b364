"""`make demo` keeps what it promises: two kills, one finished order, nothing run twice, in under 30 seconds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from .pages import ROOT

EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], float]:
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / "demo.py")],
        cwd=tmp_path_factory.mktemp("anywhere"),
        capture_output=True,
        text=True,
        timeout=90,
    )
    return done, time.monotonic() - began


Demo = tuple[subprocess.CompletedProcess[str], float]


def test_the_demo_ends_well_and_in_time(demo: Demo) -> None:
    done, seconds = demo
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert seconds < 30


def test_the_demo_gives_its_verdict(demo: Demo) -> None:
    done, _ = demo
    assert "Nothing ran twice" in done.stdout
    assert done.stdout.count("SIGKILL") == 2
    assert re.search(r"^sleep:1 .* due -?\d+ ms before$", done.stdout, re.MULTILINE)


def test_every_step_is_in_the_table_with_where_it_ran(demo: Demo) -> None:
    done, _ = demo
    rows = dict(re.findall(r"^(\w+:1) +process ([\d, ]+?) {2,}\d", done.stdout, re.MULTILINE))
    assert len(rows) == 8
    assert rows["charge_card:1"] == "1"
    assert rows["send_receipt:1"] == "3"


def test_the_demo_fits_on_eighty_columns_without_colours_where_there_is_no_terminal(demo: Demo) -> None:
    done, _ = demo
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


# The verdict is computed: here are ledgers that must not pass.


@pytest.fixture(scope="module")
def ledger() -> ModuleType:
    spec = util.spec_from_file_location("demo_ledger", EXAMPLES / "demo_ledger.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["demo_ledger"] = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def audit(ledger: ModuleType) -> Any:
    """`a` recorded by the first process, `b` in flight when it was killed."""
    lines = [ledger.Line("a", 1, "ka"), ledger.Line("b", 1, "kb"), ledger.Line("b", 2, "kb")]
    return ledger.Audit(lines, [ledger.Kill(1, frozenset({"a"}))], ["a", "b"])


def test_a_step_in_flight_may_run_again(audit: Any) -> None:
    assert audit.faults() == []
    assert audit.in_flight == 1


def test_a_recorded_step_that_runs_again_is_found(audit: Any, ledger: ModuleType) -> None:
    broken = replace(audit, lines=[*audit.lines, ledger.Line("a", 2, "ka")])
    assert "a ran again after it was recorded" in broken.faults()


def test_a_step_that_runs_once_too_often_is_found(audit: Any, ledger: ModuleType) -> None:
    broken = replace(audit, lines=[*audit.lines, ledger.Line("b", 2, "kb")])
    assert broken.faults() == ["b ran 3 times, expected 2"]


def test_a_step_that_never_ran_is_found(audit: Any) -> None:
    assert replace(audit, recorded=["a", "b", "c"]).faults() == ["c ran 0 times, expected 1"]


def test_a_step_that_was_never_recorded_is_found(audit: Any) -> None:
    assert replace(audit, recorded=["a"]).faults() == ["b ran and is not recorded"]


def test_another_idempotency_key_is_found(audit: Any, ledger: ModuleType) -> None:
    broken = replace(audit, lines=[*audit.lines[:2], ledger.Line("b", 2, "other")])
    assert broken.faults() == ["b had another idempotency key the second time"]


def test_the_ledger_reads_what_it_wrote(ledger: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ledger.LEDGER, str(tmp_path / "ledger"))
    monkeypatch.setenv(ledger.PROCESS, "2")
    ledger.note("a", "ka")
    ledger.note("b", "kb")
    assert ledger.read(tmp_path / "ledger") == [ledger.Line("a", 2, "ka"), ledger.Line("b", 2, "kb")]
    assert os.stat(tmp_path / "ledger").st_mode & 0o077 == 0
