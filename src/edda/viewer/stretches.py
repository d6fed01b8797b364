"""Parts of something long."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Window:
    """What is shown of something long."""

    first: int
    """So many come before it."""
    count: int
    total: int
    most: int

    @property
    def is_part(self) -> bool:
        return self.count < self.total

    @property
    def last(self) -> int:
        return self.first + self.count

    @property
    def links(self) -> tuple[tuple[str, int], ...]:
        """Where else one can look, by name: how many come before."""
        end = max(0, self.total - self.most)
        back = (("first", 0), ("earlier", max(0, self.first - self.most))) if self.first else ()
        return back + ((("later", self.last), ("last", end)) if self.last < self.total else ())
