"""What one rank alone has, does or sees: all ranks hear of it, and none waits for the others in vain."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flexcp.core.errors import FlexCPError
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


CASES = {"other names": other_names, "other sources": other_sources}


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
