"""A workflow as its code says, in one JSON object: what it takes, what it does, what it is for."""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

from edda.core.schemas import input_schema
from edda.workflow.workflow import Workflow

from .parse import Structure, read_structure

logger = logging.getLogger(__name__)


def describe_workflow(workflow: Workflow[Any, Any]) -> bytes:
    """What cannot be described is null."""
    return msgspec.json.encode(
        {
            "schema": _try(workflow, lambda: input_schema(workflow.signature)),
            "structure": _try(workflow, lambda: _structure_of(workflow)),
            "documentation": (inspect.getdoc(workflow.fn) or "").partition("\n\n")[0].strip(),
        }
    )


_structures: WeakKeyDictionary[Callable[..., Any], Structure | None] = WeakKeyDictionary()
"""What was read, by the function of the workflow."""


def read_structures(workflows: Iterable[Workflow[Any, Any]]) -> None:
    """For processes whose event loop is not on the main thread: call it on the main thread before that one begins."""
    for workflow in workflows:
        _try(workflow, partial(_structure_of, workflow))


def _structure_of(workflow: Workflow[Any, Any]) -> Structure | None:
    """Read on the main thread only: up to CPython 3.11 `ast.parse` on two threads breaks both with a SystemError, and
    the user's own code may parse."""
    if workflow.fn not in _structures:
        if threading.current_thread() is not threading.main_thread():
            return None
        _structures[workflow.fn] = read_structure(workflow.fn)
    return _structures[workflow.fn]


def _try(workflow: Workflow[Any, Any], describe: Callable[[], Any]) -> Any:
    try:
        return describe()
    except Exception:  # classes of the user's have their own way of being looked at, and may refuse it
        logger.debug("workflow %s cannot be described", workflow.name, exc_info=True)
        return None
