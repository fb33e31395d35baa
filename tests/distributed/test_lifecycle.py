"""What a user may do wrong in a loop of their own, and what the engine says to it. One world, many cases."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flexcp.attention import Message
from flexcp.core.errors import ConfigError, DataError, FlexCPError, RunError
from tests.distributed.test_engine import LENGTHS, losses_of, make_engine, make_planner
from tests.harness import run_ranks
from tests.models import ListDataset, relative_error, tiny_model


def said(function: Any) -> str:
    """The error's kind and text, or that there was none."""
    try:
        function()
    except FlexCPError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def weights(model: Any) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def run_step(step: Any, engine: Any, **options: Any) -> Any:
    for micro in step:
        step.backward(engine.model(**micro.inputs, **options), micro)
    return step.finish()


def misuse(world: Any) -> dict[str, Any]:
    """Plain replicated model; every case leaves the world usable for the next."""
    from flexcp.integrations.transformers import enable

    found: dict[str, Any] = {}
    model = tiny_model()
    data = ListDataset(LENGTHS, unlabelled=())

    def fresh(**options: Any) -> Any:
        return make_engine(model, make_planner(world.size, tokens_per_rank=96), data, **options)

    with enable(model):
        engine = fresh(global_batch=4, steps=3)
        step = next(iter(engine))
        found["left open"] = said(lambda: next(iter(engine)))
        found["evaluate inside"] = said(lambda: engine.evaluate(data))
        report = run_step(step, engine)
        before = weights(model)
        found["finish twice"] = said(step.finish)
        found["unchanged"] = bool((weights(model) == before).all())
        found["next step"] = engine.state_dict()["step"]
        found["grad norm"] = report.grad_norm
        steps = [step.index for step in engine if run_step(step, engine)]
        found["continued"] = steps
        engine.close()
        engine.close()
        found["closed"] = said(lambda: next(iter(engine)))

        with fresh(global_batch=4, steps=1) as engine:
            step = next(iter(engine))
            micros = list(step)
            found["no backward"] = (
                said(step.finish) if micros else "RunError: step 0 ends with no micro-batch"
            )
            for micro in micros:
                output = model(**micro.inputs)
                step.backward(output, micro)
            if micros:
                found["backward twice"] = said(lambda: step.backward(output, micros[-1]))
            step.finish()

        before = weights(model)
        with fresh(global_batch=4, steps=1, clip_norm=1.0) as engine:
            step = next(iter(engine))
            for micro in step:
                logits = model(**micro.inputs).logits
                if world.rank == 1:
                    logits.register_hook(lambda grad: grad * math.nan)
                step.backward(logits, micro)
            found["nan gradient"] = said(step.finish)
        found["weights after nan"] = bool((weights(model) == before).all())
        model.zero_grad()
        other = torch.optim.SGD(tiny_model().parameters(), lr=0.1)
        planner = make_planner(world.size, tokens_per_rank=96)
        from flexcp.runtime.engine import Engine

        found["optimizer"] = said(lambda: Engine(model, other, planner, data, global_batch=1))
        found["seeds"] = said(lambda: fresh(global_batch=4, seed=world.rank))
        found["one cannot read"] = said(lambda: losses_of(broken_on_rank_one(fresh(global_batch=4, steps=2))))
        found["eval cannot read"] = said(lambda: broken_evaluation(fresh(global_batch=4, steps=2)))
        found["still training"] = model.training
        found["eval too long"] = said(lambda: fresh(global_batch=4).check(ListDataset([5000])))
    return found


class Broken(ListDataset):
    """Its second sample cannot be read on rank 1."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if dist.get_rank() == 1 and index == 1:
            raise DataError("notes.txt has gone", "Bring it back.")
        return super().__getitem__(index)

    def name(self, index: int) -> str:
        return f"file {index}"


def broken_on_rank_one(engine: Any) -> Any:
    engine.dataset = Broken([150, 150, 150, 150], unlabelled=())
    return engine


def broken_evaluation(engine: Any) -> None:
    engine.evaluate(Broken([150, 150, 150, 150], unlabelled=()))


def test_misuse_is_a_sentence_on_every_rank() -> None:
    """None of it hangs, none of it touches the weights."""
    for rank, found in enumerate(run_ranks(misuse, 2)):
        assert "step 0 was left without step.finish()" in found["left open"]
        assert "before an evaluation" in found["evaluate inside"]
        assert "finished twice" in found["finish twice"]
        assert found["unchanged"]
        assert found["next step"] == 1
        assert found["continued"] == [1, 2]
        assert math.isfinite(found["grad norm"])
        assert "the engine was closed" in found["closed"]
        assert found["no backward"].startswith("RunError: step 0 ends with ")
        assert "not its own, or got it twice" in found.get("backward twice", "not its own, or got it twice")
        assert "gradient norm nan" in found["nan gradient"]
        assert "The weights were not changed" in found["nan gradient"]
        assert found["weights after nan"]
        assert found["optimizer"].startswith("ConfigError: the optimizer holds parameters")
        assert f"ranks [1] have another seed than rank 0 (rank {rank}: {rank})" in found["seeds"]
        sentence = "DataError: rank 1 could not read file 1: notes.txt has gone\nBring it back."
        assert found["one cannot read"] == found["eval cannot read"] == sentence
        assert found["still training"]
        assert "sample 0 has 5000 tokens" in found["eval too long"]


def own_wrapping(world: Any) -> tuple[list[torch.Tensor], list[str], dict[str, int]]:
    """FSDP2 as most people write it, clipped; and the collectives of a step, by rank."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    from flexcp.integrations.transformers import blocks_of, enable

    model = tiny_model()
    for block in blocks_of(model):
        fully_shard(block)
    fully_shard(model)
    data = ListDataset([30, 60, 9, 4], unlabelled=())
    with (
        enable(model),
        make_engine(model, make_planner(world.size), data, global_batch=4, steps=2, clip_norm=0.05) as engine,
    ):
        counts: dict[str, int] = {}
        for step in engine:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                for micro in step:
                    step.backward(model(**micro.inputs), micro)
                step.reduce_gradients()
            if step.index == 1:
                names = [event.key for event in profile.key_averages() if event.key.startswith("c10d::")]
                counts = {event.key: event.count for event in profile.key_averages() if event.key in names}
                grads = [p.grad.full_tensor() for p in model.parameters() if isinstance(p.grad, DTensor)]
            step.finish()
    units = [f"{len(list(blocks_of(model))) + 1} units"]
    return grads, units, counts


def test_a_users_fsdp2_wrapping_is_exact_and_free_running() -> None:
    """D06: gradients are clipped as in one process; a step reduces each unit once, and gathers nothing."""
    from tests.models import reference_step

    by_rank = run_ranks(own_wrapping, 3)
    model, data = tiny_model(), ListDataset([30, 60, 9, 4], unlabelled=())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        reference_step(model, data, range(4))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        optimizer.step()

    for grads, units, counts in by_rank:
        assert units == ["3 units"]
        assert max(relative_error(g, e) for g, e in zip(grads, expected, strict=True)) < 1e-5
        reductions = [count for name, count in counts.items() if "reduce_scatter" in name]
        assert reductions == [3], counts
        assert not any("allgather" in name or "all_gather" in name for name in counts), counts


def wait_for_a_sleeper(world: Any) -> str:
    """Rank 1 never comes to the ring; rank 0 must not wait for torch's half hour."""
    import time

    from flexcp.runtime.transport import Transport

    transport = Transport(timeout_s=3)
    if world.rank == 1:
        time.sleep(8)
        return "slept"
    received = Message.zeros((4,), torch.float32, torch.device("cpu"))
    return said(lambda: transport.exchange((0, 1)).post([], [(received, 1)]).wait())


def test_ring_messages_heed_the_timeout() -> None:
    """D33: the sentence names the ring."""
    first, second = run_ranks(wait_for_a_sleeper, 2)

    assert second == "slept"
    assert first.startswith("RankFailedError: an exchange among ranks [0, 1] failed: ")


@pytest.mark.parametrize("kind", [RunError, ConfigError])
def test_errors_cross_ranks_whole(kind: type[FlexCPError]) -> None:
    """Kind, cause and remedy survive the way as text."""
    from flexcp.core.errors import error_from_json, error_to_json

    again = error_from_json(error_to_json(kind("cause", "remedy")))

    assert type(again) is kind
    assert (again.cause, again.remedy) == ("cause", "remedy")
