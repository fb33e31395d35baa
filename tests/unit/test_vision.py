"""Who encodes what, how features reach their rows and gradients come back, positions, and what is refused."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from tests.reference import ThreadExchange, run_members
from tests.vision_models import (
    FAMILIES,
    IMAGE,
    MIXED,
    VisionDataset,
    model_keywords,
    tiny_vision_config,
    tiny_vision_model,
)

from flexcp.core.cluster import Cluster
from flexcp.core.errors import DataError, UnsupportedError
from flexcp.core.layout import make_layout
from flexcp.core.sample import Sample
from flexcp.cost import cost_model, hardware
from flexcp.integrations.transformers import enable, shape_of
from flexcp.integrations.transformers.config import check_supported
from flexcp.integrations.transformers.encoders import family_of
from flexcp.integrations.transformers.hooks import checkpoint_layers
from flexcp.integrations.transformers.sharing import SampleImages, deal, make_route, share_features
from flexcp.integrations.transformers.vision import vision_inputs
from flexcp.planner import make_plan
from flexcp.runtime.batches import TaskContext, planned_sample
from flexcp.runtime.sources import MapSource

WIDTH = 3


def random_images(chance: random.Random, tokens: int) -> SampleImages | None:
    """Some units on random rows; None for a sample of text."""
    units = tuple(chance.randint(1, 6) for _ in range(chance.randint(0, 5)))
    if not units or sum(units) > tokens:
        return None
    rows = np.sort(chance.sample(range(tokens), sum(units)))
    features = np.full(tokens, -1)
    features[rows] = np.arange(len(rows))
    return SampleImages(units, units, features)


@pytest.mark.parametrize("seed", range(40))
def test_features_reach_their_rows_and_gradients_come_back(seed: int) -> None:
    """Every feature is encoded by one member, arrives at its row, and gets that row's gradient."""
    chance = random.Random(seed)
    samples = tuple(Sample(i, chance.randint(1, 40)) for i in range(chance.randint(1, 5)))
    layout = make_layout(samples, chance.randint(1, 5), whole_below_tokens=chance.choice([0, 15]))
    every = {i: images for i, s in enumerate(samples) if (images := random_images(chance, s.tokens))}

    def value(index: int, feature: Any) -> Any:
        return 1000.0 * index + torch.as_tensor(feature)[:, None] + torch.arange(WIDTH) / 10

    def work(exchange: ThreadExchange) -> tuple[Any, ...]:
        held = {piece.index for piece in layout.pieces(exchange.member)}
        images = {index: every[index] for index in held if index in every}
        route = make_route(layout, exchange.member, images)
        encoded = []
        for index, unit in route.encode:
            first = sum(every[index].units[:unit])
            encoded.append(value(index, np.arange(first, first + every[index].units[unit])))
        features = torch.cat([*encoded, torch.zeros(0, WIDTH)]).requires_grad_(bool(encoded))
        if not images:
            return route.encode, features, None
        shared = share_features(features, route, exchange, trained=True)
        expected = [
            value(piece.index, (f := every[piece.index].features[piece.start : piece.stop])[f >= 0])
            for piece in layout.pieces(exchange.member)
            if piece.index in every
        ]
        assert torch.equal(shared, torch.cat(expected))
        assert shared.requires_grad
        (shared * (2 * shared.detach() + 1)).sum().backward()
        if encoded:
            assert torch.equal(features.grad, 2 * features.detach() + 1)
        return route.encode, features, shared

    done = run_members(layout.degree, work)
    encoded = sorted(unit for units, _, _ in done for unit in units)
    assert encoded == [(index, unit) for index in sorted(every) for unit in range(len(every[index].units))]


def test_nothing_asks_for_a_gradient_behind_a_frozen_encoder() -> None:
    layout = make_layout((Sample(0, 8),), 1, 0)
    images = {0: SampleImages((2,), (1,), np.array([-1, 0, 1, -1, -1, -1, -1, -1]))}

    def work(exchange: ThreadExchange) -> bool:
        route = make_route(layout, 0, images)
        return share_features(torch.ones(2, WIDTH), route, exchange, trained=False).requires_grad

    assert run_members(1, work) == [False]


def test_work_is_dealt_evenly() -> None:
    """Frames of a video evenly, a dear image alone, samples of one image in turn."""
    assert [deal([1] * 40, [0, 1, 2], 0).count(m) for m in range(3)] == [14, 13, 13]
    assert deal([9, 1, 1, 1], [0, 1], 0) == [0, 1, 1, 1]
    assert [deal([5], [0, 1, 2], turn)[0] for turn in range(4)] == [0, 1, 2, 0]


@pytest.mark.parametrize("family", FAMILIES)
def test_features_stand_where_the_model_puts_them(family: str) -> None:
    """The parts encoded one by one, put where they belong: the hidden states that the model itself makes."""
    model, dataset = tiny_vision_model(family).eval(), VisionDataset(family, MIXED)
    rule: Any = family_of(model.config)
    seen: list[torch.Tensor] = []
    handle = model.model.language_model.register_forward_pre_hook(
        lambda _, __, keywords: seen.append(keywords["inputs_embeds"]), with_kwargs=True
    )
    for example in dataset.examples:
        images = rule.images(example)
        with torch.no_grad():
            model(**model_keywords(family, example))
            if images is None:
                continue
            alone = [
                rule.encode(model, [(example, u)], torch.device("cpu")) for u in range(len(images.units))
            ]
        assert [len(features) for features in alone] == list(images.units)
        rows = np.flatnonzero(images.features >= 0)
        theirs = seen[-1][0, rows]
        ours = torch.cat(alone)[images.features[rows]][:, : theirs.shape[1]]
        assert torch.allclose(ours, theirs, atol=1e-6)
    handle.remove()


def test_positions_are_those_of_the_uncut_sample() -> None:
    """D51, D53: three axes, cut by rows after they were counted; a text in the same pack counts its rows."""
    model, dataset = tiny_vision_model("qwen3_vl").eval(), VisionDataset("qwen3_vl", MIXED)
    picked = (2, 6, 5)
    samples = tuple(dataset.sample(i) for i in picked)
    whole = {}
    for place, index in enumerate(picked):
        keywords = model_keywords("qwen3_vl", dataset[index])
        grids = {k: v for k, v in keywords.items() if "grid" in k}
        whole[place], _ = model.model.get_rope_index(
            keywords["input_ids"], mm_token_type_ids=keywords["mm_token_type_ids"], **grids
        )
    assert torch.equal(whole[1][0, 0], torch.arange(64))
    for degree in (2, 3):
        layout = make_layout(samples, degree, 0)

        def work(exchange: ThreadExchange, layout: Any = layout) -> Any:
            pieces = layout.pieces(exchange.member)
            examples = {place: dataset[index] for place, index in enumerate(picked)}
            ids = np.concatenate([examples[p.index]["input_ids"][p.start : p.stop] for p in pieces])
            context = TaskContext(layout, exchange, 0, examples)  # type: ignore[arg-type]
            rule: Any = family_of(model.config)
            with torch.no_grad():
                inputs = vision_inputs(model, rule, context, {"input_ids": torch.from_numpy(ids)[None]})
            expected = torch.cat([whole[p.index][:, :, p.start : p.stop] for p in pieces], dim=2)
            features = sum(
                part.shape[0] for out in inputs["mm_encoder_outputs"].values() for part in out.pooler_output
            )
            return torch.equal(inputs["position_ids"], expected), features == int((ids >= IMAGE).sum())

        assert run_members(degree, work) == [(True, True)] * degree


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_whose_images_do_not_fit_are_named(family: str) -> None:
    """D54: a cut-off image, a missing image, and a plan that was made with another mask."""
    dataset = VisionDataset(family, MIXED)
    rule: Any = family_of(tiny_vision_config(family))

    def refused(example: dict[str, Any], spans: Any) -> str:
        sample = Sample(17, len(example["input_ids"]), spans)
        layout = make_layout((sample,), 1, 0)
        context = TaskContext(layout, ThreadExchange.__new__(ThreadExchange), 0, {0: example})  # type: ignore[arg-type]
        with pytest.raises(DataError, match=r"^sample 17 of the data set: ") as caught:
            vision_inputs(None, rule, context, {})
        return caught.value.cause

    example = dict(dataset[0])
    short = {
        **example,
        "input_ids": np.where(np.arange(len(example["input_ids"])) == 11, 1, example["input_ids"]),
    }
    tokens = int((np.asarray(short["input_ids"]) == IMAGE).sum())
    total = int((np.asarray(example["input_ids"]) == IMAGE).sum())
    assert tokens == total - 1
    assert f"it has {tokens} image tokens, and its images give {total} features" in refused(short, ())
    wrong = () if family == "gemma3" else ((3, 5),)
    assert "full-attention spans" in refused(example, wrong)
    if family == "qwen3_vl":
        cut = {**example, "pixel_values": example["pixel_values"][:-1]}
        assert refused(cut, ()).endswith("its pixel_values hold 47 patches, its image_grid_thw 48")


def test_images_are_left_to_the_data_set() -> None:
    """Pixels given to the call would be encoded by every rank and merged into cut rows."""
    model = tiny_vision_model("internvl")
    context = TaskContext(make_layout((Sample(0, 3),), 1, 0), ThreadExchange.__new__(ThreadExchange), 0)  # type: ignore[arg-type]
    with enable(model), pytest.raises(UnsupportedError, match="the model was called with pixel_values"):
        model(input_ids=torch.ones(1, 3).long(), pixel_values=torch.ones(1), flexcp=context)


def test_a_model_is_as_good_as_its_language_model() -> None:
    """InternVL comes with many; one that has not been shown to be exact is refused."""
    config = tiny_vision_config("internvl")
    check_supported(config)
    config.text_config.model_type = "gpt2"
    with pytest.raises(UnsupportedError, match="models of type 'gpt2' have not been shown"):
        check_supported(config)


def test_encoders_keep_their_own_attention() -> None:
    model = tiny_vision_model("qwen3_vl")
    with enable(model):
        assert model.config.text_config._attn_implementation == "flexcp"
        assert model.config.vision_config._attn_implementation == "sdpa"
    assert model.config.text_config._attn_implementation == "sdpa"


@pytest.mark.parametrize("family", FAMILIES)
def test_an_older_transformers_is_refused(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take the keyword for one of attention's and drop the features."""
    model = tiny_vision_model(family)

    def forward(self: Any, input_ids: Any, pixel_values: Any = None, **keywords: Any) -> None: ...

    with monkeypatch.context() as patch:
        patch.setattr(type(model), "forward", forward)
        with pytest.raises(UnsupportedError, match="takes no images that are encoded already"):
            enable(model)
    with enable(model):
        pass


def one_rank_gradients(
    model: Any, dataset: VisionDataset, indices: tuple[int, ...], dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """Gradients of the summed loss of a pack on one rank."""
    layout = make_layout(tuple(dataset.sample(i) for i in indices), 1, 0)
    examples = {place: dataset[index] for place, index in enumerate(indices)}
    ids = torch.from_numpy(np.concatenate([examples[p.index]["input_ids"] for p in layout.pieces(0)]))[None]
    positions = torch.cat([torch.arange(p.rows) for p in layout.pieces(0)])[None]

    def work(exchange: ThreadExchange) -> None:
        context = TaskContext(layout, exchange, 0, examples)  # type: ignore[arg-type]
        with enable(model), torch.autocast("cpu", dtype, enabled=dtype is not None):
            logits = model(input_ids=ids, position_ids=positions, flexcp=context).logits
            logits.float().log_softmax(-1)[0, :, 0].sum().backward()

    model.zero_grad()
    run_members(1, work)
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputed_layers_and_autocast(family: str) -> None:
    """Layers of encoder and decoder that are run again give the same gradients; bf16 gives them roughly."""
    model, dataset = tiny_vision_model(family), VisionDataset(family, MIXED)
    expected = one_rank_gradients(model, dataset, (0, 2, 6))
    checkpoint_layers(model)
    for name, grad in one_rank_gradients(model, dataset, (0, 2, 6)).items():
        assert torch.allclose(grad, expected[name], rtol=1e-5, atol=1e-6), name

    largest = max(float(grad.abs().max()) for grad in expected.values())
    for name, grad in one_rank_gradients(model, dataset, (0, 2, 6), torch.bfloat16).items():
        assert float((grad - expected[name]).norm() / (expected[name].norm() + 1e-3 * largest)) < 0.1, name


class Told:
    """Data that say themselves how the planner is to see them."""

    lengths = np.array([30, 5])

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> dict[str, Any]:
        raise AssertionError("nothing is read for a plan")

    def sample(self, index: int) -> Sample:
        return Sample(index, int(self.lengths[index]), ((2, 5),), 10**7 + index)


def test_the_planner_sees_what_the_data_say() -> None:
    """Spans and encoder work reach it unread; without `sample`, lengths alone; contradictions are refused."""
    source = MapSource(Told(), lambda step: [1, 0], 0)
    assert source.samples(0) == (Sample(1, 5, ((2, 5),), 10**7 + 1), Sample(0, 30, ((2, 5),), 10**7))
    cost = cost_model(shape_of(tiny_vision_config("qwen3_vl")), hardware("cpu"))
    plan = make_plan(source.samples(0), Cluster(2, 100), cost)
    text = make_plan([Sample(1, 5, ((2, 5),)), Sample(0, 30, ((2, 5),))], Cluster(2, 100), cost)
    assert plan.step_s > text.step_s
    assert planned_sample(VisionDataset("internvl", MIXED), 1) == Sample(1, 31)

    told = Told()
    told.lengths = np.array([30, 6])
    told.sample = lambda index: Sample(index, 5)  # type: ignore[method-assign]
    with pytest.raises(DataError, match=r"sample\(1\) is sample 1 of 5 tokens; by its lengths it has 6"):
        planned_sample(told, 1)
