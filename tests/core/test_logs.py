"""Log lines: one each, without escape codes, credentials and the values of secret fields."""

from __future__ import annotations

import ast
import io
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

import edda
from edda.core.redact import clean_logs, clean_text

HOSTILE = ["a\nERROR forged", "a\r\nb", "\x1b[2Jb", "a\x00b", "a\u2028b", "\u202eb", "\x9b31m", "a\ud800", "a\x7f"]


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logger = logging.getLogger("edda.engine.run.run")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.DEBUG)
    clean_logs(["iban"])
    yield stream
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("template", ["run %s", "run %r", "run %.50s"])
def test_what_comes_from_outside_cannot_forge_a_line(written: io.StringIO, text: str, template: str) -> None:
    logging.getLogger("edda.engine.run.run").error(template, text)
    logging.getLogger("edda.engine.run.run").error(template, ValueError(text))
    lines = written.getvalue().split("\n")
    assert len(lines) == 3
    assert all(line.isprintable() for line in lines)
    assert all(line.startswith("ERROR run ") for line in lines[:2])


@pytest.mark.parametrize("text", HOSTILE)
def test_a_traceback_forges_no_line_either(written: io.StringIO, text: str) -> None:
    try:
        raise ValueError(text)
    except ValueError:
        logging.getLogger("edda.engine.run.run").exception("storing failed")
    first, *rest = written.getvalue().rstrip("\n").split("\n")
    assert first == "ERROR storing failed"
    assert all(line.startswith("  ") and line.isprintable() for line in rest)


SECRETS = [
    "postgresql://u:S3CRET@h/db is away",
    'with arguments {"password":"S3CRET", "a": 1}',
    "with arguments {'iban': 'S3CRET'}",
    "Authorization: Bearer S3CRET-and-more",
    "api_key=S3CRET",
]


@pytest.mark.parametrize("text", SECRETS)
def test_no_line_and_no_traceback_has_a_secret(written: io.StringIO, text: str) -> None:
    logger = logging.getLogger("edda.engine.run.run")
    logger.error("parked: %s", ValueError(text))
    try:
        raise ValueError(text)
    except ValueError:
        logger.exception("storing failed")
    assert written.getvalue().count("\n") > 2
    assert "S3CRET" not in written.getvalue()


def test_numbers_stay_numbers_and_plain_text_stays_as_it_is(written: io.StringIO) -> None:
    logging.getLogger("edda.engine.run.run").info("%d of %s in %.1f s, %s", 3, "naïve 🎺 run-1", 0.25, None)
    assert written.getvalue() == "INFO 3 of naïve 🎺 run-1 in 0.2 s, None\n"
    assert clean_text("a\nb") == "a\\nb"


def test_every_logger_of_the_package_is_cleaned() -> None:
    """Also those of modules that an app imports when it is made."""
    for url in ("sqlite:///:memory:", "postgresql://h/x", "mysql://h/x"):
        edda.EddaApp("test", url)
    names = {name for name, logger in logging.root.manager.loggerDict.items() if isinstance(logger, logging.Logger)}
    ours = [logging.getLogger(name) for name in names if name.partition(".")[0] == "edda"]
    assert len(ours) > 10
    assert {logger.name for logger in ours if not logger.filters} == set()


def test_log_templates_are_constant_text() -> None:
    """What is put into a line by an f-string is part of the template, and no filter can tell it from that."""
    found = []
    for path in Path(edda.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                owner = node.func.value
                is_logger = isinstance(owner, ast.Name) and owner.id in {"logger", "_log"}
                if is_logger and isinstance(node.args[0], ast.JoinedStr | ast.BinOp):
                    found.append(f"{path.name}:{node.lineno}")
    assert found == []
