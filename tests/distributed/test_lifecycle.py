"""What a user may do wrong in a loop of their own, and what the engine says to it. One world, many cases."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
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
        found["looks"] = [t.name for t in threading.enumerate()].count("flexcp-standstill")
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
        finished: list[int] = []
        engine._feed.submit(lambda: (time.sleep(0.3), finished.append(1)))
        engine.close()
        found["background finished"] = finished == [1]
        engine.close()
        found["closed"] = said(lambda: next(iter(engine)))
        answer = threading.Event()
        with suppress(RunError), fresh(global_batch=4) as engine:
            waiting = engine._feed.submit(lambda: answer.wait(20))
            raise RunError("another rank has gone", "It may never answer.")
        found["background left"] = not waiting.done()
        answer.set()

        with fresh(
            global_batch=4, steps=5, stop_asked=lambda: world.rank == 1 and engine.next_step == 1
        ) as engine:
            found["stopped"] = [run_step(step, engine).step for step in engine], engine.stopped

        with fresh(global_batch=4, steps=1) as engine:
            step = next(iter(engine))
            micros = list(step)
            found["no backward"] = said(step.finish)
            for micro in micros:
                output = model(**micro.inputs)
                if micro is not micros[-1]:
                    found["out of order"] = said(lambda o=output: step.backward(o, micros[-1]))
                step.backward(output, micro)
            found["backward twice"] = said(lambda: step.backward(output, micros[-1]))
            step.finish()
        found["clip"] = said(lambda: fresh(global_batch=4, clip_norm=0.0))
        found["bad loss"] = said(lambda: fresh(global_batch=4, on_bad_loss="Stop"))

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
    by_rank = run_ranks(misuse, 2)
    assert any("out of order" in found for found in by_rank)  # some rank has two tasks
    for rank, found in enumerate(by_rank):
        assert found["looks"] == (1 if rank == 0 else 0)  # else each would say the same
        assert "step 0 was left without step.finish()" in found["left open"]
        assert "before an evaluation" in found["evaluate inside"]
        assert "finished twice" in found["finish twice"]
        assert found["unchanged"]
        assert found["next step"] == 1
        assert found["continued"] == [1, 2]
        assert found["background finished"]
        assert found["background left"]
        assert found["stopped"] == ([0, 1], True)  # after step 1, in which rank 1 was asked to
        assert math.isfinite(found["grad norm"])
        assert "the engine was closed" in found["closed"]
        assert found["no backward"].startswith("RunError: step 0 ends with ")
        assert "not its own, got it twice, or not in order" in found["backward twice"]
        assert found.get("out of order", found["backward twice"]) == found["backward twice"]
        assert found["clip"].startswith("ConfigError: clip_norm is 0.0")
        assert found["bad loss"].startswith("ConfigError: on_bad_loss is 'Stop'")
        assert "gradient norm nan" in found["nan gradient"]
        assert "The weights were not changed" in found["nan gradient"]
        assert found["weights after nan"]
        assert found["optimizer"].startswith("ConfigError: the optimizer holds parameters")
        assert f"ranks [1] have another seed than rank 0 (rank {rank}: {rank})" in found["seeds"]
        sentence = "DataError: rank 1 could not read file 1: notes.txt has gone\nBring it back."
        assert found["one cannot read"] == found["eval cannot read"] == sentence
        assert found["still training"]
        assert "sample 0 has 5000 tokens" in found["eval too long"]


@contextmanager
def no_barriers() -> Iterator[None]:
    """On NCCL the host waits in one, and its device has nothing to do meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "barrier", None)
        yield


def run_waves(world: Any) -> dict[str, Any]:
    """Each task sleeps for a time of its own; when it began and ended, by mode, and the losses."""
    from flexcp.integrations.transformers import enable

    found: dict[str, Any] = {}
    for mode in ("free-running", "lockstep"):
        model, spans = tiny_model(), []
        planner = replace(make_planner(world.size, tokens_per_rank=60), mode=mode)
        engine = make_engine(model, planner, ListDataset(LENGTHS), global_batch=12, steps=2)
        with enable(model), engine, no_barriers():
            for step in engine:
                for micro in step:
                    begun_s = time.monotonic()
                    time.sleep(0.02 * ((micro.sample_ids[0] + 3 * world.rank) % 5))
                    step.backward(model(**micro.inputs), micro)
                    spans.append((step.index, micro.task.wave, begun_s, time.monotonic()))
                found.setdefault(f"{mode} losses", []).append(step.finish().loss)
        found[mode] = spans
    found["durations"] = durations_of_tasks_asked_for_at_once(world)
    return found


def durations_of_tasks_asked_for_at_once(world: Any) -> list[tuple[float, float]]:
    """Begin and end of this rank's tasks where a loop takes all micro-batches first."""
    from flexcp.integrations.transformers import enable

    model, spans = tiny_model(), []
    engine = make_engine(
        model, make_planner(world.size, tokens_per_rank=60), ListDataset(LENGTHS), global_batch=12, steps=1
    )
    engine.record = lambda name, start_s, end_s, *_, **__: spans.append((name, start_s, end_s))
    with enable(model), engine:
        for step in engine:
            for micro in list(step):
                step.backward(model(**micro.inputs), micro)
            step.finish()
    return [(start_s, end_s) for name, start_s, end_s in spans if name == "task"]


def test_ranks_meet_after_every_wave_of_a_lockstep_plan() -> None:
    """And tasks never overlap in the trace, whenever the loop asked for them."""
    ranks = run_ranks(run_waves, 3)
    for found in ranks:
        np.testing.assert_allclose(found["lockstep losses"], found["free-running losses"], rtol=1e-5)
        for (_, end_s), (begin_s, _) in pairwise(found["durations"]):
            assert begin_s >= end_s
    assert max(len(found["durations"]) for found in ranks) > 1
    tasks = [task for found in ranks for task in found["lockstep"]]
    waves = sorted({task[:2] for task in tasks})
    assert len(waves) > 4
    for earlier, later in pairwise(waves):
        ended_s = max(end_s for *wave, _, end_s in tasks if tuple(wave) == earlier)
        assert ended_s <= min(begun_s for *wave, begun_s, _ in tasks if tuple(wave) == later)


def own_wrapping(world: Any) -> tuple[list[torch.Tensor], list[str], dict[str, int], float]:
    """FSDP2 as most people write it, clipped; the collectives of a step, by rank, and the norm before."""
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
            report = step.finish()
    units = [f"{len(list(blocks_of(model))) + 1} units"]
    return grads, units, counts, report.grad_norm


def test_a_users_fsdp2_wrapping_is_exact_and_free_running() -> None:
    """D06: gradients are clipped as in one process; a step reduces each unit once, and gathers nothing."""
    from tests.models import reference_step

    by_rank = run_ranks(own_wrapping, 3)
    model, data = tiny_model(), ListDataset([30, 60, 9, 4], unlabelled=())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        reference_step(model, data, range(4))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        optimizer.step()

    for grads, units, counts, grad_norm in by_rank:
        assert units == ["3 units"]
        assert grad_norm == pytest.approx(float(norm), rel=1e-5)
        assert max(relative_error(g, e) for g, e in zip(grads, expected, strict=True)) < 1e-5
        reductions = [count for name, count in counts.items() if "reduce_scatter" in name]
        assert reductions == [3], counts
        assert not any("allgather" in name or "all_gather" in name for name in counts), counts


def wait_in_vain(world: Any) -> tuple[str, str]:
    """Rank 0 comes neither to the ring nor with a plan, and stays; rank 1 must not wait for half an hour."""
    from flexcp.runtime.feed import Feed
    from flexcp.runtime.transport import Transport

    transport = Transport(timeout_s=3)
    feed = Feed(make_planner(2), transport, torch.device("cpu"), print, timeout_s=3)
    ring = plan = "it did not come"
    if world.rank == 1:
        received = Message.zeros((4,), torch.float32, torch.device("cpu"))
        ring = said(lambda: transport.exchange((0, 1)).post([], [(received, 0)]).wait())
        plan = said(lambda: feed.hand_out(None))
    dist.barrier()  # who leaves ends what others wait for
    feed.close()
    return ring, plan


def test_ring_messages_and_plans_heed_the_timeout() -> None:
    """D33: the sentence names the ring, or the plan."""
    _, (ring, plan) = run_ranks(wait_in_vain, 2, deadline_s=60)

    assert ring.startswith("RankFailedError: an exchange among ranks [0, 1] failed: ")
    assert plan.startswith("RankFailedError: rank 1 lost another rank during handing out a plan: ")


@pytest.mark.parametrize("kind", [RunError, ConfigError])
def test_errors_cross_ranks_whole(kind: type[FlexCPError]) -> None:
    """Kind, cause and remedy survive the way as text."""
    from flexcp.core.errors import error_from_json, error_to_json

    again = error_from_json(error_to_json(kind("cause", "remedy")))

    assert type(again) is kind
    assert (again.cause, again.remedy) == ("cause", "remedy")
