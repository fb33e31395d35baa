"""What a run says before step 0: only where there is something to say, and with the numbers."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import Qwen3Config

from flexcp.runtime.launch import World
from flexcp.train import notices as notices_module
from flexcp.train.config import TrainConfig
from flexcp.train.corpus import Corpus, Subset
from flexcp.train.notices import notices

WORLD = World(rank=0, size=4, local_size=4, device=torch.device("cpu"))


@pytest.fixture
def told(tmp_path, monkeypatch):
    """The notices of a run on four ranks of 1,000 tokens, whose model was made for 2,048 positions."""
    monkeypatch.setattr(notices_module, "num_cores", lambda: 4)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen3Config(vocab_size=300, head_dim=8, max_position_embeddings=2048, **shape)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))

    def tell(longest, *, warmup=2, left=3):
        given = TrainConfig.model_validate(
            {
                "model": {"config": str(tmp_path)},
                "data": {"path": str(tmp_path)},
                "parallel": {"tokens_per_rank": 1000},
                "optimizer": {"warmup_steps": warmup},
                "run": {"folder": tmp_path / "run", "steps": 10, "global_batch": 2},
            }
        )
        lengths = SimpleNamespace(lengths=np.array([5, longest]))
        samples = Subset(lengths, np.arange(2))
        return list(notices(given, Corpus(samples, None, 300, None, {}, ()), WORLD, left))

    return tell


def test_a_run_that_is_well_says_nothing(told):
    assert told(2048, warmup=9) == []


def test_more_ranks_than_cores(told, monkeypatch):
    monkeypatch.setattr(notices_module, "num_cores", lambda: 3)
    [text] = told(100)
    assert text.startswith("4 ranks share 3 cores: they take turns")


def test_longer_than_the_model_was_made_for(told):
    [text] = told(2049)
    assert text.startswith("the longest sample has 2,049 tokens, the model was made for 2,048")
    assert "data.max_tokens" in text


def test_a_warm_up_that_never_ends(told):
    [text] = told(100, warmup=10)
    assert text.startswith("optimizer.warmup_steps is 10 and run.steps 10: ")


def test_a_sample_that_fewer_ranks_could_not_hold(told):
    [text] = told(2001, left=2)
    assert "if ranks are lost, those left (2) hold 2,000" in text
