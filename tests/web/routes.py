"""Every path that is served, with a valid request for each, from the routing tables."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import quote, urlencode

from edda.control.controller import OPERATIONS, PREFIX, Controller, Operation
from edda.viewer import viewer
from edda.viewer.viewer import Viewer
from edda.web import WebApp, WebOptions
from tests.viewer.showcase import ShowcaseController

from .calls import EVENT, Reply, ask
from .fakes import FakeService

JSON, FORM = "application/json", "application/x-www-form-urlencoded"
RUN, NUMBER, WORKFLOW = "order-A-17", "1041", "order"


@dataclass(frozen=True)
class Route:
    name: str
    """Of the operation, or the method and the path."""
    method: str
    path: str
    query: bytes = b""
    body: bytes = b""
    media: str = JSON

    @property
    def is_page(self) -> bool:
        return self.media == FORM

    async def ask(self, web: WebApp, headers: dict[str, str], **changes: Any) -> Reply:
        given = EVENT | {"content-type": self.media} | headers
        asked = {"method": self.method, "path": self.path, "query": self.query, "body": self.body} | changes
        return await ask(web, headers=given, **asked)


BODIES: dict[str, dict[str, Any]] = {
    "start_run": {"workflow": WORKFLOW, "input": {"order_id": "A"}},
    "act_on_runs": {"action": "cancel", "ids": [RUN]},
    "send_event": {"type": "order.paid"},
    "publish_message": {"channel": "kitchen"},
    "retry_outbox": {"ids": ["out-0"]},
    "drop_outbox": {"every": True},
}
QUERIES = {
    "GET /runs/bulk": {"action": "cancel", "run": RUN},
    "GET /outbox/retry": {"event": "out-0"},
    "GET /outbox/drop": {"event": "out-0"},
}
FORMS = {
    "POST /runs/bulk": {"action": "cancel", "run": RUN},
    "POST /runs/*/answer": {"_step": "wait_event:1", "data.order_id": "A-17", "data.amount": "28.8"},
    "POST /start/*": {"data.order_id": "A", "data.customer.name": "Ada"},
    "POST /events/send": {"type": "parcel.lost", "data": "{}"},
    "POST /channels/publish": {"channel": "kitchen", "data": "{}"},
    "POST /outbox/retry": {"event": "out-0"},
    "POST /outbox/drop": {"event": "out-0"},
}
_THINGS = {"runs": RUN, "events": NUMBER, "start": WORKFLOW}


def _operation(operation: Operation[Any]) -> Route:
    thing = {"get_definition": WORKFLOW, "get_event": NUMBER, "resend_event": NUMBER}.get(operation.name, RUN)
    path = PREFIX + operation.address(*(thing,) * operation.path.count("{"))
    body = json.dumps(BODIES[operation.name]).encode() if operation.name in BODIES else b""
    return Route(operation.name, operation.method, path, body=body)


def _page(method: str, parts: tuple[str, ...]) -> Route:
    name = f"{method} /{'/'.join(parts)}"
    path = "/".join(("/_edda", *(quote(_THINGS[parts[0]]) if part == "*" else part for part in parts or ("",))))
    query, form = urlencode(QUERIES.get(name, {})), urlencode(FORMS.get(name, {}))
    return Route(name, method, path, query.encode(), form.encode(), FORM)


def _routes() -> Iterator[Route]:
    yield from map(_operation, OPERATIONS)
    yield from (_page("GET", parts) for parts in viewer.GET_ROUTES)
    yield from (_page("POST", parts) for parts in viewer.POST_ROUTES)
    yield from (Route(f"GET {path}", "GET", path) for path in ("/_edda/livez", "/_edda/readyz", "/_edda/metrics"))
    yield from (Route(f"GET {name}", "GET", f"{PREFIX}/{name}") for name in ("openapi.json", "stream"))
    yield Route("GET /login", "GET", "/_edda/login", media=FORM)
    yield Route("GET /static", "GET", "/_edda/static/page.css", media=FORM)
    yield Route("POST /events", "POST", "/events", body=b"{}")
    yield Route("POST /cancel", "POST", f"/cancel/{RUN}")


ROUTES = tuple(_routes())


class Spy:
    """A controller that records its calls."""

    def __init__(self) -> None:
        self._real = ShowcaseController()
        self.asked: list[str] = []
        self.error: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "with_caller":
            raise AttributeError(name)
        self.asked.append(name)
        return self._fail if self.error is not None and name != "watch" else getattr(self._real, name)

    async def _fail(self, *_: object) -> None:
        assert self.error is not None
        raise self.error


class World:
    """A server with all its parts, and the response to a request."""

    def __init__(self, **options: Any) -> None:
        self.service, self.spy = FakeService(), Spy()
        control = cast(Controller, self.spy)
        pages = Viewer(lambda caller: control)
        self.web = WebApp(self.service, WebOptions(**options), control=lambda: control, viewer=lambda: pages)

    def is_untouched(self) -> bool:
        return not (self.service.stored or self.service.cancelled or self.spy.asked)
