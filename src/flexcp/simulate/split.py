"""Where the time of all ranks went."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields


@dataclass(frozen=True, slots=True)
class RankTime:
    """Rank-seconds by what they were spent on; together all ranks times the length of the step.

    Attributes:
        compute_s: computation as the cost model says.
        messages_s: messages that no computation hides, on links that nobody shares.
        sharing_s: what sharing links or cores adds to tasks.
        pace_s: what slow ranks and jitter add to tasks; what fast ranks save is taken off.
        idle_s: no task to run before the last task of the step ends.
        gather_s: collectives of waves that no task hides.
        reduce_s: gradient reduction after that.
        optimizer_s: optimizer step.
        wait_s: waiting for a plan or for data at the opening of the step.
    """

    compute_s: float = 0.0
    messages_s: float = 0.0
    sharing_s: float = 0.0
    pace_s: float = 0.0
    idle_s: float = 0.0
    gather_s: float = 0.0
    reduce_s: float = 0.0
    optimizer_s: float = 0.0
    wait_s: float = 0.0

    def __add__(self, other: RankTime) -> RankTime:
        return RankTime(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def total_s(self) -> float:
        """All of it."""
        return float(sum(astuple(self)))

    @property
    def shares(self) -> dict[str, float]:
        """Share of each part in the whole, by the name of the part."""
        total_s = self.total_s
        return {f.name.removesuffix("_s"): getattr(self, f.name) / total_s for f in fields(self)}
