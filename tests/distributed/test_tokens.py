"""Token by token: what a cut, a pack, a mask, recomputation or low precision may not change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flexcp.core.cluster import Cluster
from flexcp.core.plan import Plan, Task
from flexcp.core.sample import Sample
from tests.harness import run_ranks
from tests.models import ListDataset, reference_step, relative_error, tiny_model

BF16_BAND = 1.25  # times the error of one plain process in bf16: other sums round another way
PACKS = ([37, 12, 61, 5, 1, 90], [23], [2, 1, 3], [44, 71])  # longer and shorter than twice the degree
Grads = dict[str, Tensor]


class FixedPlanner:
    """Every task as given: (samples, ranks), one after the other."""

    def __init__(self, ranks: int, *tasks: tuple[Sequence[int], Sequence[int]], whole_below: int = 0) -> None:
        self.cluster = Cluster(ranks, 10**6)
        self._whole_below = whole_below
        self._tasks = tuple(
            Task(tuple(pack), tuple(group), wave, float(wave), wave + 1.0)
            for wave, (pack, group) in enumerate(tasks)
        )

    def __repr__(self) -> str:  # the engine compares planners across ranks
        return f"FixedPlanner({self.cluster}, {self._whole_below}, {self._tasks})"

    def __call__(self, samples: Sequence[Sample]) -> Plan:
        order = sorted(range(len(samples)), key=lambda position: samples[position].id)
        tasks = tuple(
            Task(tuple(order[i] for i in t.samples), t.ranks, t.wave, t.start_s, t.end_s) for t in self._tasks
        )
        return Plan("fixed", "lockstep", self.cluster, self._whole_below, tuple(samples), tasks, 1.0)


class FirstEighth(ListDataset):
    """One sequence whose labels lie only in its first eighth: with four ranks, all on rank 0."""

    def __init__(self) -> None:
        super().__init__([160], unlabelled=())
        self._examples[0]["labels"][20:] = -100


class FullyLabelled(ListDataset):
    """Every token is a target, so that every cut has one on its far side."""

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__(lengths)
        for example in self._examples:
            example["labels"] = example["input_ids"]


def start_step(model: Any, planner: Any, dataset: Any) -> tuple[Any, Any]:
    """An engine over the whole data set, and its first step."""
    from flexcp.runtime.engine import Engine

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine = Engine(model, optimizer, planner, dataset, global_batch=len(dataset), steps=1)
    return engine, next(iter(engine))


def one_step(
    model: Any, planner: Any, dataset: Any, cast: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> tuple[float, int, Grads]:
    """This rank's share of the loss, its own supervised tokens, and every full gradient of the step."""
    engine, step = start_step(model, planner, dataset)
    supervised = 0
    for micro in step:
        with cast():
            output = model(**micro.inputs)
        step.backward(output, micro)
        supervised += micro.supervised_tokens
    step.reduce_gradients()
    grads = {}
    for name, parameter in model.named_parameters():
        full = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        grads[name.removeprefix("module.")] = full.float().clone()
    model.zero_grad()
    engine.close()
    return float(step.loss_sum) / step.supervised_tokens, supervised, grads


def assert_as_one_process(by_rank: Sequence[tuple[float, int, Grads]], dataset: Any, band: float) -> None:
    """Hold the loss, and every gradient on every rank, against one process."""
    model = tiny_model()
    expected_loss = reference_step(model, dataset, range(len(dataset)))
    assert sum(share for share, _, _ in by_rank) == pytest.approx(expected_loss, rel=band)
    for rank, (_, _, grads) in enumerate(by_rank):
        for name, parameter in model.named_parameters():
            error = relative_error(grads[name], parameter.grad)
            assert error <= band, f"rank {rank}, {name}: {error:.1e}"


def steps_in_fp32(world: Any) -> dict[str, Any]:
    """On four ranks: labels on one rank only, recomputed activations, and ranks 1 and 3 without any task."""
    from flexcp.integrations.transformers import blocks_of, enable
    from flexcp.runtime.sharding import shard

    found: dict[str, Any] = {}
    model = tiny_model()
    with enable(model):
        found["first eighth"] = one_step(model, FixedPlanner(4, ([0], [0, 1, 2, 3])), FirstEighth())
    model = tiny_model()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model = shard(model, "fsdp2", blocks=blocks_of(model))
    planner = FixedPlanner(4, ([0, 1, 2], [3, 0, 1]), ([3, 4], [2]), ([5], [1, 2]))
    with enable(model):
        found["checkpointing"] = one_step(model, planner, ListDataset(PACKS[0]))
    for kind in ("ddp", "fsdp2"):
        model = tiny_model()
        model = shard(model, kind, blocks=blocks_of(model))
        with enable(model):
            idle = FixedPlanner(4, (range(6), [2, 0]))
            found[f"idle, {kind}"] = one_step(model, idle, ListDataset(PACKS[0]))
    return found


def test_masked_ranks_recomputation_and_idle_ranks() -> None:
    """D01: three of four ranks have nothing to learn from. D30: two have no task in the whole step.

    And the ring runs again inside backward when activations are recomputed.
    """
    by_rank = run_ranks(steps_in_fp32, 4, deadline_s=110)

    masked = [found["first eighth"] for found in by_rank]
    assert [supervised for _, supervised, _ in masked] == [19, 0, 0, 0]
    assert [share > 0 for share, _, _ in masked] == [True, False, False, False]
    assert_as_one_process(masked, FirstEighth(), 1e-5)
    for name in ("checkpointing", "idle, ddp", "idle, fsdp2"):
        assert_as_one_process([found[name] for found in by_rank], ListDataset(PACKS[0]), 1e-5)
    assert [by_rank[rank]["idle, ddp"][:2] for rank in (1, 3)] == [(0.0, 0), (0.0, 0)]


def log_probabilities(logits: Tensor, targets: Tensor) -> Tensor:
    """Of each target under the logits of its row; rows without a target give 0."""
    return -F.cross_entropy(logits.float(), targets, ignore_index=-100, reduction="none")


def scored_rows(model: Any, dataset: Any, planner: Any) -> list[tuple[int, int, int, float, bool]]:
    """(sample, position, target, log-probability, last of its piece) of every row on this rank."""
    engine, step = start_step(model, planner, dataset)
    rows = []
    for micro in step:
        with torch.no_grad():
            logits = model(**micro.inputs).logits[0]
        scores = log_probabilities(logits, micro.labels).tolist()
        targets = micro.labels.tolist()
        context = micro.inputs["flexcp"]
        at = 0
        for piece in context.layout.pieces(context.exchange.member):
            for row in range(piece.start, piece.stop):
                sample = micro.sample_ids[piece.index]
                rows.append((sample, row, targets[at], scores[at], row == piece.stop - 1))
                at += 1
    engine.close()
    return rows


def score_everything(world: Any) -> dict[str, Any]:
    """All that a model says without learning, from one start of three ranks; rings start at any rank."""
    from flexcp.integrations.transformers import enable

    model = tiny_model()
    found: dict[str, Any] = {"rows": {}}
    with enable(model):
        for index, lengths in enumerate(PACKS):
            for degree in (2, 3):
                group = [2, 0, 1][:degree]
                planner = FixedPlanner(3, (range(len(lengths)), group), whole_below=6 * (index % 2))
                dataset = FullyLabelled(lengths)
                found["rows"][index, degree] = scored_rows(model, dataset, planner)
        everything = range(len(PACKS[0]))
        found["packed"] = task_losses(model, FixedPlanner(3, (everything, [1, 2, 0])))
        found["single"] = task_losses(model, FixedPlanner(3, *(([i], [0, 2, 1]) for i in everything)))
        found["quiet"], found["noisy"] = (logits_beside(model, seed) for seed in (1, 2))
    return found


def task_losses(model: Any, planner: Any) -> list[tuple[float, int]]:
    """Sum of the token losses and supervised tokens of every task, this rank's share."""
    engine, step = start_step(model, planner, ListDataset(PACKS[0]))
    shares = []
    for micro in step:
        before = float(step.loss_sum)
        step.backward(model(**micro.inputs), micro)
        shares.append((float(step.loss_sum) - before, micro.supervised_tokens))
    model.zero_grad()
    engine.close()
    return shares


def logits_beside(model: Any, noise: int) -> tuple[Tensor, Tensor]:
    """This rank's logits of sample 0, whose tokens are noise, and of sample 1, which stays the same."""
    dataset = ListDataset([41, 30])
    generator = torch.Generator().manual_seed(noise)
    dataset[0]["input_ids"][:] = torch.randint(0, 97, (41,), generator=generator).numpy()
    engine, step = start_step(model, FixedPlanner(3, ([0, 1], [0, 1, 2])), dataset)
    (micro,) = step
    with torch.no_grad():
        logits = model(**micro.inputs).logits[0]
    pieces = micro.inputs["flexcp"].layout.pieces(engine.rank)  # the ring is [0, 1, 2]
    first = sum(piece.rows for piece in pieces if piece.index == 0)
    engine.close()
    return logits[:first], logits[first:]


@pytest.fixture(scope="module")
def scores() -> list[dict[str, Any]]:
    """By rank."""
    return run_ranks(score_everything, 3, deadline_s=110)


def test_log_probabilities_of_every_token(scores: list[dict[str, Any]]) -> None:
    """D04: the target and the log-probability of one process, for every row; D24: also of tiny packs."""
    for index, lengths in enumerate(PACKS):
        expected = expected_rows(lengths)
        for degree in (2, 3):
            rows = [row for found in scores for row in found["rows"][index, degree]]
            assert sorted(row[:2] for row in rows) == sorted(expected)
            for sample, position, target, score, _ in rows:
                where = f"pack {index}, degree {degree}, sample {sample}, row {position}"
                assert target == expected[sample, position][0], where
                assert score == pytest.approx(expected[sample, position][1], rel=1e-5, abs=1e-5), where


def test_log_probabilities_at_the_cuts(scores: list[dict[str, Any]]) -> None:
    """D04: the last row of every piece has its target on another rank."""
    for index, lengths in enumerate(PACKS):
        expected = expected_rows(lengths)
        for degree in (2, 3):
            rows = [row for found in scores for row in found["rows"][index, degree]]
            last = {row[:2]: row[2:4] for row in rows if row[4] and row[1] < lengths[row[0]] - 1}
            assert len(last) >= (0 if max(lengths) < 6 else degree)
            for where, (target, score) in last.items():
                assert target == expected[where][0] != -100
                assert score == pytest.approx(expected[where][1], rel=1e-5, abs=1e-5), where


def expected_rows(lengths: Sequence[int]) -> dict[tuple[int, int], tuple[int, float]]:
    """Target and log-probability of every row, sample by sample, by plain transformers."""
    model, dataset, expected = tiny_model(), FullyLabelled(lengths), {}
    for sample, length in enumerate(lengths):
        ids, labels = (torch.as_tensor(dataset[sample][key]) for key in ("input_ids", "labels"))
        targets = torch.cat([labels[1:], torch.tensor([-100])])
        with torch.no_grad():
            found = log_probabilities(model(input_ids=ids[None]).logits[0], targets)
        expected.update({(sample, i): (int(targets[i]), float(found[i])) for i in range(length)})
    return expected


def test_a_packed_loss_is_the_token_weighted_mean_of_single_losses(scores: list[dict[str, Any]]) -> None:
    """D08, D11: not the mean of means, and nothing is counted twice."""
    (packed_sum,), (packed_count,) = total_over_ranks(found["packed"] for found in scores)
    sums, counts = total_over_ranks(found["single"] for found in scores)
    means = [loss / count for loss, count in zip(sums, counts, strict=True) if count]

    assert counts.count(0) >= 2  # one sample without labels, one of a single token
    assert packed_count == sum(counts)
    weighted = sum(mean * count for mean, count in zip(means, filter(None, counts), strict=True))
    assert packed_sum / packed_count == pytest.approx(weighted / sum(counts), rel=1e-6)
    assert packed_sum / packed_count != pytest.approx(sum(means) / len(means), rel=1e-4)


def total_over_ranks(shares: Iterable[list[tuple[float, int]]]) -> tuple[list[float], list[int]]:
    """Losses and counts of every task, added up over ranks."""
    by_task = list(zip(*shares, strict=True))
    return [sum(loss for loss, _ in task) for task in by_task], [sum(n for _, n in task) for task in by_task]


def test_noise_in_one_sample_does_not_reach_the_next(scores: list[dict[str, Any]]) -> None:
    """D10, D12: to the last bit."""
    for found in scores:
        (first, second), (noisy, beside_noise) = found["quiet"], found["noisy"]
        assert len(second) >= 9
        assert not torch.equal(first, noisy)
        assert torch.equal(second, beside_noise)


def steps_in_bf16(world: Any) -> list[tuple[float, int, Grads]]:
    """Compute copies of FSDP2 in bf16, and fp32 weights of DDP under autocast."""
    from flexcp.integrations.transformers import blocks_of, enable
    from flexcp.runtime.sharding import shard

    found = []
    planner = FixedPlanner(3, ([0, 1, 2], [2, 0, 1]), ([3, 4], [1]), ([5], [0, 2]))
    for kind in ("fsdp2", "ddp"):
        model = tiny_model()
        dtype = torch.bfloat16 if kind == "fsdp2" else None
        model = shard(model, kind, blocks=blocks_of(model), param_dtype=dtype)
        with enable(model):
            cast = partial(torch.autocast, "cpu", torch.bfloat16) if kind == "ddp" else nullcontext
            found.append(one_step(model, planner, ListDataset(PACKS[0]), cast))
        assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    return found


def worst_of_one_process_in_bf16(kind: str) -> float:
    """The largest error of a gradient against fp32: weights in bf16, or autocast over fp32 weights."""
    data, exact, narrow = ListDataset(PACKS[0]), tiny_model(), tiny_model()
    reference_step(exact, data, range(len(data)))
    if kind == "fsdp2":
        narrow = narrow.to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "ddp"):
        reference_step(narrow, data, range(len(data)))
    pairs = zip(narrow.parameters(), exact.parameters(), strict=True)
    return max(relative_error(mine.grad.float(), right.grad) for mine, right in pairs)


def test_bf16_stays_within_its_band() -> None:
    """D39: against fp32 in one process, no further off than one process in bf16 is."""
    by_rank = run_ranks(steps_in_bf16, 3, deadline_s=110)

    for number, kind in enumerate(("fsdp2", "ddp")):
        band = BF16_BAND * worst_of_one_process_in_bf16(kind)
        assert band < 0.05
        assert_as_one_process([found[number] for found in by_rank], ListDataset(PACKS[0]), band)


class TwoHalves(nn.Module):
    """One FSDP2 unit of two weights, of which a call uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 4, bias=False), nn.Linear(8, 4, bias=False)

    def forward(self, rows: Tensor, half: str) -> Tensor:
        return (getattr(self, half)(rows) ** 2).sum()


def halves_of(rank: int) -> list[tuple[Tensor, str]]:
    """Two tasks with one half; a third rank has none."""
    generator = torch.Generator().manual_seed(rank)
    half = ("left", "right", "")[rank]
    return [(torch.randn(3, 8, generator=generator), half) for _ in range(2)] if half else []


def halves_in_bf16(world: Any) -> Grads:
    """Every gradient of one step by FSDP2 with compute copies in bf16."""
    from flexcp.runtime.sharding import shard, sharding_of

    torch.manual_seed(0)
    model = shard(TwoHalves(), "fsdp2", blocks=(), param_dtype=torch.bfloat16)
    sharding = sharding_of(model)
    sharding.begin()
    for rows, half in halves_of(world.rank):
        loss = model(rows, half)
        sharding.before_backward()
        loss.backward()
    sharding.reduce()
    return {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}


def test_a_unit_that_ranks_use_in_part_is_summed_in_bf16() -> None:
    """D34: what a rank used has been gathered in fp32, the zeros of the rest must be brought there too."""
    torch.manual_seed(0)
    model = TwoHalves()
    for rows, half in halves_of(0) + halves_of(1):
        model(rows, half).backward()

    for grads in run_ranks(halves_in_bf16, 3):
        for name, parameter in model.named_parameters():
            assert relative_error(grads[name], parameter.grad) < 0.02, name
