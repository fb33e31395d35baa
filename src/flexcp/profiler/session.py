"""Arranges the tasks to measure under a budget of time, and fits what was measured."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version

import torch

from flexcp.core.model_shape import ModelShape
from flexcp.cost.calibration import Setup
from flexcp.cost.measurements import Measurement
from flexcp.cost.profiled import Profiled
from flexcp.profiler import alone
from flexcp.profiler.measure import Bench, Cell, device_name, growth_per_token, memory_bytes, of_all_ranks
from flexcp.runtime.collectives import all_gather_rows, broadcast_text, collective_device, is_out_of_memory
from flexcp.runtime.launch import World

# Called with (what is being done, share of the budget that is spent).
Progress = Callable[[str, float], None]

_SHORTEST_TOKENS = 32
_SAMPLES = (1, 4, 16)
_FEWEST_SAMPLE_TOKENS = 8
_SPANS_FROM_TOKENS = 512  # in shorter samples attention hardly shows
_FIRST_PASS_SHARE = 0.2  # of the budget: leaves time to repeat what the first pass reached
_FEWEST_ROUNDS, _MOST_ROUNDS = 3, 15


@dataclass(frozen=True, slots=True)
class Subject:
    """What is profiled, beside the module itself.

    Attributes:
        shape: of the model.
        checkpointing: layers are recomputed in the backward pass.
        element_bytes: bytes of an activation.
    """

    shape: ModelShape
    checkpointing: bool
    element_bytes: int


def profile(
    world: World,
    bench: Bench,
    subject: Subject,
    *,
    longest_tokens: int,
    budget_s: float,
    progress: Progress = lambda what, share: None,
) -> Profiled:
    """Measure and fit. All ranks call it, and all get the same answer.

    A first pass goes from short to long until a fifth of the budget or the memory is spent; the rest repeats
    what it reached, round after round, so that a slow spell of the machine touches every task alike. Medians
    count. A rank alone does the work of a member in groups of up to 8; links are not measured then.

    Args:
        world: this rank.
        bench: what runs a task.
        subject: what the tasks are of.
        longest_tokens: no sample is longer.
        budget_s: seconds to spend.
        progress: called on every rank before each task, and before each round of repetitions.

    Raises:
        InputError: a budget that is too short to tell the coefficients apart.
    """
    begun_s = time.monotonic()
    progress("links", 0.0)
    setup = _setup(world, bench, subject, longest_tokens)
    ranks = world.size if world.size > 1 else alone.RANKS
    clock = _Budget(begun_s, budget_s, progress)
    cells, per_token = _first_pass(bench, grid(ranks, longest_tokens), clock, world)
    packs = [cell.pack for cell in cells]
    rounds: list[list[float]] = []
    while len(rounds) < _MOST_ROUNDS and (len(rounds) < _FEWEST_ROUNDS or clock.left("repeating")):
        rounds.append([bench.seconds(pack) for pack in packs])
    times = of_all_ranks(list(zip(*rounds, strict=True)), bench.clock, collective_device())
    tasks = [Measurement(pack.load, pack.degree, took) for pack, took in zip(packs, times, strict=True)]
    return Profiled.of(tasks, replace(setup, memory_bytes_per_token=per_token))


def _setup(world: World, bench: Bench, subject: Subject, longest_tokens: int) -> Setup:
    """What is known before any task runs; the links are measured here."""
    shape = subject.shape
    longest_bytes = longest_tokens * 2 * shape.kv_heads * shape.head_dim * subject.element_bytes
    several_nodes = world.size > world.local_size
    return Setup(
        device=device_name(world.device),
        clock=bench.clock,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        versions={"flexcp": _version(), "torch": str(torch.__version__)},
        model=shape,
        checkpointing=subject.checkpointing,
        element_bytes=subject.element_bytes,
        link=bench.link(longest_bytes, across=world.local_size == 1) if world.size > 1 else None,
        memory_bytes=memory_bytes(world),
        inter_link=bench.link(longest_bytes, across=True) if several_nodes else None,
    )


def _version() -> str:
    try:
        return version("flexcp")
    except PackageNotFoundError:  # run from its sources
        return "sources"


def grid(ranks: int, longest_tokens: int) -> list[Cell]:
    """Tasks from short to long.

    Lengths double; one sample, 4 and 16; degrees 1 to 4 and half steps on. Then the same tokens with spans
    that attend both ways, in one sample on one rank and on all, and as whole samples in a group of two.

    >>> [cell.degree for cell in grid(ranks=12, longest_tokens=32) if cell.samples == 1]
    [1, 2, 3, 4, 6, 8, 12]
    >>> [(cell.samples, cell.spans, cell.whole) for cell in grid(2, 512)[-5:]]
    [(16, False, False), (16, False, False), (1, True, False), (1, True, False), (4, False, True)]
    """
    degrees = [d for d in range(1, ranks + 1) if d <= 4 or d == ranks or _is_half_step(d)]
    cells, tokens = [], _SHORTEST_TOKENS
    while tokens <= longest_tokens:
        samples = [count for count in _SAMPLES if tokens >= count * _FEWEST_SAMPLE_TOKENS]
        cells += [Cell(tokens, count, d) for count in samples for d in degrees]
        if tokens >= _SPANS_FROM_TOKENS:
            cells += [Cell(tokens, 1, d, spans=True) for d in (1, ranks)]
            cells.append(Cell(tokens, 4, 2, whole=True))
        tokens *= 2
    return cells


def _is_half_step(degree: int) -> bool:
    """A power of two, or three quarters of one."""
    odd = degree // (degree & -degree)
    return odd in (1, 3)


class _Budget:
    """Time that is left; rank 0 decides for all, or ranks would run different tasks."""

    def __init__(self, begun_s: float, budget_s: float, progress: Progress) -> None:
        self._begun_s, self._budget_s, self._progress = begun_s, budget_s, progress

    def left(self, what: str, share: float = 1.0) -> bool:
        """Whether less than a share of the budget is spent."""
        spent = (time.monotonic() - self._begun_s) / self._budget_s
        self._progress(what, min(1.0, spent))
        return broadcast_text("go" if spent < share else "stop", 0, "profiling") == "go"


def _first_pass(
    bench: Bench, cells: Sequence[Cell], clock: _Budget, world: World
) -> tuple[list[Cell], float | None]:
    """Warm up from short to long until the share of the budget, or the memory of a rank, is spent.

    Returns:
        The cells that ran, and by how many bytes the peak grew per token on the rank where it grew most.
    """
    reached: list[Cell] = []
    tokens: list[int] = []
    peaks: list[int] = []
    for cell in cells:
        if not clock.left("first pass", _FIRST_PASS_SHARE) and len({c.tokens for c in reached}) > 1:
            break
        if not _fits(bench, cell, world):
            break
        reached.append(cell)
        if cell == Cell(cell.tokens, 1, 1):
            tokens.append(cell.tokens)
            peaks.append(bench.peak_bytes())
    growth = torch.tensor(
        [growth_per_token(tokens, peaks) or 0.0], dtype=torch.float64, device=collective_device()
    )
    return reached, float(all_gather_rows(growth, "profiling").max()) or None


def _fits(bench: Bench, cell: Cell, world: World) -> bool:
    """Run a cell once; whether the memory of all ranks sufficed.

    Of each length the cell on one rank comes first. It takes the most memory, and no neighbour waits for it.
    """
    fits = True
    try:
        bench.seconds(cell.pack)
    except (MemoryError, RuntimeError) as error:
        if cell.degree > 1 or not is_out_of_memory(error):
            raise
        fits = False
    said = torch.tensor([fits], dtype=torch.float64, device=collective_device())
    return bool(all_gather_rows(said, "profiling").all())
