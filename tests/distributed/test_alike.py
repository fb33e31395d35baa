"""What one rank alone has, does or sees: all ranks hear of it, and none waits for the others in vain."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from flexcp.core.errors import FlexCPError
from flexcp.core.sample import Sample
from tests.distributed.test_engine import LENGTHS, make_engine, make_planner
from tests.harness import run_ranks
from tests.models import ListDataset, tiny_model


def said(work: Callable[[], object]) -> str:
    """The error's kind and text, or that there was none."""
    try:
        work()
    except FlexCPError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def fresh(data: Any = None, model: Any = None, **options: Any) -> Any:
    """An engine of two ranks."""
    options = {"global_batch": 4, "steps": 2, **options}
    data = ListDataset(LENGTHS, unlabelled=()) if data is None else data
    return make_engine(model or tiny_model(), make_planner(2, tokens_per_rank=96), data, **options)


def other_names(world: Any) -> None:
    """Rank 1 is of a version that compares one thing more."""
    from flexcp.runtime.agreement import require_agreement

    values = {"seed": "1", **({"something new": "2"} if world.rank else {})}
    require_agreement(values, "Mend it.")


def other_sources(world: Any) -> None:
    """Rank 1 runs another checkout, which has the same number."""
    from flexcp.runtime import agreement

    own = agreement._own_version
    agreement._own_version = lambda: own().replace("sources ", "sources f") if world.rank else own()
    try:
        fresh()
    finally:
        agreement._own_version = own


def model_of_another_seed(world: Any) -> Any:
    """As good as: one weight of rank 1 is another."""
    model = tiny_model()
    if world.rank:
        with torch.no_grad():
            next(model.parameters()).view(-1)[3].mul_(1 + 1e-6)
    return model


def other_weights(world: Any) -> None:
    """Rank 1 made its model under another seed."""
    fresh(model=model_of_another_seed(world))


def other_weights_under_ddp(world: Any) -> None:
    """The same, and `shard` gives all ranks those of rank 0."""
    from flexcp.runtime.sharding import shard

    fresh(model=shard(model_of_another_seed(world), "ddp")).close()


def other_weights_in_shards(world: Any) -> None:
    """The same, to be cut into shards: nobody could see it later."""
    from flexcp.runtime.sharding import shard

    shard(tiny_model("qwen3" if world.rank else "llama"), "fsdp2")


def one_refuses(world: Any) -> None:
    """An argument that only rank 1 finds wrong, before anything is compared."""
    fresh(global_batch=0 if world.rank else 4)


def each_refuses(world: Any) -> None:
    """Rank 0 finds another argument wrong than rank 1."""
    fresh(global_batch=4 if world.rank else 0, clip_norm=-1.0)


def other_evaluation_data(world: Any) -> None:
    """A folder that one more file has come into."""
    with fresh() as engine:
        engine.evaluate(ListDataset([9] * (5 + world.rank), unlabelled=()))


def one_has_no_room_for_evaluation(world: Any) -> None:
    """A sample that is too long on rank 1 alone."""
    with fresh() as engine:
        engine.check(ListDataset([9, 5000 if world.rank else 9], unlabelled=()))


class Spans(ListDataset):
    """Its method `sample` fails for sample 3 on one rank."""

    def __init__(self, where: int) -> None:
        super().__init__(LENGTHS, unlabelled=())
        self.where = where

    def sample(self, index: int) -> Sample:
        if index == 3 and dist.get_rank() == self.where:
            raise LookupError("no spans of 3")
        return Sample(index, int(self.lengths[index]))


def one_cannot_describe(world: Any, where: int) -> None:
    """Rank `where` cannot say what the planner is to see, in the background."""
    with fresh(Spans(where), global_batch=len(LENGTHS)) as engine:
        next(iter(engine))


class Listed:
    """Records in the order in which a folder lists them."""

    def __init__(self, swapped: bool, record: Any = str) -> None:
        self.order = list(range(12))
        if swapped:
            self.order[5:7] = [6, 5]
        self.record = record

    def records(self, start: int) -> Iterator[Any]:
        yield from map(self.record, self.order[start:])

    def decode(self, record: Any) -> dict[str, Any]:
        return {"input_ids": np.arange(8)}


def other_order(world: Any, swapped: bool) -> None:
    """Rank 1 sees records 5 and 6 in another order: one would be trained on twice, one never."""
    stream = Listed(swapped and world.rank == 1)
    with fresh(stream, steps=None) as engine:
        for step in engine:
            list(step)
            engine._open_step = None
            engine.next_step += 1


CASES: dict[str, Callable[[Any], None]] = {
    "other names": other_names,
    "other sources": other_sources,
    "other weights": other_weights,
    "other weights under ddp": other_weights_under_ddp,
    "other weights in shards": other_weights_in_shards,
    "one refuses": one_refuses,
    "each refuses": each_refuses,
    "other evaluation data": other_evaluation_data,
    "evaluation too long": one_has_no_room_for_evaluation,
    "sample on 0": lambda world: one_cannot_describe(world, 0),
    "sample on 1": lambda world: one_cannot_describe(world, 1),
    "same order": lambda world: other_order(world, False),
    "other order": lambda world: other_order(world, True),
}


def all_cases(world: Any) -> dict[str, str]:
    """Every case on one world: ranks need seconds to come up."""
    found = {}
    for name, case in CASES.items():
        found[name] = said(lambda case=case: case(world))
        dist.barrier()
    return found


@pytest.fixture(scope="module")
def by_rank() -> list[dict[str, str]]:
    return run_ranks(all_cases, 2)


def test_ranks_of_other_versions_are_told_so(by_rank: list[dict[str, str]]) -> None:
    """Also where they compare other things: gloo would end the process at another size of a message."""
    for rank, found in enumerate(by_rank):
        names = json.dumps(["seed", "something new"] if rank else ["seed"])
        cause = "DisagreementError: ranks [1] have another {} than rank 0 (rank {}: {}"
        assert found["other names"].startswith(cause.format("list of settings to compare", rank, names))
        assert found["other sources"].startswith(cause.format("version of flexcp", rank, ""))
        assert "sources f" in found["other sources"] or rank == 0
        assert found["other sources"].endswith("or install one version on all machines.")


def test_what_one_rank_has_otherwise_is_named(by_rank: list[dict[str, str]]) -> None:
    """Weights, lengths, the order of a stream."""
    for rank, found in enumerate(by_rank):
        for name in ("other weights", "other weights in shards"):
            cause = (
                f"DisagreementError: ranks [1] have another weights of the model than rank 0 (rank {rank}: "
            )
            assert found[name].startswith(cause)
        assert found["other weights under ddp"] == "nothing was raised"
        assert "another lengths of the evaluation data than" in found["other evaluation data"]
        assert found["other order"].startswith(
            "DisagreementError: ranks [1] have another record 5 of the stream than rank 0\n"
        )
        assert found["same order"] == "nothing was raised"


def test_what_one_rank_refuses_all_refuse(by_rank: list[dict[str, str]]) -> None:
    """In its words, whichever rank it is; where there are several, in those of the first."""
    for found in by_rank:
        assert found["each refuses"].startswith("ConfigError: global_batch is 0\n")
        assert found["one refuses"].startswith("ConfigError: global_batch is 0\n")
        assert "sample 1 has 5000 tokens" in found["evaluation too long"]
        for rank in (0, 1):
            cause = f"DataError: rank {rank} could not read sample 3: LookupError: no spans of 3"
            assert found[f"sample on {rank}"].startswith(cause)


def run_out_in_the_reduction(world: Any) -> None:
    """Rank 1 needs a buffer for gradients that its allocator does not give."""
    from flexcp.integrations.transformers import enable

    model = tiny_model()
    with enable(model), fresh(model=model) as engine:
        for step in engine:
            for micro in step:
                step.backward(model(**micro.inputs), micro)
            if world.rank == 1:
                engine.sharding.reduce = lambda: torch.empty(2**60, dtype=torch.uint8)
            step.finish()


def test_memory_that_runs_out_in_the_reduction_is_called_so() -> None:
    """The rank whose memory it is, not one that lost another."""
    with pytest.raises(FlexCPError, match=r"^rank 1 on .* ran out of memory: RuntimeError: ") as caught:
        run_ranks(run_out_in_the_reduction, 2)

    assert "in step 0, summing gradients, ran out" in str(caught.value)
    assert caught.value.remedy.startswith("Lower parallel.tokens_per_rank")
