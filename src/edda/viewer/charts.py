"""The structure of a workflow, overlaid with what a run did."""

from __future__ import annotations

import msgspec

from edda.control.structure import Structure
from edda.control.views import DefinitionView, Timeline
from edda.viewer.graph import Graph, draw


def draw_chart(definition: DefinitionView | None, timeline: Timeline, *, is_over: bool) -> Graph | None:
    """None if nobody has told what the code does, or in a way that this release does not know."""
    if definition is None or definition.structure is None:
        return None
    try:
        structure = msgspec.convert(definition.structure, Structure)
    except msgspec.ValidationError:
        return None
    return draw(structure, timeline.bars, is_over=is_over)
