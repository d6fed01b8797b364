"""The code of workflows is parsed on the main thread: `ast.parse` in another thread could break that of the user."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import inspect
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel, ConfigDict

from edda import EddaApp, RunStatus, WorkflowContext, create_wsgi_app, wait_event, workflow
from edda.control.code_graph import describe_workflow
from edda.engine.definitions import DefinitionPublisher
from edda.engine.services import WorkflowLookup
from edda.workflow.workflow import Workflow, registry
from tests.conftest import MakeDatabase
from tests.engine.conditions import until, until_status
from tests.engine.conftest import MakeApp, url_of

MANY = 200
STEPS = "\n".join(
    f"    if number > {number}:\n        await step(ctx, number, text={number!r})" for number in range(20)
)
SOURCE = "from edda import WorkflowContext, activity, workflow\n\n@activity\nasync def step(ctx, number, text): ...\n\n"


@pytest.fixture
def readers(monkeypatch: pytest.MonkeyPatch) -> set[threading.Thread]:
    """The threads that read source."""
    found: set[threading.Thread] = set()

    def watch(module: Any, name: str) -> None:
        original = getattr(module, name)

        def read(*args: Any, **options: Any) -> Any:
            found.add(threading.current_thread())
            return original(*args, **options)

        monkeypatch.setattr(module, name, read)

    for module, name in ((ast, "parse"), (inspect, "getsourcelines"), (inspect, "getsource"), (inspect, "findsource")):
        watch(module, name)
    return found


def define_many(folder: Path) -> None:
    file = folder / "many_workflows.py"
    flows = "\n\n".join(
        f"@workflow\nasync def flow_{number}(ctx: WorkflowContext, number: int = 1):\n{STEPS}" for number in range(MANY)
    )
    file.write_text(SOURCE + flows + "\n")
    spec = importlib.util.spec_from_file_location("many_workflows", file)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


async def until_told(looker: EddaApp, count: int) -> None:
    async def told() -> bool:
        return len(await looker.control.list_definitions()) == count

    await until(told, f"{count} workflows are described", within=60)


@pytest.mark.databases("sqlite")
async def test_many_workflows_are_described_on_the_main_thread_one_at_a_time(
    make_app_on: MakeApp, make_database: MakeDatabase, tmp_path: Path, readers: set[threading.Thread]
) -> None:
    define_many(tmp_path)
    described: list[str] = []
    describing = asyncio.Event()

    def describe(flow: Workflow[Any, Any]) -> bytes:
        describing.set()
        described.append(flow.name)
        return describe_workflow(flow)

    database = make_database("sqlite")
    looker = await make_app_on(on=database, worker=False, workflows=())
    lookup = WorkflowLookup(registry.get, registry.names)
    lore = DefinitionPublisher(replace(looker.engine.services, service="shop", registry=lookup), describe)
    lore.start()
    await describing.wait()
    assert len(described) == 1, "other tasks have their turn after each workflow"
    await until_told(looker, MANY)
    await lore.stop()
    assert readers == {threading.main_thread()}
    assert len(described) == MANY
    shown = await looker.control.get_definition("flow_7")
    assert shown.structure is not None
    assert len(shown.structure["nodes"]) == 20


async def test_neither_a_worker_nor_a_page_reads_source_in_a_thread(
    make_app: MakeApp, readers: set[threading.Thread]
) -> None:
    class Item(BaseModel):
        model_config = ConfigDict(use_attribute_docstrings=True)
        sku: str
        """Which one."""

    @workflow
    async def pick(ctx: WorkflowContext, number: int) -> str:
        return (await wait_event(ctx, "picked", model=Item)).data.sku

    app = await make_app()
    run_id = await app.start(pick, 1)
    await until_status(app, run_id, RunStatus.WAITING_FOR_EVENT)
    await until_told(app, 1)
    assert (await app.control.get_definition("pick")).structure is not None

    async def has_form() -> bool:
        return (await app.control.get_run(run_id)).waits[0].schema is not None

    await until(has_form, "the form is known")
    assert readers <= {threading.main_thread()}


def test_a_thread_describes_a_workflow_without_reading_its_source(readers: set[threading.Thread]) -> None:
    @workflow
    async def pick(ctx: WorkflowContext, number: int) -> str:
        return "done"

    described: list[Any] = []
    thread = threading.Thread(target=lambda: described.append(msgspec.json.decode(describe_workflow(pick))))
    thread.start()
    thread.join()
    assert described[0]["structure"] is None
    assert described[0]["schema"] is not None
    assert readers == set()
    assert msgspec.json.decode(describe_workflow(pick))["structure"] is not None, "the main thread reads it"


@pytest.mark.databases("sqlite")
def test_an_app_with_its_loop_in_a_thread_parses_its_code_before(
    make_database: MakeDatabase, monkeypatch: pytest.MonkeyPatch, readers: set[threading.Thread]
) -> None:
    monkeypatch.setattr(registry, "_workflows", {})

    @workflow
    async def pick(ctx: WorkflowContext, number: int) -> str:
        await asyncio.sleep(5)
        return "done"

    url = url_of(make_database("sqlite"))
    application = create_wsgi_app(EddaApp("shop", url))
    application.start()

    async def look() -> Any:
        async with EddaApp("viewer", url, worker=False, workflows=()) as looker:
            await until_told(looker, 1)
            return (await looker.control.get_definition("pick")).structure

    assert asyncio.run(look()) is not None
    application.close()
    assert readers == {threading.main_thread()}
