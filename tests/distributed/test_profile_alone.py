"""Profiling by one rank alone: the work of a member at any degree, no links, and no world of several."""

from __future__ import annotations

from typing import Any

import torch

from flexcp.attention import Message
from flexcp.core.model_shape import model_shape
from flexcp.cost import Link
from flexcp.cost.calibration import Calibration
from flexcp.cost.doubts import doubts
from flexcp.cost.presets import hardware
from flexcp.profiler.alone import AloneTransport
from tests.harness import run_ranks


def profile_alone(world: Any) -> Calibration:
    """A calibration of a tiny model."""
    from flexcp.integrations.transformers import enable, shape_of
    from flexcp.profiler import session
    from flexcp.profiler.measure import Bench
    from tests.models import VOCAB, tiny_model

    torch.set_num_threads(1)  # two would wait for each other on a busy machine
    session._MOST_ROUNDS = 3
    model = tiny_model()
    subject = session.Subject(shape_of(model.config), checkpointing=False, element_bytes=4)
    with enable(model):
        bench = Bench(model, VOCAB, world)
        return session.profile(world, bench, subject, longest_tokens=1024, budget_s=75.0).calibration


def test_a_rank_alone_measures_all_but_links() -> None:
    """Degrees to 8, no link; that of a preset stands in its place, and that is said."""
    [calibration] = run_ranks(profile_alone, 1)

    assert set(calibration.degrees) == {1, 2, 3, 4, 6, 8}
    assert calibration.setup.link is None
    assert Calibration.from_json(calibration.to_json()) == calibration
    preset, device = hardware("cpu"), calibration.hardware
    assert calibration.cost.intra == Link(preset.intra_bytes_per_s, preset.intra_latency_s)
    links = [line for line in device.described() if "_latency_s" in line]
    assert [("preset cpu" in line, line.split(":")[0]) for line in links] == [(True, "assumed")] * 2
    said = doubts(calibration, model_shape("qwen3-8b"), 512, 4, checkpointing=False)
    assert any("by one rank alone: links inside a node are those of the preset cpu" in text for text in said)
    said = doubts(calibration, model_shape("qwen3-8b"), 512, 1, checkpointing=False)
    assert not any("one rank alone" in text for text in said)


def test_a_member_alone_hears_itself() -> None:
    """Finite numbers of the right shape, also where more rows come than go, and where nothing is sent."""
    exchange = AloneTransport().exchange((0, 1, 2))
    assert (exchange.member, exchange.degree) == (0, 3)
    sent, longer, lonely = (
        Message.zeros(shape, torch.float32, torch.device("cpu")) for shape in ((2, 3), (3, 3), (1, 3))
    )
    sent.payload.fill_(7.0)
    longer.payload.fill_(float("nan"))
    lonely.payload.fill_(float("nan"))
    exchange.post([(sent, 1)], [(longer, 2)]).wait()
    exchange.post([], [(lonely, 2)]).wait()
    assert longer.payload.tolist() == [[7.0] * 3, [7.0] * 3, [0.0] * 3]
    assert lonely.payload.tolist() == [[0.0] * 3]
