"""What the code of this process says of its workflows, kept in the database for people who look at it.

It is told in the background, once, and whatever goes wrong with it harms nobody: runs need none of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec

from edda.core.schemas import schema_of
from edda.core.survey import Definition, Form
from edda.storage.ports import Storage
from edda.workflow.workflow import Workflow

from .clock import Clock
from .dismissal import dismiss

logger = logging.getLogger(__name__)

Describe = Callable[[Workflow[Any, Any]], bytes]


class Lore:
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
        self._known: set[tuple[str, str]] = set()
        """Workflows and types whose form was told."""

    def start(self) -> None:
        if self._describe is not None:
            self._loop = asyncio.get_running_loop()
            self._begin(self._tell_definitions(self._describe))

    def close(self) -> None:
        self._loop = None
        for task in self._tasks:
            task.cancel()

    async def stop(self) -> None:
        self.close()
        await dismiss(*self._tasks)

    def add_form(self, workflow: str, type: str, model: Any) -> None:
        """Called from the code of runs, at every wait: usually it is known."""
        if (workflow, type) not in self._known and self._loop is not None:
            self._known.add((workflow, type))
            # On the loop of the process: the one that is running now belongs to the run.
            self._loop.call_soon(self._begin_form, workflow, type, model)

    def _begin_form(self, workflow: str, type: str, model: Any) -> None:
        if self._loop is not None:
            self._begin(self._tell_form(workflow, type, model))

    def _begin(self, telling: Coroutine[Any, Any, None]) -> None:
        assert self._loop is not None
        task = self._loop.create_task(telling, name="edda-lore")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tell_definitions(self, describe: Describe) -> None:
        try:
            # In a thread, for schemas need pydantic, and to load that takes a moment.
            definitions = await asyncio.to_thread(self._describe_all, describe)
            if definitions:
                await self._storage.define(definitions, ())
        except Exception:  # the classes are the users', and the database may be away
            logger.debug("the workflows of %s were not described", self._service, exc_info=True)

    def _describe_all(self, describe: Describe) -> list[Definition]:
        definitions = []
        for name in self._names():
            try:
                details = describe(self._find(name))
            except Exception:  # as above; the others are described all the same
                logger.debug("workflow %s cannot be described", name, exc_info=True)
            else:
                definitions.append(Definition(name, self._service, details, self._clock.now()))
        return definitions

    async def _tell_form(self, workflow: str, type: str, model: Any) -> None:
        try:
            schema = await asyncio.to_thread(schema_of, model)
            if schema is not None:
                await self._storage.define((), (Form(workflow, type, msgspec.json.encode(schema)),))
        except Exception:  # as above
            logger.debug("the data of %s in %s was not described", type, workflow, exc_info=True)
