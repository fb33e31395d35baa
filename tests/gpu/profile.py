"""A calibration of the device by one rank, its error on unseen shapes, and peak memory as predicted."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from flexcp.cost import Link
from flexcp.cost.memory import memory_model
from flexcp.cost.profiled import Profiled
from flexcp.runtime.launch import launch
from tests.gpu.common import Place, Row
from tests.waits import first_wait

DEADLINE_S = 200.0
_MODELS = {
    True: {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
           "head_dim": 64, "intermediate_size": 512, "vocab_size": 128},
    False: {"hidden_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 8,
            "head_dim": 128, "intermediate_size": 6144, "vocab_size": 16_384},
}  # fmt: skip
_UNSEEN = {
    True: [(700, 1, 1), (600, 3, 2)],
    False: [(3000, 1, 1), (6000, 5, 1), (12_000, 1, 3), (10_000, 2, 5), (20_000, 3, 7), (24_000, 1, 1)],
}  # tokens, samples, degree


def model_of(place: Place) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**_MODELS[place.quick])).to(place.device).train()


def profile_here(world: Any, place: Place) -> tuple[Profiled, list[tuple[str, float]], list[Row]]:
    """The calibration; for shapes that no task of it had measured over predicted, or why there is none."""
    from flexcp.integrations.transformers import enable, shape_of
    from flexcp.profiler import session
    from flexcp.profiler.measure import Bench, Cell

    if place.quick:
        session._MOST_ROUNDS = 3
    if place.is_cpu:
        torch.set_num_threads(1)  # more would wait for each other on a busy machine
    model = model_of(place)
    cast = None if place.is_cpu else torch.bfloat16
    subject = session.Subject(shape_of(model.config), checkpointing=False, element_bytes=2 if cast else 4)
    with enable(model):
        bench = Bench(model, model.config.vocab_size, world, cast)
        found = session.profile(
            world,
            bench,
            subject,
            longest_tokens=1024 if place.quick else 32_768,
            budget_s=40.0 if place.quick else 80.0,
        )
        nothing = Link(1e18, 0.0)  # a rank alone sends nothing
        cost = replace(found.calibration.cost, intra=nothing, inter=nothing)
        ratios, failures = [], []
        for shape in _UNSEEN[place.quick]:
            pack, what = Cell(*shape).pack, f"{shape[0]} tokens in {shape[1]} on {shape[2]}"
            try:
                seconds = statistics.median([bench.seconds(pack) for _ in range(3)])
            except RuntimeError as error:  # the calibration is there all the same
                failures.append(Row(what, str(error).splitlines()[0], ok=False))
            else:
                ratios.append((what, seconds / cost.task_s(pack.load, pack.degree)))
    return found, ratios, failures


def check_profile(place: Place) -> tuple[list[Row], Profiled]:
    """Rows, and what is to be written."""
    [(found, ratios, failures)] = launch(
        profile_here, 1, (place,), deadline_s=place.within(DEADLINE_S), share_devices=True
    )
    calibration = found.calibration
    device = calibration.hardware
    rows = [
        Row(
            "profile",
            f"{calibration.measurements} tasks, error {calibration.error_mean:.1%} (cross-validated)",
        ),
        Row("rate outside of attention", f"{device.flops_per_s / 1e12:.3g} TFLOP/s"),
        Row("rate of attention", f"{device.flops_per_s * device.attention_efficiency / 1e12:.3g} TFLOP/s"),
    ]
    if ratios:
        mean = statistics.mean(abs(ratio - 1) for _, ratio in ratios)
        what, worst = max(ratios, key=lambda pair: abs(pair[1] - 1))
        rows.append(Row("cost model on unseen shapes", f"mean {mean:.1%}, worst {worst - 1:+.1%}: {what}"))
    return rows + failures, found


def check_waits(place: Place) -> list[Row]:
    """Whether the host waits in forward or backward of a micro-batch, as the first of a ring of 4.

    Messages come from the member itself, so nothing is shown of NCCL.
    """
    from flexcp.integrations.transformers import enable
    from flexcp.profiler.alone import AloneTransport
    from flexcp.profiler.measure import Cell, _plan
    from flexcp.runtime.batches import make_micro_batch
    from flexcp.runtime.step import loss_sum_of

    model = model_of(place)
    plan = _plan(Cell(512 if place.quick else 8192, 3, 4).pack, 4)
    examples = {i: {"input_ids": np.arange(sample.tokens) % 64} for i, sample in enumerate(plan.samples)}
    transport: Any = AloneTransport()

    def work() -> None:
        micro = make_micro_batch(plan, plan.tasks[0], examples, transport, pinned=not place.is_cpu)
        micro = micro.to(place.device)
        with torch.autocast(place.device.type, torch.bfloat16, enabled=not place.is_cpu):
            output = model(**micro.inputs)
        loss_sum_of(output, micro).backward()

    with enable(model):
        work()
        waits = first_wait(work, place.device)
    return [Row("host waits in a micro-batch, without NCCL", waits or "none", not waits)]


def peak_here(world: Any, place: Place, tokens: int) -> tuple[int, Any]:
    """Bytes at the peak of two steps of two packs; the shape of the model."""
    import flexcp

    model = model_of(place)
    optimizer = torch.optim.AdamW(model.parameters())
    shape = flexcp.transformers.shape_of(model.config)
    planner = flexcp.Planner(flexcp.Cluster(1, tokens), flexcp.cost_model(shape, flexcp.hardware("h100")))

    class Data:
        lengths = np.array([tokens] * 2)

        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"input_ids": np.arange(tokens) % 64}

    with (
        flexcp.transformers.enable(model),
        flexcp.Engine(model, optimizer, planner, Data(), global_batch=2, steps=2) as engine,
    ):
        for step in engine:
            for micro in step:
                with torch.autocast(place.device.type, torch.bfloat16, enabled=not place.is_cpu):
                    output = model(**micro.inputs)
                step.backward(output, micro)
            step.finish()
    return 0 if place.is_cpu else int(torch.accelerator.max_memory_allocated()), shape


def check_memory(place: Place) -> list[Row]:
    """Weights in fp32 under bf16 autocast: states as fp32, activations as bf16."""
    tokens = 256 if place.quick else 16_384
    [(measured, shape)] = launch(
        peak_here, 1, (place, tokens), deadline_s=place.within(DEADLINE_S), share_devices=True
    )
    predicted = memory_model(
        shape, 1, element_bytes=4 if place.is_cpu else 2, sharding="ddp", checkpointing=False
    ).peak_bytes(tokens)
    if not measured:
        return [Row("peak memory", f"predicted {predicted / 2**20:.0f} MiB; a CPU says nothing")]
    ratio = measured / predicted
    text = f"measured {measured / 2**30:.2f} GiB, predicted {predicted / 2**30:.2f} GiB: {ratio:.2f}"
    return [Row("peak memory", text)]
