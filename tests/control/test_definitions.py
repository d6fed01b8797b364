"""Workers store definitions of their workflows; a failure to do so affects no run."""

from __future__ import annotations

from datetime import datetime
from enum import Enum
from types import SimpleNamespace
from typing import Any, Literal

import msgspec
import pytest
from pydantic import BaseModel

from edda import RunStatus, WorkflowContext, wait_event, workflow
from edda.core.queries import Definition, EventSchema
from edda.core.signature import Signature
from edda.core.validation import input_schema, schema_of
from edda.engine.definitions import DefinitionPublisher
from edda.errors import StorageUnavailableError
from tests.engine.conditions import until, until_status
from tests.engine.conftest import MakeApp


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Item(BaseModel):
    sku: str
    colours: list[Colour] = []


class Plain(msgspec.Struct):
    a: int


class Shy:
    """Nothing can be learnt of it."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        raise RuntimeError("do not look at me")


def test_the_input_schema_has_types_defaults_and_required_fields() -> None:
    async def order(
        ctx: WorkflowContext,
        item: Item,
        when: datetime | None,
        size: Literal["s", "l"] = "s",
        plain: Plain | None = None,
        anything: Any = None,
    ) -> None: ...

    schema = input_schema(Signature(order))
    assert schema["required"] == ["item", "when"]
    assert schema["additionalProperties"] is False
    properties = schema["properties"]
    assert properties["item"]["properties"]["sku"]["type"] == "string"
    assert schema["$defs"]["Colour"]["enum"] == ["red", "blue"]
    assert {"type": "null"} in properties["when"]["anyOf"]
    assert (properties["size"]["enum"], properties["size"]["default"]) == (["s", "l"], "s")
    assert properties["plain"] == {"default": None}  # pydantic does not know it: anything may be typed
    assert properties["anything"] == {"default": None}
    msgspec.json.encode(schema)


def test_a_type_unknown_to_pydantic_has_no_schema() -> None:
    assert schema_of(Plain) is None
    assert schema_of(type(lambda: 0)) is None


async def test_a_workflow_that_cannot_be_described_stops_nothing(make_app: MakeApp) -> None:
    @workflow
    async def strange(ctx: WorkflowContext, thing: Shy) -> None: ...

    @workflow
    async def plain(ctx: WorkflowContext) -> str:
        return "done"

    app = await make_app()
    assert await app.run(plain) == "done"

    strangely, plainly = await app.control.get_definition("strange"), await app.control.get_definition("plain")
    assert strangely.schema is None
    assert plainly.schema == {"type": "object", "properties": {}, "required": [], "additionalProperties": False}


async def test_a_worker_stores_definitions(make_app: MakeApp) -> None:
    @workflow
    async def plain(ctx: WorkflowContext) -> None:
        """Do it.

        Or not.
        """

    told = await make_app()
    looker = await make_app(worker=False, workflows=())

    async def is_told() -> bool:
        return bool(await looker.control.list_definitions())

    await until(is_told, "the workflow is described")
    (known,) = await looker.control.list_definitions()
    assert (known.workflow, known.service, known.documentation) == ("plain", told.service_name, "Do it.")


async def test_an_event_schema_outlives_the_process_that_stored_it(make_app: MakeApp) -> None:
    @workflow
    async def pick(ctx: WorkflowContext) -> str:
        event = await wait_event(ctx, "picked", model=Item)
        return event.data.sku

    app = await make_app()
    run_id = await app.start(pick)
    await until_status(app, run_id, RunStatus.WAITING_FOR_EVENT)

    async def has_form() -> bool:
        return (await app.control.get_run(run_id)).waits[0].schema is not None

    await until(has_form, "the form is known")
    other = await make_app(service_name="other")

    async def is_told_again() -> bool:
        return (await other.control.get_definition("pick")).service == "other"

    await until(is_told_again, "the next process has told its definitions")
    (wait,) = (await other.control.get_run(run_id)).waits
    assert wait.schema is not None
    assert wait.schema["properties"]["sku"]["type"] == "string"


class Deaf:
    """A database that keeps nothing."""

    def __init__(self) -> None:
        self.asked = 0

    async def define(self, definitions: tuple[Definition, ...], forms: tuple[EventSchema, ...]) -> None:
        self.asked += 1
        raise StorageUnavailableError("away")


@pytest.mark.parametrize("model", [Item, Plain, "nonsense"])
async def test_what_cannot_be_kept_is_not_missed(model: Any) -> None:
    storage, unused = Deaf(), lambda *_: ()
    lookup = SimpleNamespace(find=unused, names=unused)
    services: Any = SimpleNamespace(storage=storage, clock=None, service="shop", registry=lookup)
    lore = DefinitionPublisher(services, lambda _: b"")
    lore.start()
    for _ in range(3):
        lore.add_event_schema("order", "paid", model)
    await lore.stop()
    lore.add_event_schema("order", "later", model)
    assert storage.asked <= 1
