"""Nothing public is undocumented, and the tables say what the code says."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType

import click
import pytest

import edda
import edda.channels
import edda.events
import edda.hooks
import edda.outbox
import edda.retry
import edda.testing
from edda import (
    EddaApp,
    First,
    HooksBase,
    ReceivedEvent,
    RetryPolicy,
    WorkflowContext,
    WorkflowHandle,
    errors,
    send_event,
    wait_event,
)
from edda.app import _IGNORED
from edda.cli import main
from edda.core.model import Entry, EntryKind
from edda.engine.settings import Settings
from edda.testing import VirtualApp
from edda.web import Token, TokenScope, WebOptions
from edda.workflow.activity import Activity
from edda.workflow.workflow import Workflow

from . import states_page
from .pages import DOCS, blocks

REFERENCE = DOCS / "reference"

_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_ROW = re.compile(r"^\| `(\w+)` \| `(.*?)` \| .+ \|$", re.MULTILINE)


def code_on(*pages: Path) -> str:
    """All that stands between backticks. A name that is only used in an example is not explained."""
    text = "\n".join(_FENCED.sub("", page.read_text()) for page in pages)
    return "\n".join(re.findall(r"`([^`]+)`", text))


def missing(names: Iterable[str], *pages: Path) -> list[str]:
    words = set(re.findall(r"\w+", code_on(*pages)))
    return sorted(set(names) - words)


def public(cls: type) -> set[str]:
    return {name for name in dir(cls) if not name.startswith("_")}


@pytest.mark.parametrize(
    "module",
    [edda, edda.channels, edda.events, edda.outbox, edda.retry, edda.hooks, edda.testing],
    ids=lambda module: module.__name__,
)
def test_every_public_name_is_in_the_reference(module: ModuleType) -> None:
    assert missing(module.__all__, *REFERENCE.glob("*.md")) == []


def test_every_error_is_in_the_reference() -> None:
    names = {name for name, value in vars(errors).items() if inspect.isclass(value)}
    assert missing(names, REFERENCE / "errors.md") == []
    tree = (errors.__doc__ or "").partition("\n\n")[2]
    assert tree in [block.text for block in blocks(REFERENCE / "errors.md")]


@pytest.mark.parametrize(
    ("cls", "page", "internal"),
    [
        (EddaApp, "app.md", {"client", "engine"}),
        (Workflow, "workflows.md", {"signature"}),
        (Activity, "workflows.md", {"signature"}),
        (WorkflowContext, "context.md", set()),
        (WorkflowHandle, "handle.md", set()),
        (HooksBase, "hooks.md", set()),
        (RetryPolicy, "retry.md", set()),
        (Settings, "settings.md", set()),
        (EntryKind, "handle.md", public(str) | {member.name for member in EntryKind}),
    ],
)
def test_every_member_of_a_public_class_is_in_the_reference(cls: type, page: str, internal: set[str]) -> None:
    values = {member.value for member in cls} if issubclass(cls, EntryKind) else set()
    assert missing((public(cls) - internal) | values, REFERENCE / page) == []


def test_every_field_of_a_history_entry_is_in_the_reference() -> None:
    assert missing(Entry.__struct_fields__, REFERENCE / "handle.md") == []


def test_what_virtual_apps_add_is_in_the_reference() -> None:
    own = {name for name in vars(VirtualApp) if not name.startswith("_")} - public(EddaApp)
    assert missing(own, REFERENCE / "testing.md") == []


@pytest.mark.parametrize("cls", [ReceivedEvent, First])
def test_every_field_of_what_a_wait_gives_is_in_the_reference(cls: type) -> None:
    assert missing([field.name for field in dataclasses.fields(cls)], REFERENCE / "events.md") == []


@pytest.mark.parametrize("function", [wait_event, send_event])
def test_a_table_of_parameters_has_each_with_its_default(function: Callable[..., object]) -> None:
    text = (REFERENCE / "events.md").read_text().partition(f"## `{function.__name__}`")[2].partition("\n## ")[0]
    parameters = inspect.signature(function).parameters.values()
    given = {one.name: repr(one.default) for one in parameters if one.default is not one.empty}
    assert dict(_ROW.findall(text)) == given
    assert re.findall(r"^\| `(\w+)` \| \|", text, re.MULTILINE) == [
        one for one in inspect.signature(function).parameters if one not in given
    ]


def test_tokens_and_their_scopes_are_in_the_reference() -> None:
    parts = inspect.signature(Token).parameters
    assert missing(["Token", "TokenScope", *parts, *TokenScope], REFERENCE / "http.md") == []


def test_every_environment_variable_is_in_the_reference() -> None:
    source = "".join(path.read_text() for path in Path(edda.__file__).parent.rglob("*.py"))
    assert missing(re.findall(r'"(EDDA_[A-Z_]+)"', source), REFERENCE / "settings.md") == []


@pytest.mark.parametrize(
    ("cls", "page"), [(Settings, "settings.md"), (RetryPolicy, "retry.md"), (WebOptions, "http.md")]
)
def test_a_table_of_fields_has_each_with_its_default(cls: type, page: str) -> None:
    fields = {field.name: written(field.default) for field in dataclasses.fields(cls)}
    assert dict(_ROW.findall((REFERENCE / page).read_text())) == fields


def written(default: object) -> str:
    return "(Exception,)" if default == (Exception,) else repr(default)


def test_the_table_of_app_options_has_each_with_its_default() -> None:
    parameters = inspect.signature(EddaApp).parameters.values()
    options = {one.name: repr(one.default) for one in parameters if one.kind is not one.VAR_KEYWORD}
    assert dict(_ROW.findall((REFERENCE / "app.md").read_text())) == options


def test_every_ignored_option_is_listed_with_its_reason() -> None:
    text = (REFERENCE / "app.md").read_text().partition("| Ignored | Because |")[2].partition("\n\n")[0]
    listed = {
        name for row in text.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1:2][0] if row else "")
    }
    assert listed == _IGNORED


def test_every_command_and_option_is_in_the_reference() -> None:
    assert isinstance(main, click.Group)
    text = (REFERENCE / "cli.md").read_text()
    for name, command in main.commands.items():
        section = text.partition(f"## `edda {name}")[2].partition("\n## ")[0]
        assert section, f"edda {name} is not documented"
        parts = [*command.commands.values()] if isinstance(command, click.Group) else []
        for part in parts:
            assert f"`edda {name} {part.name}" in section, f"edda {name} {part.name} is not documented"
        for parameter in (parameter for one in (command, *parts) for parameter in one.params):
            shown = parameter.opts[0] if isinstance(parameter, click.Option) else (parameter.metavar or "")
            assert f"`{shown}`" in section or shown in text, f"edda {name} {shown} is not documented"


def test_the_page_of_states_is_current() -> None:
    hint = "run `python -m tests.docs.states_page`"
    assert states_page.PAGE.read_text() == states_page.page(), hint
