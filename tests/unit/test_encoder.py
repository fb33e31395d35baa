"""The vision encoder: its operations by hand, as pairs of a sample, through plans and files of images."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from flexcp.cli import main
from flexcp.core.cluster import Cluster
from flexcp.core.model_shape import Encoder, ModelShape, model_shape
from flexcp.core.plan import Plan
from flexcp.core.sample import Sample
from flexcp.cost import Load, cost_model, hardware, memory_model
from flexcp.cost.encoder import encoded, encoder_flops, encoder_pairs
from flexcp.planner import make_plan
from flexcp.planner.check import check
from flexcp.planner.problem import Problem

QWEN_VL, INTERN_VL, QWEN = map(model_shape, ("qwen3-vl-8b", "internvl3-8b", "qwen3-8b"))
H100 = hardware("h100")
IMAGES = Sample(3, 3000, ((100, 1124), (1500, 1756)))


@pytest.mark.parametrize(("shape", "layers"), [(QWEN_VL, 411e6), (INTERN_VL, 302e6)])
def test_presets_hold_the_published_encoders(shape, layers):
    """Layers and projector together are what the model has beside its language model."""
    assert shape.encoder.parameters == pytest.approx(layers, rel=0.01)
    assert shape.encoder.parameters < shape.extra_parameters < 1.5 * shape.encoder.parameters


def test_seconds_of_a_sample_are_those_of_its_operations():
    """4,096 and 1,024 patches: matrices at their share of the peak, full attention at its own."""
    cost = cost_model(QWEN_VL, H100)
    sample = encoded(IMAGES, QWEN_VL, H100)
    seen, text = (cost.task_s(Load.of(s, 0), 1) for s in (sample, Sample(3, 3000)))

    encoder = QWEN_VL.encoder
    matrices = 8 * encoder.parameters * 5120 + 6 * (580e6 - encoder.parameters) * 1280
    attention = 4 * 27 * 1152 * (4096**2 + 1024**2) * 4.5
    assert encoder_flops([4096, 1024], QWEN_VL) == pytest.approx((matrices, attention))
    expected = (matrices / 0.55 + attention / 0.35) / 989e12
    assert seen - text == pytest.approx(expected, rel=1e-6)
    assert seen > 1.1 * text


def test_without_an_encoder_spans_attend_both_ways_and_with_one_they_do_not():
    assert encoded(IMAGES, QWEN, H100) is IMAGES
    sample = encoded(IMAGES, QWEN_VL, H100)
    assert (sample.spans, sample.attended_pairs) == ((), 3000 * 3001 // 2)
    assert sample.work_pairs == sample.attended_pairs + encoder_pairs([4096, 1024], QWEN_VL, H100)
    assert encoder_pairs([4096], QWEN, H100) == 0
    text = Sample(0, 5)
    assert encoded(text, QWEN_VL, H100) is text


def test_tiles_do_not_see_each_other():
    """InternVL3 cuts 4 tiles: as many operations as 4 images; Qwen3-VL sees one image as a whole."""
    assert encoder_pairs([4096], INTERN_VL, H100) == encoder_pairs([1024] * 4, INTERN_VL, H100)
    assert encoder_pairs([4096], QWEN_VL, H100) > encoder_pairs([1024] * 4, QWEN_VL, H100)


def test_images_take_memory():
    text, images = (
        memory_model(shape, 8, element_bytes=2).moments[0].bytes_per_token
        for shape in (replace(QWEN_VL, encoder=None), QWEN_VL)
    )
    assert images - text == 4 * 27 * 1152 * 2


def test_plans_carry_the_encoder_and_equal_work_is_shared():
    """Loads of problem, check and bound agree; images on several ranks are shared like attention."""
    cost, cluster = cost_model(QWEN_VL, H100), Cluster(8, 4096)
    batch = [replace(encoded(IMAGES, QWEN_VL, H100), id=i) for i in range(6)]
    batch += [Sample(i, 500 * (i - 4)) for i in range(6, 20)]
    problem = Problem.of(batch, cluster, cost, "free-running", 512)
    assert {load.pairs for load in problem.loads if load.tokens == 3000} == {
        IMAGES.causal_pairs + batch[0].encoder_pairs,  # the batch has a text of 3,000 tokens too
        IMAGES.causal_pairs,
    }
    for mode in ("free-running", "lockstep"):
        plan = make_plan(batch, cluster, cost, mode=mode)
        text = make_plan([Sample(s.id, s.tokens) for s in batch], cluster, cost, mode=mode)
        assert check(plan, cost) == ()
        assert text.step_s < plan.step_s
        assert plan.bound_s <= plan.step_s
        assert Plan.from_json(plan.to_json()) == plan


def test_image_data_is_planned_with_the_encoder(tmp_path: Path, capfd):
    lengths = tmp_path / "images.json"
    entry = {"tokens": 3000, "spans": [[100, 1124], [1500, 1756]]}
    lengths.write_text(json.dumps([entry, 3000]))
    out = tmp_path / "plan.json"
    options = ["--ranks", "2", "--tokens-per-rank", "4096", "--policy", "flexcp", "--out", str(out)]

    assert main(["plan", str(lengths), "--model", "qwen3-vl-8b", *options, "--json"]) == 0

    report = json.loads(capfd.readouterr().out)
    assert "2 images in 1 samples pass the vision encoder of qwen3-vl-8b." in report["inputs"]["notices"]
    tasks = json.loads(out.read_text())["policies"]["flexcp"]["steps"][0]["tasks"]
    pairs = sum(task["pairs"] for task in tasks)
    assert pairs == 2 * 3000 * 3001 // 2 + encoder_pairs([4096, 1024], QWEN_VL, H100)


def test_encoder_of_one_tile_by_hand():
    eye = Encoder(layers=1, hidden=2, intermediate=4, patches_per_token=4, window_patches=4)
    tiny = ModelShape("tiny", 1, 2, 1, 1, 2, 4, 8, extra_parameters=48, encoder=eye)
    assert encoder_flops([8], tiny) == (8 * 32 * 8 + 6 * 16 * 2, 4 * 2 * 32 * 4.5)
