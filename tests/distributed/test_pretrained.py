"""A run that starts from the folder of a model, learns what the assistant says, and leaves such a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from flexcp.core.errors import ConfigError
from tests.harness import run_ranks
from tests.models import reference_step
from tests.trainers.sft import example


def make_folder(folder: Path) -> None:
    """A model, its tokenizer, and chats."""
    made = example()
    tokenizer = made.tiny_tokenizer()
    torch.manual_seed(11)
    made.tiny_model(len(tokenizer)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    chats = made.made_up_chats(14, seed=2)
    (folder / "chats.jsonl").write_text("\n".join(json.dumps({"messages": c}) for c in chats["messages"]))


def make_config(folder: Path, **model: Any) -> Any:
    from flexcp.train.config import load_config

    run = f"""
    [model]
    pretrained = "{folder / "model"}"
    [data]
    path = "{folder / "chats.jsonl"}"
    chat_column = "messages"
    eval_samples = 4
    [parallel]
    tokens_per_rank = 700
    whole_below_tokens = 0
    learn_costs = false
    [optimizer]
    lr = 1e-2
    [run]
    folder = "{folder / "run"}"
    steps = 3
    global_batch = 10
    trackers = []
    timeout_s = 60
    """
    path = folder / "run.toml"
    path.write_text(run)
    return load_config(path, [f"model.{key}={value}" for key, value in model.items()])


def train_on_rank(
    world: Any, folder: Path
) -> tuple[list[float | None], dict[int, float], list[dict[int, int]]]:
    from flexcp.train.trainer import train

    summary = train(world, make_config(folder), quiet=True)
    return [r.loss for r in summary.reports], summary.eval_losses, [r.degrees for r in summary.reports]


def test_a_model_goes_in_and_comes_out_trained(tmp_path: Path) -> None:
    """The first loss is that of the folder's weights, the last evaluation that of the folder left behind."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from flexcp.train.corpus import open_corpus

    make_folder(tmp_path)
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    config = make_config(tmp_path)
    [losses, evaluated, degrees], _ = run_ranks(train_on_rank, 2, tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flexcp.train.corpus.on_first_rank", lambda open_it, _: open_it())
        corpus = open_corpus(config.data, lambda _: 1400, config.run.seed, lambda *_: None)
    assert corpus.evaluation is not None

    assert max(max(step) for step in degrees) == 2
    assert losses[0] == pytest.approx(reference_step(before, corpus.train, range(10)), rel=1e-5)
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert evaluated[3] == pytest.approx(reference_step(after, corpus.evaluation, range(4)), rel=1e-5)
    assert not torch.equal(after.lm_head.weight, before.lm_head.weight)
    assert {path.suffix for path in (tmp_path / "run" / "model").glob("model*")} == {".safetensors"}
    assert after.config.use_cache  # as it was, not as it is while it trains
    assert type(after).__name__ == "Qwen3ForCausalLM"
    ours, theirs = (AutoTokenizer.from_pretrained(tmp_path / part / "model") for part in ("", "run"))
    assert ours.chat_template == theirs.chat_template


def test_folders_that_cannot_be_started_from_are_refused(tmp_path: Path) -> None:
    """Before any rank is started, except for what only loading shows."""
    from flexcp.train.config import ModelSection, RunSection
    from flexcp.train.model import build_model, model_config

    make_folder(tmp_path)
    assert make_config(tmp_path).data.tokenizer == str(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"model\.pretrained .*nowhere is no folder of a model"):
        make_config(tmp_path, pretrained=tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"model\.pretrained is given, and model\.hidden too\n"):
        make_config(tmp_path, hidden=64)
    section = ModelSection(pretrained=tmp_path / "model")
    config, cpu = model_config(section, 257, 64), torch.device("cpu")
    config.num_hidden_layers, config.layer_types = 3, ["full_attention"] * 3
    with pytest.raises(
        ConfigError, match=r"lacks 11 weights, model\.layers\.2\.input_layernorm\.weight among them"
    ):
        build_model(config, RunSection(), cpu, section.pretrained)
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(
        ConfigError, match=r"model\.pretrained .*\nGive a folder with config\.json and model\.safe"
    ):
        build_model(model_config(section, 257, 64), RunSection(), cpu, section.pretrained)
