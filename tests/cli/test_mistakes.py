"""Mistakes on the command line print one line that names the value and what was expected, without a traceback."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from edda.cli import main

from .shell import Shell

FILES = {
    "shop": 'from edda import EddaApp\napp = EddaApp("shop", "memory://")\nnumber = 5\n',
    "empty": "",
    "importing": "import nosuchmodule\n",
    "misspelt": "def (:\n",
    "raising": 'raise RuntimeError("no configuration")\n',
    "badurl": 'from edda import EddaApp\napp = EddaApp("shop", "oracle://db/x")\n',
    "badfolder": 'from edda import EddaApp\napp = EddaApp("shop", "sqlite:////no/such/folder/x.db")\n',
    "typo": 'from edda import EddaApp\napp = EddaApp("shop", "memory://", pool_sise=5)\n',
}

MISTAKES: dict[str, tuple[str, ...]] = {
    "worker shop": ("'shop'", "MODULE:APP"),
    "worker :app": ("':app'", "MODULE:APP"),
    "worker shop:": ("'shop:'", "MODULE:APP"),
    "worker ./shop.py:app": ("'./shop.py:app'", "MODULE:APP"),
    "worker shop.py:app": ("'shop.py:app'", "without .py", "shop:app"),
    "worker nosuch:app": ("'nosuch:app'", "no module 'nosuch'"),
    "worker shop:nope": ("'shop:nope'", "its apps are: app"),
    "worker empty:app": ("'empty:app'", "it has no EddaApp"),
    "worker shop:number": ("'shop:number'", "int", "expected an EddaApp"),
    "worker importing:app": ("'importing:app'", "nosuchmodule", "importing.py:1"),
    "worker misspelt:app": ("'misspelt:app'", "SyntaxError", "misspelt.py"),
    "worker raising:app": ("'raising:app'", "RuntimeError: no configuration", "raising.py:1"),
    "worker badurl:app": ("'badurl:app'", "oracle://db/x", "sqlite:///"),
    "worker typo:app": ("'typo:app'", "pool_sise", "did you mean 'pool_size'?"),
    "worker badfolder:app": ("the folder /no/such/folder does not exist", "make it"),
    "serve nosuch:app": ("'nosuch:app'", "no module 'nosuch'"),
    "serve shop:number": ("'shop:number'", "expected an EddaApp"),
    "dev raising:app": ("'raising:app'", "no configuration"),
    "runs list --app shop:nope": ("'shop:nope'", "its apps are: app"),
    "runs list --db nonsense": ("'nonsense'", "sqlite:///file.db"),
    "runs list --db oracle://db/x": ("'oracle://db/x'", "postgresql://"),
    "runs list --db sqlite:////no/such/x.db": ("/no/such/x.db", "--db"),
    "runs list --db postgresql://shop@127.0.0.1:1/x": ("PostgreSQL", "127.0.0.1"),
    "runs list --server nonsense": ("nonsense", "http://"),
    "migrate --db sqlite:////no/such/folder/x.db": ("the folder /no/such/folder does not exist",),
    "runs lst": ("'lst'", "Did you mean 'list'?"),
    "worker": ("MODULE:APP",),
    "worker shop:app --grace -1": ("'--grace'", "-1.0", "x>=0"),
    "outbox relay --broker-url http://127.0.0.1:1 --grace -1": ("'--grace'", "-1.0", "x>=0"),
    "runs start ship --app shop:app --timeout -1": ("'--timeout'", "-1.0", "x>=0"),
    "runs result order-1 --timeout -0.5": ("'--timeout'", "-0.5", "x>=0"),
    "runs start ship": ("ship", "--app MODULE:APP", "--server"),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path


def check(command: str, code: int, said: str) -> None:
    assert code in (1, 2)
    assert "Traceback" not in said
    (line,) = [line for line in said.splitlines() if line.startswith("Error: ")]
    for word in MISTAKES[command]:
        assert word in line


@pytest.mark.parametrize("command", MISTAKES)
@pytest.mark.usefixtures("folder")
def test_a_mistake_prints_one_line(command: str) -> None:
    result = CliRunner().invoke(main, command.split())
    assert isinstance(result.exception, SystemExit), result.exception
    check(command, result.exit_code, result.output)
    for name in FILES:
        sys.modules.pop(name, None)


async def test_a_process_ends_with_that_line(folder: Path) -> None:
    """The same, with all that Python itself would print."""
    said = await Shell(folder=folder).run("worker", "raising:app")
    check("worker raising:app", said.code, said.err)
