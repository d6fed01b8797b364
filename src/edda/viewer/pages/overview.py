"""Pages of the whole: the overview, workers, workflows, the audit."""

from __future__ import annotations

from datetime import timedelta

from edda.control.controller import Controller
from edda.control.views import BucketView, RunSearch
from edda.core.states import WAITING, RunStatus
from edda.viewer.drawing.bars import layout_bars
from edda.viewer.request import PageRequest, Rendered, Reply

_LONG = timedelta(days=1)
"""A wait that lasts longer is worth a look."""
_FEW = 8
_PAGE = 50


async def show_overview(visit: PageRequest, control: Controller) -> Reply:
    stats = await control.get_stats()
    troubled = await control.list_runs(RunSearch(status=(RunStatus.FAILED, RunStatus.PARKED), limit=_FEW))
    patient = await control.list_runs(RunSearch(status=tuple(WAITING), until=stats.at - _LONG, limit=_FEW))
    recent = await control.list_runs(RunSearch(limit=_FEW))
    labels = [_label(bucket) for bucket in stats.buckets]
    ended = [("good", [b.completed for b in stats.buckets]), ("gone", [b.cancelled for b in stats.buckets])]
    return Rendered(
        "overview.html",
        {
            "stats": stats,
            "troubled": troubled.items,
            "patient": patient.items,
            "recent": recent.items,
            "started": layout_bars(labels, [("busy", [bucket.started for bucket in stats.buckets])]),
            "ended": layout_bars(labels, ended),
            "failed": layout_bars(labels, [("bad", [bucket.failed for bucket in stats.buckets])]),
        },
    )


def _label(bucket: BucketView) -> str:
    counts = f"{bucket.started} started, {bucket.completed} completed, {bucket.failed} failed"
    return f"{bucket.since:%H:%M}: {counts}, {bucket.cancelled} cancelled"


async def show_workers(visit: PageRequest, control: Controller) -> Reply:
    return Rendered("workers.html", {"workers": await control.list_workers()})


async def show_workflows(visit: PageRequest, control: Controller) -> Reply:
    return Rendered("workflows.html", {"definitions": await control.list_definitions()})


async def show_audit(visit: PageRequest, control: Controller) -> Reply:
    return Rendered("audit.html", {"page": await control.list_audits(visit.query.get("cursor"), _PAGE)})
