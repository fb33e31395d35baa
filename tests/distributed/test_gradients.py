"""The rule of the project: a step's gradient is that of its samples run one by one on one rank."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from flexcp.core.cluster import Cluster
from flexcp.core.layout import heads_divide
from flexcp.core.plan import EXCHANGE_KINDS, ExchangeKind, Plan, Task
from flexcp.core.sample import Sample
from tests.harness import run_ranks
from tests.models import FAMILIES, ListDataset, reference_step, relative_error, tiny_model

HEADS, KV_HEADS = 4, 2  # of the tiny models
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
LENGTHS = [37, 12, 61, 5, 1, 90, 23, 2, 44, 71, 3, 128, 17, 29, 8, 53]


class RandomPlanner:
    """Any legal plan: packs of 1 to 3 samples, degrees 1 to N, permuted and non-adjacent ranks, idle ranks.

    Degrees exceed what memory needs, and packs shorter than 2d occur, on purpose: whatever a planner may
    come up with must come out right. Groups meet by any exchange that heads allow, or by one.
    """

    def __init__(self, ranks: int, seed: int, whole_below_tokens: int, exchange: str = "any") -> None:
        self._exchange = exchange
        self.cluster = Cluster(ranks, 10**6)
        self._random = random.Random(seed)
        self._whole_below = whole_below_tokens

    def __call__(self, samples: Sequence[Sample]) -> Plan:
        chance, ranks = self._random, self.cluster.ranks
        left = list(range(len(samples)))
        chance.shuffle(left)
        tasks: list[Task] = []
        wave = 0
        while left:
            free = list(range(ranks))
            chance.shuffle(free)
            while free and left and (len(free) == ranks or chance.random() < 0.8):
                degree = chance.randint(1, len(free))
                group, free = free[:degree], free[degree:]
                size = min(len(left), chance.randint(1, 3))
                pack, left = left[:size], left[size:]
                task = Task(tuple(pack), tuple(group), wave, float(wave), wave + 1.0, self._meet(degree))
                tasks.append(task)
            wave += 1
        return Plan(
            "random", "lockstep", self.cluster, self._whole_below, tuple(samples), tuple(tasks), bound_s=1.0
        )

    def _meet(self, degree: int) -> ExchangeKind:
        """By the exchange asked for; all-to-all only where the heads of the tiny models allow it."""
        kinds = [kind for kind in EXCHANGE_KINDS if self._exchange in (kind, "any")]
        if not heads_divide(HEADS, KV_HEADS, degree):
            kinds = [kind for kind in kinds if kind != "all-to-all"]
        return self._random.choice(kinds or ["ring"])


def one_step(
    model: Any, planner: Any, lengths: Sequence[int] = tuple(LENGTHS), forward: Any = None
) -> tuple[float, dict[str, torch.Tensor], set[Any]]:
    """One step over all samples: this rank's share of the loss, every full gradient, how groups met."""
    from flexcp.runtime.engine import Engine

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine = Engine(model, optimizer, planner, ListDataset(lengths), global_batch=len(lengths), steps=1)
    step = next(iter(engine))
    for micro in step:
        step.backward((forward or model)(**micro.inputs), micro)
    step.reduce_gradients()
    grads = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        full = grad.full_tensor() if isinstance(grad, DTensor) else grad
        grads[name.removeprefix("module.")] = full.clone()
    model.zero_grad()
    engine.close()
    return (
        float(step.loss_sum) / step.supervised_tokens,
        grads,
        {(task.exchange, task.degree) for task in step.plan.tasks},
    )


def steps_of_many_plans(
    world: Any,
    kinds: Sequence[str],
    families: Sequence[str],
    dtype: torch.dtype,
    seeds: Sequence[int],
    whole: int,
    exchange: str,
) -> list[Any]:
    """One step for every way to hold parameters and every seed, each seed another plan."""
    from flexcp.integrations.transformers import blocks_of, enable
    from flexcp.runtime.sharding import shard

    results = []
    for family, kind in product(families, kinds):
        model: Any = tiny_model(family, dtype)
        if kind != "plain":
            model = shard(model, kind, blocks=blocks_of(model))
        with enable(model):
            results += [one_step(model, RandomPlanner(world.size, seed, whole, exchange)) for seed in seeds]
    return results


def reference(
    family: str,
    dtype: torch.dtype = torch.float32,
    layers: int = 2,
    lengths: Sequence[int] = tuple(LENGTHS),
) -> tuple[float, dict[str, Any]]:
    """Loss and gradients of one process, sample by sample.

    Attention is by definition, not by a kernel that may drop an option; in fp64, which that does not keep,
    the families have none.
    """
    model = tiny_model(family, dtype, layers)
    if dtype == torch.float32:
        model.set_attn_implementation("eager")
    loss = reference_step(model, ListDataset(lengths), range(len(lengths)))
    return loss, {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_as_one_process(
    kinds: Sequence[str],
    nproc: int,
    seeds: Sequence[int],
    families: Sequence[str],
    dtype: torch.dtype,
    whole: int,
    exchange: str = "any",
) -> set[tuple[str, int]]:
    """Hold loss and every gradient, of every plan, on every rank; returns the exchanges and degrees."""
    budget_s = 60.0 + 4.0 * len(seeds) * len(families)
    arguments = (kinds, families, dtype, seeds, whole, exchange)
    by_rank = run_ranks(steps_of_many_plans, nproc, *arguments, deadline_s=budget_s)
    met: set[tuple[str, int]] = set()
    references = {family: reference(family, dtype) for family in families}
    for i, (family, kind, seed) in enumerate(product(families, kinds, seeds)):
        what = f"{family}, {kind}, plan {seed}"
        expected_loss, expected = references[family]
        loss = sum(results[i][0] for results in by_rank)
        assert loss == pytest.approx(expected_loss, rel=TOLERANCE[dtype]), what
        for rank, results in enumerate(by_rank):
            assert results[i][1].keys() == expected.keys()
            for name, grad in results[i][1].items():
                error = relative_error(grad, expected[name])
                assert error <= TOLERANCE[dtype], f"{what}, rank {rank}, {name}: {error:.1e}"
        met |= by_rank[0][i][2]
    return met


@pytest.mark.parametrize("nproc", [3, 4])
def test_gradients_equal_one_process(nproc: int) -> None:
    """D02, D03, D05, D06, D07, D10: random plans, degrees 1..N mixed and changing, in fp32."""
    met = assert_as_one_process(["ddp", "fsdp2"], nproc, range(8), ["qwen3"], torch.float32, whole=0)

    assert {degree for _, degree in met} == set(range(1, nproc + 1))
    assert {exchange for exchange, degree in met if degree > 1} == set(EXCHANGE_KINDS)


# One case an exchange, and both precisions, always; the rest is the long form.
_SHORT = {("ring", 4, torch.float64), ("gather", 3, torch.float32), ("all-to-all", 4, torch.float64)}
_CASES = product(EXCHANGE_KINDS, (3, 4), (torch.float32, torch.float64))


@pytest.mark.parametrize(
    ("exchange", "nproc", "dtype"),
    [pytest.param(*case, marks=() if case in _SHORT else pytest.mark.slow) for case in _CASES],
)
def test_gradients_by_one_exchange(exchange: str, nproc: int, dtype: torch.dtype) -> None:
    """Each exchange alone; all-to-all at the degrees that 4 query and 2 key/value heads allow."""
    met = assert_as_one_process(["plain"], nproc, range(4), ["qwen3"], dtype, 16, exchange)

    degrees = [degree for degree in range(2, nproc + 1) if exchange != "all-to-all" or degree != 3]
    assert {degree for kind, degree in met if kind == exchange and degree > 1} == set(degrees)


@pytest.mark.parametrize("kind", ["fsdp2", pytest.param("ddp", marks=pytest.mark.slow)])
def test_families_whose_attention_or_loss_is_their_own(kind: str) -> None:
    """D46, D50, D58: windows, capped scores, sinks, routers and latent attention, through real ranks."""
    plain = {"llama", "qwen2", "qwen3", "mistral"}
    families = [family for family in FAMILIES if family not in plain]
    met = assert_as_one_process([kind], 3, [200], families, torch.float32, whole=16)

    assert {degree for _, degree in met} == {1, 2, 3}


def test_other_families_whole_samples_and_fp64() -> None:
    """Families of plain attention; samples below 16 tokens kept whole; errors of fp64 rounding alone."""
    families = ["llama", "mistral", "qwen2"]
    met = assert_as_one_process(["plain"], 3, range(100, 103), families, torch.float64, whole=16)

    assert {degree for _, degree in met} == {1, 2, 3}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("whole", [0, 24])
def test_gradients_of_thirty_plans(whole: int) -> None:
    """Thirty random plans on four ranks."""
    met = assert_as_one_process(["ddp", "fsdp2"], 4, range(30), ["qwen3"], torch.float32, whole)

    assert {degree for _, degree in met} == {1, 2, 3, 4}
