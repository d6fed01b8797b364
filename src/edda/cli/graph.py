"""`edda graph`: the structure of a workflow, as its code says, drawn as a tree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import click

from edda.cli.target import Target, target_options
from edda.control.code_graph.parse import Node, NodeKind, Structure

from .output import Line, StyledText, as_json, line, show, show_json, single_line

_MARKS = {
    NodeKind.STEP: ("•", ""),
    NodeKind.TIMER: ("◷", "yellow"),
    NodeKind.EVENT: ("✉", "yellow"),
    NodeKind.MESSAGE: ("✉", "yellow"),
    NodeKind.CHILD: ("↳", "cyan"),
    NodeKind.UNDO: ("↶", "magenta"),
    NodeKind.BRANCH: ("◇", "cyan"),
    NodeKind.LOOP: ("↻", "cyan"),
    NodeKind.PARALLEL: ("∥", "cyan"),
    NodeKind.RACE: ("∥", "cyan"),
    NodeKind.RETURN: ("■", "green"),
    NodeKind.RAISE: ("✖", "red"),
    NodeKind.RECUR: ("↻", "green"),
}
_SAYS_ITSELF = frozenset({NodeKind.STEP, NodeKind.BRANCH, NodeKind.LOOP, NodeKind.ARM, NodeKind.TRY})
"""Kinds whose mark or text needs no word beside it."""


@click.command()
@target_options
@click.argument("workflow", metavar="WORKFLOW")
@as_json
def graph(target: Target, workflow: str, as_json: bool) -> None:
    """Draw what a workflow's code does, in its order."""
    definition = target.run(lambda controller: controller.get_definition(workflow))
    if as_json:
        show_json(definition.structure)
    elif definition.structure is None:
        raise click.ClickException(f"{workflow}: the worker that told of it had no source to read")
    else:
        structure = Structure.from_json(definition.structure)
        show(
            [
                line(
                    StyledText(single_line(structure.name), "bold"),
                    StyledText(f"  {single_line(structure.file)}:{structure.line}", "dim"),
                )
            ]
        )
        show(draw(structure.nodes))


def draw(nodes: Sequence[Node], indent: str = "") -> Iterator[Line]:
    for node in nodes:
        is_last = node is nodes[-1]
        yield line(StyledText(f"{indent}{'└─' if is_last else '├─'} ", "dim"), *_tell(node))
        yield from draw(node.children, f"{indent}{'   ' if is_last else '│  '}")


def _tell(node: Node) -> Iterator[StyledText]:
    mark, style = _MARKS.get(node.kind, ("", ""))
    words = [node.kind.value] if node.kind not in _SAYS_ITSELF else []
    words += [node.name] if node.name else []
    words += [node.text] if node.text else []
    yield StyledText(single_line(" ".join([mark, *words] if mark else words)) or "then", style)
    yield StyledText(f"  :{node.line}", "dim")
