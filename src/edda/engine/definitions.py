"""What the code of this process says of its workflows, kept in the database for people who look at it.

It is told in the background, once, and whatever goes wrong with it harms nobody: runs need none of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from edda.core.queries import Definition, EventSchema
from edda.core.schemas import load, schema_of
from edda.storage.ports import Storage
from edda.workflow.workflow import Workflow

from .clock import Clock
from .tasks import cancel_and_wait
from .worker import supervision

logger = logging.getLogger(__name__)

Describe = Callable[[Workflow[Any, Any]], bytes]


class DefinitionPublisher:
    def __init__(
        self,
        storage: Storage,
        clock: Clock,
        service: str,
        find: Callable[[str], Workflow[Any, Any]],
        names: Callable[[], Sequence[str]],
        describe: Describe | None,
    ) -> None:
        self._storage = storage
        self._clock = clock
        self._service = service
        self._find = find
        self._names = names
        self._describe = describe
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._saved_schemas: set[tuple[str, str]] = set()
        """Workflows and types whose form was told."""

    def start(self) -> None:
        if self._describe is not None:
            self._loop = asyncio.get_running_loop()
            describe = self._describe
            self._begin(lambda: self._save_definitions(describe))

    def close(self) -> None:
        self._loop = None
        for task in self._tasks:
            task.cancel()

    async def stop(self) -> None:
        self.close()
        await cancel_and_wait(*self._tasks)

    def add_event_schema(self, workflow: str, type: str, model: Any) -> None:
        """Called from the code of runs, at every wait: usually it is known."""
        if (workflow, type) not in self._saved_schemas and self._loop is not None:
            self._saved_schemas.add((workflow, type))
            # On the loop of the process: the one that is running now belongs to the run.
            self._loop.call_soon(self._start_event_schema, workflow, type, model)

    def _start_event_schema(self, workflow: str, type: str, model: Any) -> None:
        if self._loop is not None:
            self._begin(lambda: self._save_event_schema(workflow, type, model))

    def _begin(self, telling: Callable[[], Awaitable[None]]) -> None:
        task = supervision.start_once("describing workflows", telling, name="edda-lore")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _save_definitions(self, describe: Describe) -> None:
        try:
            definitions = await self._describe_all(describe)
            if definitions:
                await self._storage.save_definitions(definitions, ())
        except Exception:  # the classes are the users', and the database may be away
            logger.debug("the workflows of %s were not described", self._service, exc_info=True)

    async def _describe_all(self, describe: Describe) -> list[Definition]:
        """On the loop, one workflow at a time, and never in a thread: `ast.parse` keeps the depth of its recursion per
        interpreter up to CPython 3.11, so that two threads that parse break each other with a SystemError."""
        await asyncio.to_thread(load)
        definitions = []
        for name in self._names():
            await asyncio.sleep(0)
            try:
                details = describe(self._find(name))
            except Exception:  # as above; the others are described all the same
                logger.debug("workflow %s cannot be described", name, exc_info=True)
            else:
                definitions.append(Definition(name, self._service, details, self._clock.now()))
        return definitions

    async def _save_event_schema(self, workflow: str, type: str, model: Any) -> None:
        try:
            await asyncio.to_thread(load)
            schema = schema_of(model)  # on the loop: pydantic may parse the source of a model for its docstrings
            if schema is not None:
                await self._storage.save_definitions((), (EventSchema(workflow, type, msgspec.json.encode(schema)),))
        except Exception:  # as above
            logger.debug("the data of %s in %s was not described", type, workflow, exc_info=True)
