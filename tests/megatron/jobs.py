"""What the processes of the Megatron tests run: each installs the shim before it imports megatron."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flexcp.core.cluster import Cluster
from flexcp.core.plan import Plan, Task
from flexcp.core.sample import Sample
from flexcp.cost.model import cost_model
from flexcp.cost.presets import hardware
from flexcp.planner import Planner
from flexcp.runtime.order import batch_indices
from tests.datasets import ListDataset
from tests.megatron import shim

LENGTHS = [37, 12, 61, 5, 1, 90, 23, 2, 44, 71, 3, 128, 17, 29, 8, 53, 31, 7, 100]
GLOBAL_BATCH = 9


# Degrees of the groups of a wave, by number of ranks; ranks left over have no task in it.
PATTERNS = {
    1: [[1]],
    2: [[1, 1], [2], [1]],
    3: [[3], [1, 2], [2], [1, 1, 1]],
    4: [[3, 1], [1, 2], [4], [1, 1, 1]],
    6: [[3, 1, 2], [5], [6], [4, 1]],
}


@dataclass(frozen=True)
class MixedPlanner:
    """Degrees in turn, whatever they cost; the last ranks of a wave come first in the next one."""

    cluster: Cluster

    def __call__(self, samples: Sequence[Sample]) -> Plan:
        ranks, tasks, wave = self.cluster.ranks, [], 0
        left = list(range(len(samples)))
        while left:
            pattern = PATTERNS[ranks][wave % len(PATTERNS[ranks])]
            places = [(wave + place) % ranks for place in range(ranks)]
            for degree in pattern:
                pack, left = left[: 1 + degree % 2], left[1 + degree % 2 :]
                group, places = places[:degree], places[degree:]
                if pack:
                    tasks.append(Task(tuple(pack), tuple(group), wave, float(wave), wave + 1.0))
            wave += 1
        return Plan("mixed", "lockstep", self.cluster, 16, tuple(samples), tuple(tasks), 1.0)


def make_planner(ranks: int) -> MixedPlanner:
    """Plans of every degree."""
    return MixedPlanner(Cluster(ranks, 256))


def start(world: Any, tensor: int = 1, pipeline: int = 1, **options: Any) -> None:
    """Megatron's groups, on the CPU."""
    shim.install()
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tensor, pipeline, **options)


@dataclass(frozen=True)
class Case:
    """A grid and options under which training is held against one process.

    Attributes:
        tensor, pipeline, expert: sizes of Megatron's grid.
        options: of the `TransformerConfig`; `moe_aux_loss_coeff` is given to `enable`.
        wrapping: of the DistributedDataParallel.
        global_batch, steps: samples a step, and steps.
    """

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    wrapping: Mapping[str, Any] = field(default_factory=dict)
    global_batch: int = GLOBAL_BATCH
    steps: int = 3

    @property
    def alone(self) -> tuple[Any, ...]:
        """What one process needs to know: cases with the same have the same reference."""
        experts = {name: value for name, value in self.options.items() if "moe" in name}
        return tuple(sorted(experts.items())), self.global_batch, self.steps


def train_cases(world: Any, cases: Mapping[str, Case]) -> dict[str, dict[str, Any] | str]:
    """What each case came to in this process, or how it ended; one world, since starting takes longest."""
    shim.install()
    from megatron.core import parallel_state

    references: dict[Any, Any] = {}
    found: dict[str, dict[str, Any] | str] = {}
    for name, case in cases.items():
        if case.alone not in references:
            parallel_state.initialize_model_parallel()
            references[case.alone] = train_alone(case)
            parallel_state.destroy_model_parallel()
        # Experts cut over a tensor-parallel group gather unequal numbers of tokens, which gloo cannot.
        parallel_state.initialize_model_parallel(
            case.tensor,
            case.pipeline,
            expert_model_parallel_size=case.expert,
            expert_tensor_parallel_size=1,
        )
        try:
            found[name] = train_flexibly(world, case, *references[case.alone])
        except Exception:  # on all processes alike, or the world ends by its deadline
            found[name] = traceback.format_exc()
        parallel_state.destroy_model_parallel()
    return found


def train_alone(case: Case) -> tuple[Any, list[float], Any]:
    """First weights, and losses and gradients of every step, by Megatron's own attention on one process."""
    from tests.megatron import host

    dataset = ListDataset(LENGTHS)
    batches = [batch_indices(len(dataset), case.global_batch, 0, step).tolist() for step in range(case.steps)]
    options = dict(case.alone[0])
    model = host.provider(host.make_config(**options), flexible=False)
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    return weights, *host.reference(weights, dataset, batches, **options)


def train_flexibly(
    world: Any, case: Case, weights: Any, losses: list[float], gradients: Any
) -> dict[str, Any]:
    """Losses, largest relative error of a gradient, degrees, micro-batches and waves, by step."""
    import flexcp
    from tests.megatron import host

    options = dict(case.options)
    aux = options.pop("moe_aux_loss_coeff", 0.0)
    config = host.make_config(
        **options, expert_model_parallel_size=case.expert, expert_tensor_parallel_size=1
    )
    model = host.provider(config, aux=aux)
    host.seed_weights(model, weights)
    ddp, optimizer = host.wrap(model, **case.wrapping)
    cells = world.size // (case.tensor * case.pipeline)
    with flexcp.megatron.Engine(
        [ddp],
        make_planner(cells),
        ListDataset(LENGTHS),
        global_batch=case.global_batch,
        steps=len(gradients),
    ) as engine:
        found: dict[str, Any] = {"degrees": [], "counts": [], "waves": [], "expected": losses}

        def watched() -> Any:
            for step in engine:
                found["degrees"].append(dict(step.plan.degrees))
                found["counts"].append(step.num_microbatches)
                found["waves"].append(step.plan.num_waves)
                yield step

        found["losses"], reduced = host.train(watched(), ddp, optimizer)
    found["errors"] = [
        _worst(got, host.own_share(model, whole)) for got, whole in zip(reduced, gradients, strict=True)
    ]
    return found


def _worst(got: dict[str, Any], expected: dict[str, Any]) -> tuple[float, str]:
    """The largest relative error of a tensor, and its name; every parameter must have a gradient."""
    from tests.reference import relative_error

    errors = [(relative_error(got[name], expected[name].double()), name) for name in expected]
    return max(errors)


def train_twenty(world: Any) -> dict[str, Any]:
    """Losses of twenty steps, by plans of the `flexcp` policy and by Megatron's own two static layouts."""
    start(world)
    from megatron.core import parallel_state

    from tests.megatron import host, static_cp

    dataset, steps = ListDataset(LENGTHS), 20
    batches = [batch_indices(len(dataset), GLOBAL_BATCH, 0, step).tolist() for step in range(steps)]
    found: dict[str, Any] = _twenty_flexibly(dataset, steps)
    static = [host.StaticStep(dataset, batch) for batch in batches]
    found["data"] = host.train(static, *host.wrap(host.provider(host.make_config(), flexible=False)))[0]
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    cut = [static_cp.ContextStep(dataset, batch) for batch in batches]
    model = static_cp.provider(host.make_config(context_parallel_size=2))
    found["context"] = host.train(cut, *host.wrap(model))[0]
    return found


def _twenty_flexibly(dataset: ListDataset, steps: int) -> dict[str, Any]:
    import flexcp
    from tests.megatron import host

    ddp, optimizer = host.wrap(host.provider(host.make_config()))
    shape = flexcp.megatron.shape_of(ddp.module.config, host.PADDED_VOCAB, tied=True)
    cost = cost_model(shape, hardware("cpu"))
    planner = Planner(flexcp.megatron.cluster(48), cost, whole_below_tokens=16)
    degrees = []
    with flexcp.megatron.Engine([ddp], planner, dataset, global_batch=GLOBAL_BATCH, steps=steps) as engine:

        def watched() -> Any:
            for step in engine:
                degrees.append(dict(step.plan.degrees))
                yield step

        return {"flexcp": host.train(watched(), ddp, optimizer)[0], "degrees": degrees}
