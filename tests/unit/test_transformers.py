"""Models of transformers: selected and restored by name, and refused by name where they would be wrong."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.group_of_threads import one_pack
from tests.models import VOCAB, ListDataset, relative_error, tiny_model
from torch import nn
from transformers import LlamaConfig, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, StaticCache

import flexcp
from flexcp.core.cluster import Cluster
from flexcp.core.errors import UnsupportedError
from flexcp.core.model_shape import ModelShape
from flexcp.core.plan import Plan, Task
from flexcp.core.sample import Sample
from flexcp.integrations.transformers import blocks_of, disable, enable, is_enabled, shape_of
from flexcp.integrations.transformers.config import SUPPORTED_MODELS, check_supported
from flexcp.integrations.transformers.hooks import checkpoint_layers
from flexcp.runtime.batches import make_micro_batch
from flexcp.runtime.sharding import shard, sharding_of
from flexcp.runtime.transport import Transport

LENGTHS = [9, 1, 14]


@pytest.fixture(scope="module")
def transport(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Transport]:
    """A world of one rank, in this process."""
    store = tmp_path_factory.mktemp("world") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield Transport()
    dist.destroy_process_group()


@pytest.fixture
def inputs(transport: Transport) -> dict[str, Any]:
    """A pack of three samples on one rank, as the engine would hand it to the model."""
    samples = tuple(Sample(i, tokens) for i, tokens in enumerate(LENGTHS))
    plan = Plan("test", "lockstep", Cluster(1, 99), 0, samples, (Task((0, 1, 2), (0,), 0, 0.0, 1.0),), 1.0)
    generator = np.random.default_rng(3)
    examples = {i: {"input_ids": generator.integers(0, VOCAB, n)} for i, n in enumerate(LENGTHS)}
    return make_micro_batch(plan, plan.tasks[0], examples, transport).inputs


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_pack_on_one_rank_equals_its_samples(family: str, inputs: dict[str, Any]) -> None:
    """D12: inside the block nobody attends across documents; outside, the model is what it was."""
    model = tiny_model(family).eval()
    ids = inputs["input_ids"]
    with torch.no_grad():
        alone = torch.cat([model(input_ids=part).logits for part in ids.split(LENGTHS, dim=1)], dim=1)
        before = model(input_ids=ids).logits
        with enable(model) as enabled:
            assert enabled is model
            packed = model(**inputs).logits
        after = model(input_ids=ids).logits

    assert relative_error(packed, alone) <= 1e-5
    assert relative_error(before, alone) > 1e-2  # so the comparison can fail
    assert torch.equal(after, before)
    assert inputs["flexcp"].calls == 2  # once per layer


def test_no_cache_is_filled_and_a_model_saved_meanwhile_keeps_its_own(
    inputs: dict[str, Any], tmp_path: Path
) -> None:
    """Who loads it generates with a cache; transformers fills one also in training, unless it is told."""
    model = tiny_model()
    assert model.config.use_cache
    with enable(model):
        assert model(**inputs).past_key_values is None
        model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["use_cache"] is True


def test_leaving_the_block_restores_the_config() -> None:
    """Also when the block raises, and for a model that had caching off."""
    model = tiny_model()
    model.set_attn_implementation("eager")
    for cached in (True, False):
        model.config.use_cache = cached
        with enable(model):
            assert model.config._attn_implementation == "flexcp"
            assert model.config.use_cache is cached
        assert (model.config._attn_implementation, model.config.use_cache) == ("eager", cached)
    with pytest.raises(KeyError, match="mine"), enable(model):
        raise KeyError("mine")
    assert model.config._attn_implementation == "eager"


def test_two_calls_are_the_same_as_a_block(inputs: dict[str, Any]) -> None:
    """And a model is enabled once: what would be restored after the second call?"""
    model = tiny_model().eval()
    hooks = [len(model._forward_hooks), len(model._forward_pre_hooks)]
    with torch.no_grad():
        with enable(model):
            packed = model(**inputs).logits
        assert not is_enabled(model)
        enable(nn.Sequential(model))  # what wraps it does not matter
        assert is_enabled(model)
        assert torch.equal(model(**inputs).logits, packed)
        with pytest.raises(UnsupportedError, match=r"the model is enabled already\nLeave one of the two"):
            enable(model)
        disable(model)
        disable(model)
    assert model.config._attn_implementation == "sdpa"
    assert [len(model._forward_hooks), len(model._forward_pre_hooks)] == hooks


def test_a_rank_holds_fewer_rows_than_the_pack() -> None:
    """D49: sharding took place: local rows below the pack's at every degree above 1, and none twice."""
    data = ListDataset([40, 11, 3])
    for degree in (2, 3, 5):
        micros = one_pack(tiny_model(), data, range(3), degree).micros
        rows = [micro.inputs["input_ids"].shape[1] for micro in micros]
        assert max(rows) <= -(-54 // degree)
        assert sum(rows) == 54
        assert [micro.inputs["flexcp"].calls for micro in micros] == [2] * degree  # once a layer


def test_positions_restart_in_every_document() -> None:
    """D16: two documents of 4 tokens on 2 ranks: each has rows of both, by the positions of its document."""
    micros = one_pack(tiny_model(), ListDataset([4, 4], unlabelled=()), range(2), 2).micros
    assert [micro.inputs["position_ids"].tolist() for micro in micros] == [[[0, 3, 0, 3]], [[1, 2, 1, 2]]]


def test_a_compiled_wrapper_is_looked_into(transport: Transport) -> None:
    """Else DDP would average gradients in the middle of a step, under a reduction of our own."""
    wrapped = shard(tiny_model(), "ddp")
    compiled = torch.compile(wrapped, backend="eager")
    sharding = sharding_of(compiled)  # type: ignore[arg-type]
    sharding.begin()
    assert wrapped.require_backward_grad_sync is False
    assert is_enabled(compiled) is False  # type: ignore[arg-type]


def test_nothing_private_of_transformers_is_imported() -> None:
    """D65: names that begin with an underscore, and modules that transformers moves about, may go any day."""
    root = Path(flexcp.__file__).parent
    imported = set()
    for path in [*root.glob("integrations/transformers/*.py"), *root.glob("train/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            if module.split(".")[0] in ("transformers", "trl", "peft"):
                imported.update((module, alias.name) for alias in node.names)
    assert {module for module, _ in imported} == {
        "transformers",
        "transformers.modeling_outputs",
    }  # documented
    assert all(name[0] != "_" for _, name in imported)
    assert len(imported) > 5


class _OwnAttention(nn.Module):
    """A layer that goes its own way: right rows, and nobody else's."""

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        return hidden_states, None


def test_a_layer_that_ignores_the_registry_is_found(inputs: dict[str, Any]) -> None:
    """At the first forward, by the number of layers that did call."""
    model = tiny_model(layers=3)
    model.model.layers[1].self_attn = _OwnAttention()
    with enable(model), pytest.raises(UnsupportedError) as caught:
        model(**inputs)

    assert str(caught.value) == (
        "2 of 3 layers of Qwen3ForCausalLM ran FlexCP attention\n"
        "A layer that takes its attention from elsewhere attends to the rows of one rank alone."
    )


def test_a_model_written_before_the_registry_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers leaves its attention as it is and only logs so."""
    model = tiny_model()
    monkeypatch.setattr(type(model), "_can_set_attn_implementation", classmethod(lambda _: False))
    with pytest.raises(
        UnsupportedError, match="Qwen3ForCausalLM does not take its attention from the regist"
    ):
        enable(model)
    assert not is_enabled(model)
    assert not model._forward_hooks


@pytest.mark.parametrize(
    ("more", "cause"),
    [
        ({"labels": torch.zeros(1, 24, dtype=torch.int64)}, "the model was called with labels"),
        ({"use_cache": True}, "the model was called with use_cache"),
        ({"past_key_values": StaticCache(LlamaConfig(num_hidden_layers=2), 8)}, ".* with past_key_values"),
        ({"logits_to_keep": 1}, "the model was called with logits_to_keep"),
        ({"position_ids": None}, "the model was called without position_ids, so rows would count from 0"),
        ({"position_ids": torch.arange(24)[None]}, "the model was called with other position_ids than the"),
        ({"input_ids": torch.zeros(1, 23, dtype=torch.int64)}, ".* with 23 rows; the plan gives 24 of 24 to"),
    ],
)
def test_calls_that_would_come_out_wrong_are_refused(
    inputs: dict[str, Any], more: dict[str, Any], cause: str
) -> None:
    """D19, D48: labels would be shifted by the rows of a rank, and a cache holds none of the others'."""
    model = tiny_model()
    with enable(model), pytest.raises(UnsupportedError, match=cause):
        model(**{**inputs, **more})


def test_a_window_is_that_of_layer_and_mask(inputs: dict[str, Any]) -> None:
    """D46: read from one place and applied in another; a layer that does not say it still gets it."""
    model = tiny_model("qwen2 window")
    layer = model.model.layers[1].self_attn
    with enable(model), torch.no_grad():
        expected = model(**inputs).logits
        layer.sliding_window = None
        assert torch.equal(model(**inputs).logits, expected)  # the mask says so
        layer.sliding_window = 4
        with pytest.raises(UnsupportedError, match="Qwen2Attention has a window of 4 rows and a mask of 9"):
            model(**inputs)


def test_wrappers_are_looked_into_and_two_models_refused() -> None:
    first, second = tiny_model(), tiny_model("llama")
    with pytest.raises(
        UnsupportedError, match="Sequential holds several models: Qwen3ForCausalLM, LlamaModel"
    ):
        enable(nn.Sequential(first, second.model))
    prompted = nn.Sequential(first)
    prompted.peft_config = {"default": type("Prompt", (), {"is_prompt_learning": True})()}  # type: ignore[assignment]
    with pytest.raises(UnsupportedError, match="Sequential puts virtual tokens before every sample"):
        enable(prompted)


def test_a_balance_that_would_not_be_trained_is_refused() -> None:
    """D58: under reentrant checkpointing the routers' logits come without a gradient."""
    model = tiny_model("qwen3_moe")
    checkpoint_layers(model, use_reentrant=True)
    data = ListDataset([12, 9])
    with pytest.raises(
        UnsupportedError, match="auxiliary loss has no gradient under reentrant gradient check"
    ):
        one_pack(model, data, range(2), 1)


def test_only_models_of_transformers_are_taken() -> None:
    with pytest.raises(UnsupportedError) as caught, enable(nn.Linear(2, 2)):
        pass

    assert str(caught.value) == (
        "Linear is not a transformers model\n"
        "Call flexcp.attention.group_attention in your own attention layer."
    )


@pytest.mark.parametrize(
    ("changes", "cause", "remedy"),
    [
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope_type 'dynamic' depends on the longest position a rank sees, which differs inside a group",
            "Use a fixed rope_type (default, linear, yarn, llama3).",
        ),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1", "Set attention_dropout to 0."),
        (
            {"layer_types": ["full_attention", "chunked_attention"]},
            "some layers are of another kind than FlexCP computes (chunked_attention)",
            "Layers may be full_attention or sliding_attention.",
        ),
    ],
)
def test_configs_that_would_come_out_wrong_are_refused(
    changes: dict[str, Any], cause: str, remedy: str
) -> None:
    """D46: before step 0, and without touching the model."""
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCAB,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=64,
            **changes,
        )
    )
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedError) as caught, enable(model):
        pass

    assert (caught.value.cause, caught.value.remedy) == (cause, remedy)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"alibi": 50}, "alibi=50"),
        ({"is_causal": False, "alibi": 50}, "alibi=50, is_causal=False"),
        ({"cu_seq_lens_q": torch.zeros(3), "max_length_q": 9}, "cu_seq_lens_q=a tensor, max_length_q=9"),
        ({"is_causal": False}, "is_causal=False"),
    ],
)
def test_options_are_refused_and_never_dropped(
    inputs: dict[str, Any], extra: dict[str, Any], words: str
) -> None:
    """D48, D50: an unknown keyword of the model call reaches attention, and attention says no."""
    model = tiny_model()
    with enable(model), pytest.raises(UnsupportedError) as caught:
        model(**inputs, **extra)

    assert str(caught.value) == (
        f"Qwen3Attention asks for {words}, which FlexCP attention does not compute\n"
        "Switch the option off in the model's config; FlexCP never drops an option in silence."
    )
    with enable(model):
        model(**inputs, is_causal=True, alibi=None)  # which asks for nothing


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
@pytest.mark.parametrize("mask", [torch.ones(1, sum(LENGTHS)), torch.zeros(1, 1, 24, 24)])
def test_a_mask_is_refused(family: str, mask: torch.Tensor, inputs: dict[str, Any]) -> None:
    """D48: transformers drops one of padding for an attention that it does not know. Also by position."""
    model = tiny_model(family)
    others = {name: value for name, value in inputs.items() if name != "input_ids"}
    with enable(model):
        for call in (
            lambda: model(**inputs, attention_mask=mask),
            lambda: model(inputs["input_ids"], mask, **others),
        ):
            with pytest.raises(UnsupportedError) as caught:
                call()
            assert str(caught.value) == (
                "the model was called with an attention_mask, which FlexCP attention does not compute\n"
                "Leave it out: packs have no padding, and who attends to whom is in the plan."
            )
    model(input_ids=inputs["input_ids"], attention_mask=torch.ones(1, sum(LENGTHS)))  # outside: as ever


def test_layers_are_asked_as_well(inputs: dict[str, Any]) -> None:
    """D25, D48: dropout of a layer and a layer that is not causal."""
    model = tiny_model()
    with enable(model):
        model.model.layers[1].self_attn.attention_dropout = 0.25
        with pytest.raises(UnsupportedError, match=r"Qwen3Attention asks for dropout=0\.25,"):
            model(**inputs)
        model.eval()(**inputs)  # dropout is for training
        model.model.layers[1].self_attn.is_causal = False
        with pytest.raises(UnsupportedError, match="Qwen3Attention asks for is_causal=False,"):
            model(**inputs)


def test_a_call_without_a_task_is_refused(inputs: dict[str, Any]) -> None:
    """D49: a model that is enabled but called as before would attend within its local rows only."""
    model = tiny_model()
    del inputs["flexcp"]
    for more in ({}, {"flexcp": "a task"}):
        with enable(model), pytest.raises(UnsupportedError) as caught:
            model(**inputs, **more)
        assert str(caught.value) == (
            "Qwen3Attention was called without a FlexCP task\n"
            "Call the model as model(**micro.inputs), inside `with enable(model)`."
        )


def test_shapes_are_read_from_configs() -> None:
    """D29: grouped heads, a width of heads of its own, and what older configs leave out."""
    qwen = Qwen3Config(
        vocab_size=1000,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=40,
        num_key_value_heads=8,
        head_dim=16,
        intermediate_size=96,
        tie_word_embeddings=True,
    )
    llama = LlamaConfig(
        vocab_size=500, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128
    )

    assert shape_of(qwen) == ModelShape("qwen3", 3, 64, 40, 8, 16, 96, 1000, tied=True)
    assert shape_of(llama) == ModelShape("llama", 2, 64, 4, 4, 16, 128, 500, tied=False)


def test_blocks_are_the_decoder_layers() -> None:
    model = tiny_model(layers=3)
    assert blocks_of(model) == list(model.model.layers)
    assert len(blocks_of(nn.Sequential(model))) == 3
    with pytest.raises(UnsupportedError, match=r"Linear has no list of layers\nPass the blocks yourself\."):
        blocks_of(nn.Linear(2, 2))


def test_the_model_of_a_run_comes_from_its_config(tmp_path: Path) -> None:
    """A config folder is read as it is; one whose vocabulary is too small is refused."""
    from flexcp.core.errors import ConfigError
    from flexcp.train.config import ModelSection
    from flexcp.train.model import model_config

    LlamaConfig(vocab_size=300, hidden_size=32).save_pretrained(tmp_path)
    section = ModelSection(config=tmp_path)
    assert model_config(section, 257, 64).hidden_size == 32
    with pytest.raises(ConfigError, match="the tokenizer has 301 tokens, the model's vocabulary only 300"):
        model_config(section, 301, 64)
    with pytest.raises(ConfigError, match=r"model\.config .*nowhere.*\nGive a folder with a config\.json\."):
        model_config(ModelSection(config=tmp_path / "nowhere"), 257, 64)


@pytest.mark.parametrize(
    "family", ["lfm2", "qwen3_next", "falcon_h1", "llama4_text", "jamba", "gpt2", "gemma3n"]
)
def test_models_not_shown_to_be_exact_are_refused(family: str) -> None:
    """Hybrids mix tokens outside of attention: their gradients would be wrong and the loss hardly show it."""
    config = type("Config", (), {"model_type": family})()

    with pytest.raises(UnsupportedError, match=f"models of type '{family}' have not been shown") as caught:
        check_supported(config)
    assert caught.value.remedy == f"Supported: {', '.join(SUPPORTED_MODELS)}."
