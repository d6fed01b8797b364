"""Stores the schemas and code graphs of this process's workflows in the database, for pages and the command line.

It is done once, in the background. Errors are debug lines: runs do not need it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec

from edda.core.queries import Definition, EventSchema
from edda.core.validation import load_pydantic, schema_of
from edda.workflow.workflow import Workflow

from .services import EngineServices
from .tasks import cancel_and_wait
from .worker import supervision

logger = logging.getLogger(__name__)

Describe = Callable[[Workflow[Any, Any]], bytes]


class DefinitionPublisher:
    def __init__(self, services: EngineServices, describe: Describe | None) -> None:
        self._storage = services.storage
        self._clock = services.clock
        self._service = services.service
        self._registry = services.registry
        self._describe = describe
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._saved_schemas: set[tuple[str, str]] = set()
        """Workflows and event types whose schema was saved."""

    def start(self) -> None:
        if self._describe is not None:
            self._loop = asyncio.get_running_loop()
            self._begin(partial(self._save_definitions, self._describe))

    def close(self) -> None:
        self._loop = None
        for task in self._tasks:
            task.cancel()

    async def stop(self) -> None:
        self.close()
        await cancel_and_wait(*self._tasks)

    def add_event_schema(self, workflow: str, type: str, model: Any) -> None:
        """Called from the code of runs, at every wait: usually the schema is saved already."""
        if (workflow, type) not in self._saved_schemas and self._loop is not None:
            self._saved_schemas.add((workflow, type))
            # On the process's loop: the running loop is the run's own.
            self._loop.call_soon(self._begin, partial(self._save_event_schema, workflow, type, model))

    def _begin(self, work: Callable[[], Awaitable[None]]) -> None:
        if self._loop is None:  # closed meanwhile
            return
        task = supervision.start_once("describing workflows", work, name="edda-definitions")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _save_definitions(self, describe: Describe) -> None:
        try:
            definitions = await self._describe_all(describe)
            if definitions:
                await self._storage.save_definitions(definitions, ())
        except Exception:  # user classes may raise any error, and the database may be away
            logger.debug("storing the workflow definitions of %s failed, skipping them", self._service, exc_info=True)

    async def _describe_all(self, describe: Describe) -> list[Definition]:
        """On the loop, one workflow at a time, and never in a thread: `ast.parse` keeps the depth of its recursion per
        interpreter up to CPython 3.11, so that two threads that parse break each other with a SystemError."""
        await asyncio.to_thread(load_pydantic)
        definitions = []
        for name in self._registry.names():
            await asyncio.sleep(0)
            try:
                details = describe(self._registry.find(name))
                definitions.append(Definition(name, self._service, details, self._clock.now()))
            except Exception:  # as above; the others are described all the same
                logger.debug("describing workflow %s failed, skipping it", name, exc_info=True)
        return definitions

    async def _save_event_schema(self, workflow: str, type: str, model: Any) -> None:
        try:
            await asyncio.to_thread(load_pydantic)
            schema = schema_of(model)  # on the loop: pydantic may parse the source of a model for its docstrings
            if schema is not None:
                await self._storage.save_definitions((), (EventSchema(workflow, type, msgspec.json.encode(schema)),))
        except Exception:  # as above
            logger.debug("storing the schema of %s in %s failed, skipping it", type, workflow, exc_info=True)
