"""A small real model and data for the scripts that compute: Qwen3 of a few layers, random tokens."""

from __future__ import annotations

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from flexcp.cost import cost_model, hardware
from flexcp.integrations.transformers import shape_of

VOCAB = 512


def small_model(layers=4, hidden=128):
    """The same weights on every call."""
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1 << 17,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).train()


def small_cost():
    """What the planner knows of it on one core of this kind."""
    return cost_model(shape_of(small_model().config), hardware("cpu"), checkpointing=False)


class RandomTokens:
    """Samples of given lengths, a function of their index."""

    def __init__(self, lengths):
        self.lengths = np.asarray(lengths, dtype=np.int64)

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return {"input_ids": np.random.default_rng(index).integers(0, VOCAB, self.lengths[index])}
