"""A training loop of your own on flexible groups: 3 CPU ranks, a tiny Qwen3, samples of 20 to 900 tokens.

python examples/own_loop.py
"""

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

import flexcp


class Numbers:
    """Any map-style data with lengths will do; here: counting upwards, with a long tail of lengths."""

    def __init__(self, samples: int) -> None:
        chance = np.random.default_rng(0)
        self.lengths = np.minimum(900, 20 * (1 + chance.pareto(0.7, samples))).astype(int)
        self.starts = chance.integers(0, 100, samples)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"input_ids": (self.starts[index] + np.arange(self.lengths[index])) % 100}


def train(world: flexcp.World) -> None:
    """What every rank runs."""
    config = Qwen3Config(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model = flexcp.shard(model, "fsdp2", blocks=flexcp.transformers.blocks_of(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    shape = flexcp.transformers.shape_of(config)
    cost = flexcp.cost_model(shape, flexcp.hardware("cpu"), checkpointing=False)
    cluster = flexcp.Cluster(ranks=world.size, tokens_per_rank=300)
    planner = flexcp.Planner(cluster, cost, whole_below_tokens=64)
    dataset = Numbers(200)

    engine = flexcp.Engine(model, optimizer, planner, dataset, global_batch=24, steps=12)
    with flexcp.transformers.enable(model), engine:
        for step in engine:
            for micro in step:
                step.backward(model(**micro.inputs), micro)
            report = step.finish()
            if world.rank == 0 and step.index % 3 == 2:
                longest = max(sample.tokens for sample in step.plan.samples)
                degrees = ", ".join(f"{n} on {d}" for d, n in report.degrees.items())
                print(
                    f"step {step.index + 1:2}  loss {report.loss:.1f}  longest {longest:3}  packs: {degrees}"
                )


if __name__ == "__main__":
    flexcp.launch(train, 3)
