"""A workflow as its code says, in one JSON object: what it takes, what it does, what it is for."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import msgspec

from edda.core.schemas import input_schema
from edda.workflow.workflow import Workflow

from .structure import read_structure

logger = logging.getLogger(__name__)


def describe_workflow(workflow: Workflow[Any, Any]) -> bytes:
    """What cannot be described is null."""
    return msgspec.json.encode(
        {
            "schema": _try(workflow, lambda: input_schema(workflow.signature)),
            "structure": _try(workflow, lambda: read_structure(workflow.fn)),
            "documentation": (inspect.getdoc(workflow.fn) or "").partition("\n\n")[0].strip(),
        }
    )


def _try(workflow: Workflow[Any, Any], describe: Callable[[], Any]) -> Any:
    try:
        return describe()
    except Exception:  # classes of the user's have their own way of being looked at, and may refuse it
        logger.debug("workflow %s cannot be described", workflow.name, exc_info=True)
        return None
