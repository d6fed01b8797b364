"""`from edda.hooks import ...`: the public names for hooks."""

from edda.engine.hooks import HooksBase, WorkflowHooks

__all__ = ["HooksBase", "WorkflowHooks"]
