"""What a page shows, whatever it was read from: values of numbers and names, nothing drawn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from flexcp.core.cluster import Cluster
from flexcp.core.errors import InputError
from flexcp.core.plan import Mode, Plan, Task
from flexcp.core.sample import Sample
from flexcp.planner.outcome import Outcome
from flexcp.report.advice import Figures

Origin = Literal["planned", "measured", "simulated"]


@dataclass(frozen=True, slots=True)
class Box:
    """One task on its ranks.

    Attributes:
        key: the same for one task in both panels.
        degree: ranks that share it; `ranks` may be fewer, where not all ranks were read.
        pack: its samples.
        start_s, end_s: from the start of the step.
        by_rank: (start, end) of each rank, where every rank has its own.
    """

    key: int
    degree: int
    ranks: tuple[int, ...]
    pack: tuple[Sample, ...]
    start_s: float
    end_s: float
    wave: int = 0
    by_rank: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    ring_wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Mark:
    """What a rank did besides tasks: reduction, optimizer."""

    rank: int
    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Panel:
    """Ranks × time, once."""

    name: str
    boxes: tuple[Box, ...]
    marks: tuple[Mark, ...] = ()

    @property
    def end_s(self) -> float:
        """When the last task ends."""
        return max((box.end_s for box in self.boxes), default=0.0)


@dataclass(frozen=True, slots=True)
class Timeline:
    """One step: what is compared, on one axis of time.

    Attributes:
        step: its index.
        panels: the same tasks, or those of two policies.
        bound_s: of the first panel.
        cluster: what the step ran on, which another step may not have.
        plans: the panels as plans, for drawings of plans; none where not all ranks were read.
    """

    step: int
    panels: tuple[Panel, ...]
    bound_s: float
    cluster: Cluster
    plans: tuple[Plan, ...] = ()


@dataclass(frozen=True, slots=True)
class Curve:
    """One value a step."""

    name: str
    values: tuple[float, ...]
    style: str


@dataclass(frozen=True, slots=True)
class Lengths:
    """Samples by length: bin k holds lengths from edges[k] to below edges[k + 1]."""

    edges: tuple[int, ...]
    samples: tuple[float, ...]
    tokens: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class DegreeShare:
    """What one degree has of a run: number of tasks, and seconds summed over all its ranks."""

    degree: int
    tasks: int
    rank_s: float


@dataclass(frozen=True, slots=True)
class TokensHeld:
    """The most tokens that each rank held at a time, against what it may hold."""

    ranks: tuple[int, ...]
    peak_tokens: tuple[int, ...]
    capacity_tokens: int


@dataclass(frozen=True, slots=True)
class Beside:
    """Another run beside the one of the page.

    Attributes:
        title: what it is called.
        verdict: what it is to this one.
        rows: name, value here, value there, change.
        steps, curves: those that both have, and seconds of the whole step of each.
    """

    title: str
    verdict: str
    rows: tuple[tuple[str, str, str, str], ...]
    steps: tuple[int, ...]
    curves: tuple[Curve, ...]


@dataclass(frozen=True, slots=True)
class Subject:
    """Everything on one page.

    Attributes:
        title, subtitle: what it is called, and what ran on what.
        good: whether the verdict calls for nothing.
        facts: name and value, short.
        focus: the step whose timeline shows first.
        curves: seconds a step; `gaps`: ratios a step; both over `steps`.
        pairs: predicted and measured seconds of each task of the timelines, with a word on it.
        parts: share of the time of a step by what it went to; none of a plan.
        figures: what all that is said of a run is taken from; none of a plan.
        beside: another run, where one was given.
    """

    title: str
    subtitle: str
    origin: Origin
    verdict: str
    advice: tuple[str, ...]
    good: bool
    facts: tuple[tuple[str, str], ...]
    notices: tuple[str, ...]
    steps: tuple[int, ...]
    focus: int
    curves: tuple[Curve, ...]
    gaps: tuple[Curve, ...]
    timelines: tuple[Timeline, ...]
    lengths: Lengths
    degrees: tuple[DegreeShare, ...]
    memory: TokensHeld
    policies: tuple[Outcome, ...]
    baseline: str
    policy: str
    pairs: tuple[tuple[float, float, str], ...] = ()
    parts: Mapping[str, float] = field(default_factory=dict)
    figures: Figures | None = None
    beside: Beside | None = None


def no_such_step(step: int, steps: Sequence[int]) -> InputError:
    """A step was asked for that is not there."""
    return InputError(f"there is no step {step}", f"The steps are {min(steps)} to {max(steps)}.")


def plans_of(subject: Subject, step: int | None) -> tuple[Plan, ...]:
    """The panels of one timeline as plans; none where not all ranks were read.

    Raises:
        InputError: there is no timeline of that step.
    """
    known = {timeline.step: timeline for timeline in subject.timelines}
    if not known:
        return ()
    chosen = (subject.focus if subject.focus in known else min(known)) if step is None else step
    if chosen not in known:
        raise no_such_step(chosen, subject.steps)
    return known[chosen].plans


def plan_of(panel: Panel, bound_s: float, *, mode: Mode, cluster: Cluster, whole_below_tokens: int) -> Plan:
    """A panel as a plan, by its name; a measured task starts when its last rank has come."""
    samples: list[Sample] = []
    tasks = []
    for box in sorted(panel.boxes, key=lambda box: (box.wave, box.start_s, box.ranks)):
        first = len(samples)
        samples.extend(box.pack)
        tasks.append(Task(tuple(range(first, len(samples))), box.ranks, box.wave, box.start_s, box.end_s))
    return Plan(panel.name, mode, cluster, whole_below_tokens, tuple(samples), tuple(tasks), bound_s)


class LengthCounter:
    """Counts lengths in bins of powers of two, so that a million samples need as much room as ten."""

    def __init__(self) -> None:
        self._samples: dict[int, float] = {}
        self._tokens: dict[int, float] = {}

    def add(self, lengths: Iterable[int], weight: float = 1.0) -> None:
        """Count some lengths, each `weight` times."""
        for length in lengths:
            bin_ = int(length).bit_length() - 1
            self._samples[bin_] = self._samples.get(bin_, 0.0) + weight
            self._tokens[bin_] = self._tokens.get(bin_, 0.0) + weight * length

    def counted(self) -> Lengths:
        """All bins from the shortest to the longest."""
        bins = range(min(self._samples, default=0), max(self._samples, default=0) + 1)
        return Lengths(
            edges=tuple(2**k for k in (*bins, bins.stop)),
            samples=tuple(self._samples.get(k, 0.0) for k in bins),
            tokens=tuple(self._tokens.get(k, 0.0) for k in bins),
        )


def spread(count: int, most: int) -> tuple[int, ...]:
    """At most `most` of the indices below `count`, evenly spaced, the first and the last among them.

    >>> spread(5, 9), spread(9, 3)
    ((0, 1, 2, 3, 4), (0, 4, 8))
    """
    if count <= most:
        return tuple(range(count))
    return tuple(np.linspace(0, count - 1, most).round().astype(int).tolist())


def choose_steps(times_s: Sequence[float], most: int, also: int | None = None) -> tuple[int, ...]:
    """Positions of the steps worth a timeline: `also`, the first, last, slowest and median; then evenly.

    >>> choose_steps([3.0, 1.0, 9.0, 2.0, 2.5, 2.6], 4)
    (0, 2, 4, 5)
    """
    count = len(times_s)
    order = sorted(range(count), key=lambda index: times_s[index])
    wanted = [0, count - 1, order[-1], order[(count - 1) // 2], *spread(count, most)]
    first = [also] if also is not None else []
    return tuple(sorted(list(dict.fromkeys([*first, *wanted]))[:most]))
