"""Hooks, under the import path that existing programs use."""

from edda.engine.hooks import HooksBase, WorkflowHooks

__all__ = ["HooksBase", "WorkflowHooks"]
