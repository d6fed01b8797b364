"""What random programs are made of: small pieces of code as people write them with asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from .recorded_run import Flow, StepFailedError

SEAT: ContextVar[int] = ContextVar("seat", default=0)


class Boom(Exception):
    """Raised by the programs themselves."""


@dataclass(frozen=True)
class Node:
    """A piece and what it is made of; `x` varies the parts that can vary."""

    kind: str
    x: int
    children: tuple[Node, ...] = ()

    def __str__(self) -> str:
        inner = ", ".join(map(str, self.children))
        return f"{self.kind}[{self.x}]" + (f"({inner})" if inner else "")


class Scene:
    """What the pieces of one incarnation share."""

    def __init__(self, flow: Flow, trace: list[str]) -> None:
        self.flow = flow
        self.trace = trace
        self.queue: asyncio.Queue[Any] = asyncio.Queue()
        self.event = asyncio.Event()
        self.lock = asyncio.Lock()
        self.semaphore = asyncio.Semaphore(2)
        self.condition = asyncio.Condition()
        self.kept: list[asyncio.Future[Any]] = []

    def run(self, node: Node) -> Coroutine[Any, Any, Any]:
        return PIECES[node.kind](self, node)

    def run_all(self, node: Node) -> list[Coroutine[Any, Any, Any]]:
        return [self.run(child) for child in node.children]

    async def run_in_turn(self, node: Node) -> list[Any]:
        return [await self.run(child) for child in node.children]

    def step(self, name: str, *args: Any) -> Coroutine[Any, Any, Any]:
        return self.flow.step(name, *args)

    def note(self, what: str, value: Any = None) -> Any:
        self.trace.append(f"{what} {value!r}")
        return value


Piece = Callable[[Scene, Node], Coroutine[Any, Any, Any]]

PIECES: dict[str, Piece] = {}
LEAVES: list[str] = []
TREES: list[str] = []


def leaf(weight: int = 1) -> Callable[[Piece], Piece]:
    return _register(LEAVES, weight)


def tree(weight: int = 1) -> Callable[[Piece], Piece]:
    return _register(TREES, weight)


def _register(names: list[str], weight: int) -> Callable[[Piece], Piece]:
    def register(piece: Piece) -> Piece:
        name = piece.__name__
        PIECES[name] = piece
        names.extend([name] * weight)
        return piece

    return register


# Leaves


@leaf(weight=8)
async def step(scene: Scene, node: Node) -> Any:
    return scene.note("step", await scene.step(f"act{node.x % 3}", node.x, SEAT.get()))


@leaf(weight=2)
async def step_with_its_own_id(scene: Scene, node: Node) -> Any:
    return scene.note("own", await scene.flow.step("own", node.x % 2, id=f"own-{node.x % 4}"))


@leaf(weight=6)
async def deed(scene: Scene, node: Node) -> Any:
    return scene.note("deed", await scene.flow.deed(node.x, SEAT.get()))


@leaf()
async def promise(scene: Scene, node: Node) -> Any:
    scene.flow.promise(node.x)
    return node.x


@leaf(weight=3)
async def child(scene: Scene, node: Node) -> Any:
    return scene.note("child", await scene.flow.child(f"flow{node.x % 2}", node.x, follows=node.x % 5 != 0))


@leaf()
async def start_child(scene: Scene, node: Node) -> Any:
    run_id = scene.note("started", await scene.flow.start_child("flow2", node.x))
    return await scene.flow.child("result", run_id, run_id=run_id, follows=False) if node.x % 2 else run_id


@leaf()
async def watch_another(scene: Scene, node: Node) -> Any:
    return scene.note("watched", await scene.flow.child("result", run_id=f"other-{node.x % 3}", follows=False))


@leaf(weight=2)
async def sleep(scene: Scene, node: Node) -> Any:
    await asyncio.sleep(1 + node.x % 50)
    return scene.note("slept until", asyncio.get_running_loop().time())


@leaf()
async def nap(scene: Scene, node: Node) -> Any:
    await scene.flow.nap(node.x % 20)
    return node.x


@leaf(weight=2)
async def yield_now(scene: Scene, node: Node) -> Any:
    for _ in range(node.x % 4):
        await asyncio.sleep(0)
    return node.x


@leaf()
async def put(scene: Scene, node: Node) -> Any:
    await scene.queue.put(node.x)
    return node.x


@leaf()
async def get(scene: Scene, node: Node) -> Any:
    return scene.note("got", await scene.queue.get())


@leaf()
async def set_event(scene: Scene, node: Node) -> Any:
    scene.event.set()
    return node.x


@leaf()
async def await_event(scene: Scene, node: Node) -> Any:
    return scene.note("event", await scene.event.wait())


@leaf()
async def fail(scene: Scene, node: Node) -> Any:
    raise Boom(node.x)


@leaf()
async def cancel_itself(scene: Scene, node: Node) -> Any:
    task = asyncio.current_task()
    if task is not None and node.x % 3 == 0:
        task.cancel("itself")
    return node.x


@leaf()
async def await_kept(scene: Scene, node: Node) -> Any:
    return await scene.kept.pop(0) if scene.kept else node.x


@leaf()
async def name_itself(scene: Scene, node: Node) -> Any:
    task = asyncio.current_task()
    return await scene.step("name", task.get_name() if task else "")


@leaf()
async def name_all(scene: Scene, node: Node) -> Any:
    return await scene.step("names", [task.get_name() for task in asyncio.all_tasks()])


# Trees: side by side


@tree(weight=4)
async def in_turn(scene: Scene, node: Node) -> Any:
    return scene.note("in turn", await scene.run_in_turn(node))


@tree(weight=3)
async def gather(scene: Scene, node: Node) -> Any:
    return scene.note("gather", await asyncio.gather(*scene.run_all(node)))


@tree()
async def gather_exceptions(scene: Scene, node: Node) -> Any:
    results = await asyncio.gather(*scene.run_all(node), return_exceptions=True)
    return len(scene.note("gather exceptions", results))


@tree(weight=2)
async def task_group(scene: Scene, node: Node) -> Any:
    tasks: list[asyncio.Task[Any]] = []
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(scene.run(child)) for child in node.children]
            if node.x % 3 == 0:
                await scene.step("in_group", node.x)
    except* Boom as errors:
        scene.note("group failed", len(errors.exceptions))
        tasks = []
    return scene.note("group", [task.result() for task in tasks])


@tree(weight=2)
async def wait_first(scene: Scene, node: Node) -> Any:
    return await _race(scene, node, asyncio.FIRST_COMPLETED)


@tree()
async def wait_first_exception(scene: Scene, node: Node) -> Any:
    return await _race(scene, node, asyncio.FIRST_EXCEPTION)


@tree()
async def wait_with_timeout(scene: Scene, node: Node) -> Any:
    return await _race(scene, node, asyncio.ALL_COMPLETED, timeout=3 + node.x % 9)


async def _race(scene: Scene, node: Node, until: str, timeout: float | None = None) -> Any:
    tasks = [asyncio.create_task(scene.run(child)) for child in node.children]
    done, losers = await asyncio.wait(tasks, return_when=until, timeout=timeout)
    for task in done:  # the order of the set matters here, on purpose
        await scene.step("won", tasks.index(task))
    if node.x % 4 == 0:
        scene.kept.extend(losers)
        return 1
    for task in losers:
        scene.note("loses", tasks.index(task))
        task.cancel()
    await asyncio.gather(*losers, return_exceptions=True)
    return scene.note("race", [None if task.cancelled() or task.exception() else task.result() for task in done])


@tree()
async def race_of_gathers(scene: Scene, node: Node) -> Any:
    gathers = [asyncio.gather(scene.run(child), scene.run(child)) for child in node.children]
    done, losers = await asyncio.wait(gathers, return_when=asyncio.FIRST_COMPLETED)
    for winner in done:
        await scene.step("gathered", gathers.index(winner))
    for loser in losers:
        scene.note("gather loses", gathers.index(loser))
        loser.cancel()
    return len(await asyncio.gather(*gathers, return_exceptions=True))


@tree(weight=2)
async def as_completed(scene: Scene, node: Node) -> Any:
    results: list[Any] = []
    for next_one in asyncio.as_completed(scene.run_all(node), timeout=10 + node.x % 30 if node.x % 2 else None):
        try:
            results.append(await next_one)
            await scene.step("completed", node.x)
        except (Boom, StepFailedError, TimeoutError) as error:
            results.append(error)
    return len(scene.note("as completed", results))


@tree(weight=2)
async def timeout(scene: Scene, node: Node) -> Any:
    try:
        async with asyncio.timeout(1 + node.x % 40):
            return scene.note("in time", await scene.run_in_turn(node))
    except TimeoutError:
        return await scene.step("timed_out", node.x)


@tree(weight=2)
async def wait_for(scene: Scene, node: Node) -> Any:
    try:
        return scene.note("waited", await asyncio.wait_for(scene.run(node.children[0]), node.x % 40))
    except TimeoutError:
        return scene.note("waited in vain")


@tree(weight=2)
async def spawn(scene: Scene, node: Node) -> Any:
    task = asyncio.create_task(scene.run(node.children[0]))
    for child in node.children[1:]:
        await scene.run(child)
    if node.x % 4 == 0:
        scene.kept.append(task)  # fire and forget
        return 0
    return scene.note("spawned", await task)


@tree()
async def spawn_and_cancel(scene: Scene, node: Node) -> Any:
    task, me = asyncio.create_task(scene.run(node.children[0])), asyncio.current_task()
    await scene.step("before", node.x)
    task.cancel("no longer needed")
    try:
        return scene.note("cancelled in vain", await task)
    except asyncio.CancelledError as error:
        scene.note("cancelled", error)
        if me is None or me.cancelling():
            raise
        return 0


@tree()
async def shield(scene: Scene, node: Node) -> Any:
    return scene.note("shield", await asyncio.shield(scene.run(node.children[0])))


@tree()
async def done_callback(scene: Scene, node: Node) -> Any:
    task = asyncio.ensure_future(scene.run(node.children[0]))
    task.add_done_callback(lambda _: scene.event.set())
    task.add_done_callback(lambda done: scene.note("called back", done.cancelled()))
    return await task


# Trees: taking turns


@tree()
async def lock(scene: Scene, node: Node) -> Any:
    async with scene.lock:
        return scene.note("locked", await scene.run_in_turn(node))


@tree()
async def semaphore(scene: Scene, node: Node) -> Any:
    async with scene.semaphore:
        return scene.note("in semaphore", await scene.run_in_turn(node))


@tree()
async def condition(scene: Scene, node: Node) -> Any:
    async with scene.condition:
        if node.x % 2:
            scene.condition.notify_all()
        else:
            await scene.condition.wait()
        return await scene.run(node.children[0])


@tree()
async def pipe(scene: Scene, node: Node) -> Any:
    queue: asyncio.Queue[Any] = asyncio.Queue(1)

    async def produce(child: Node) -> None:
        await queue.put(await scene.run(child))
        await queue.put("more")

    async def consume() -> list[Any]:
        return [(await queue.get(), await scene.step("use", i)) for i in range(2 * len(node.children))]

    consumed, *_ = await asyncio.gather(consume(), *map(produce, node.children))
    return scene.note("piped", consumed)


# Trees: ends and errors


@tree()
async def clean_up(scene: Scene, node: Node) -> Any:
    try:
        return await scene.run(node.children[0])
    finally:
        scene.note("cleaned up", await scene.step("clean_up", node.x))


@tree(weight=2)
async def compensate(scene: Scene, node: Node) -> Any:
    try:
        return await scene.run(node.children[0])
    except Exception as error:  # what compensating workflows do
        scene.note("compensates", error)
        return await scene.step("compensate", node.x)


@tree()
async def last_words(scene: Scene, node: Node) -> Any:
    try:
        return await scene.run(node.children[0])
    except BaseException:
        await scene.step("last_words", node.x)
        raise


@tree()
async def swallow_cancel(scene: Scene, node: Node) -> Any:
    try:
        return await scene.run(node.children[0])
    except asyncio.CancelledError as error:
        scene.note("swallows", error)
        return await scene.step("swallowed", node.x)


@tree()
async def uncancel(scene: Scene, node: Node) -> Any:
    task = asyncio.current_task()
    try:
        return await scene.run(node.children[0])
    except asyncio.CancelledError:
        return scene.note("uncancelled", task.uncancel() if task else 0)


@tree()
async def try_again(scene: Scene, node: Node) -> Any:
    for attempt in range(3):
        try:
            return await scene.run(node.children[0])
        except (Boom, StepFailedError) as error:
            scene.note("tries again", error)
            await asyncio.sleep(2**attempt)
    return -1


# Trees: what has an end of its own


@tree(weight=2)
async def generator(scene: Scene, node: Node) -> Any:
    async def generate() -> AsyncGenerator[Any, None]:
        try:
            for child in node.children:
                yield await scene.run(child)
        finally:
            scene.note("generated", await scene.step("generated", node.x))

    results = []
    async with aclosing(generate()) as values:
        async for value in values:
            results.append(value)
            if node.x % 2:
                break
    return results


@tree()
async def generator_left(scene: Scene, node: Node) -> Any:
    async def generate() -> AsyncGenerator[Any, None]:
        async with scene.lock if node.x % 2 else scene.semaphore:
            for child in node.children:
                yield await scene.run(child)

    async for value in generate():
        scene.note("left", value)
        break
    return node.x


@tree()
async def context_manager(scene: Scene, node: Node) -> Any:
    @asynccontextmanager
    async def room() -> AsyncIterator[Any]:
        entered = await scene.step("enter", node.x)
        try:
            yield entered
        finally:
            await scene.step("leave", node.x)

    async with room() as entered:
        return [entered, await scene.run(node.children[0])]


@tree()
async def context_variable(scene: Scene, node: Node) -> Any:
    token = SEAT.set(node.x)
    try:
        return await asyncio.gather(*scene.run_all(node))
    finally:
        SEAT.reset(token)
