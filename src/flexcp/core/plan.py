"""The plan of one global batch: which samples run together, on which ranks, in which order.

A plan is a frozen value. It is the only thing that passes from the planner to whoever executes,
simulates or draws it, and it travels as JSON.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal, cast, get_args

from flexcp.core.cluster import Cluster
from flexcp.core.errors import InputError, PlanError
from flexcp.core.layout import Layout, make_layout
from flexcp.core.sample import Sample

PLAN_SCHEMA = "flexcp.plan/2"

Mode = Literal["lockstep", "free-running"]
ExchangeKind = Literal["ring", "gather", "all-to-all"]
EXCHANGE_KINDS: tuple[ExchangeKind, ...] = get_args(ExchangeKind)


@dataclass(frozen=True, slots=True)
class Task:
    """One pack on its group.

    Attributes:
        samples: positions in `Plan.samples`.
        ranks: the group: global ranks in ring order; the degree is their number.
        wave: tasks of one wave run at the same time on disjoint groups; waves ascend along every rank. In
            lockstep a wave begins when the one before has ended on all ranks.
        start_s, end_s: predicted, in seconds from the start of the step.
        exchange: how the ranks meet in attention: keys and values go round (`ring`), all of them come at
            once (`gather`), or rows are swapped for heads (`all-to-all`). One rank meets nobody.
    """

    samples: tuple[int, ...]
    ranks: tuple[int, ...]
    wave: int
    start_s: float
    end_s: float
    exchange: ExchangeKind = "ring"

    @property
    def degree(self) -> int:
        """Ranks that share the pack."""
        return len(self.ranks)

    @property
    def duration_s(self) -> float:
        """Predicted run time."""
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Plan:
    """All tasks of one global batch.

    Attributes:
        policy: name of the policy that made it.
        mode: `lockstep` (all ranks pass every wave together) or `free-running` (a task starts when its
            own ranks are free; ranks meet only at the end of the step).
        cluster: what it was made for.
        whole_below_tokens: samples shorter than this are never cut (see `core.layout`).
        samples: the global batch, in the order of the data.
        tasks: in an order that every rank follows; sorted by wave.
        bound_s: seconds that no plan can beat under the same cost model if all groups use the exchange that
            the policy searches with (`flexcp`: rings); where this plan does, what none can beat by any.
    """

    policy: str
    mode: Mode
    cluster: Cluster
    whole_below_tokens: int
    samples: tuple[Sample, ...]
    tasks: tuple[Task, ...]
    bound_s: float

    @cached_property
    def step_s(self) -> float:
        """Makespan: predicted seconds from the first start to the last end."""
        return max((task.end_s for task in self.tasks), default=0.0)

    @property
    def gap(self) -> float:
        """Makespan over bound; 1.0 cannot be improved."""
        return self.step_s / self.bound_s

    @property
    def num_waves(self) -> int:
        """Number of waves."""
        return len({task.wave for task in self.tasks})

    @cached_property
    def waves(self) -> tuple[tuple[Task, ...], ...]:
        """Tasks grouped by wave, in order."""
        grouped: dict[int, list[Task]] = {}
        for task in self.tasks:
            grouped.setdefault(task.wave, []).append(task)
        return tuple(tuple(grouped[wave]) for wave in sorted(grouped))

    @cached_property
    def degrees(self) -> dict[int, int]:
        """Number of tasks per degree, ascending."""
        return dict(sorted(Counter(task.degree for task in self.tasks).items()))

    @cached_property
    def exchanges(self) -> dict[ExchangeKind, int]:
        """Number of tasks on several ranks per exchange."""
        return dict(sorted(Counter(task.exchange for task in self.tasks if task.degree > 1).items()))

    @property
    def idle_share(self) -> float:
        """Share of all rank-time in which no task runs."""
        if not self.tasks:
            return 0.0
        busy_s = sum(task.duration_s * task.degree for task in self.tasks)
        return max(0.0, 1.0 - busy_s / (self.step_s * self.cluster.ranks))  # sums round; -0.0 % puzzles

    @property
    def alone_s(self) -> float:
        """Duration of the longest task that holds a single sample; 0 where there is none."""
        return max((task.duration_s for task in self.tasks if len(task.samples) == 1), default=0.0)

    def tasks_of(self, rank: int) -> tuple[int, ...]:
        """Indices into `tasks` of what `rank` runs, in order."""
        return self._tasks_by_rank.get(rank, ())

    @cached_property
    def _tasks_by_rank(self) -> dict[int, tuple[int, ...]]:
        by_rank: dict[int, list[int]] = {}
        for index, task in enumerate(self.tasks):
            for rank in task.ranks:
                by_rank.setdefault(rank, []).append(index)
        return {rank: tuple(indices) for rank, indices in by_rank.items()}

    def pack(self, task: Task) -> tuple[Sample, ...]:
        """Samples of a task, in pack order."""
        return tuple(self.samples[index] for index in task.samples)

    def layout(self, task: Task) -> Layout:
        """Where every row of a task lies."""
        return make_layout(self.pack(task), task.degree, self.whole_below_tokens)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON; equal on all ranks, or the ranks must not start."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, no spaces, floats that read back to the same bits."""
        body = {
            "schema": PLAN_SCHEMA,
            "policy": self.policy,
            "mode": self.mode,
            "cluster": asdict(self.cluster),
            "whole_below_tokens": self.whole_below_tokens,
            "bound_s": self.bound_s,
            "samples": [sample_to_json(sample) for sample in self.samples],
            "tasks": [[t.samples, t.ranks, t.wave, t.start_s, t.end_s, t.exchange] for t in self.tasks],
        }
        return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what `to_json` wrote.

        Raises:
            PlanError: not JSON, another schema, or a missing or misshapen part.
        """
        try:
            body = json.loads(text)
            if body["schema"] != PLAN_SCHEMA:
                raise PlanError([f"schema is {body['schema']!r}, this version reads {PLAN_SCHEMA!r}"])
            return cls(
                policy=str(body["policy"]),
                mode=cast(Mode, body["mode"]),
                cluster=Cluster(**body["cluster"]),
                whole_below_tokens=int(body["whole_below_tokens"]),
                samples=tuple(sample_from_json(entry) for entry in body["samples"]),
                tasks=tuple(_task_from_json(entry) for entry in body["tasks"]),
                bound_s=float(body["bound_s"]),
            )
        except (LookupError, TypeError, ValueError, InputError) as error:
            raise PlanError([f"not a plan ({type(error).__name__}: {error})"]) from error


def sample_to_json(sample: Sample) -> list[Any]:
    """A sample as short as it can be: id, tokens, and what else it has."""
    more = [sample.spans, *([sample.encoder_pairs] if sample.encoder_pairs else [])]
    return [sample.id, sample.tokens, *(more if sample.spans or sample.encoder_pairs else [])]


def sample_from_json(entry: list[Any]) -> Sample:
    """What `sample_to_json` wrote."""
    spans = tuple((a, b) for a, b in entry[2]) if len(entry) > 2 else ()
    return Sample(entry[0], entry[1], spans, *entry[3:4])


def _task_from_json(entry: list[Any]) -> Task:
    samples, ranks, wave, start_s, end_s, exchange = entry
    return Task(tuple(samples), tuple(ranks), int(wave), float(start_s), float(end_s), exchange)
