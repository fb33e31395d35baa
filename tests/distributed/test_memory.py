"""M(s) beside the resident memory of a real rank, with an allocator that returns what is freed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from flexcp.cost import memory_model
from tests.harness import run_ranks

MODEL = {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4}
MODEL |= {"head_dim": 32, "intermediate_size": 768, "vocab_size": 4096, "tie_word_embeddings": True}
TOKENS = 1024


def status_bytes(which: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(which))


def peak(world: Any, checkpointing: bool) -> tuple[int, int, Any]:
    """Resident bytes before the model is there and at the peak of two packs a step; its shape."""
    import numpy as np
    import torch
    from transformers import Qwen3Config

    import flexcp
    from flexcp.train.config import RunSection
    from flexcp.train.model import build_model

    torch.set_num_threads(1)
    for options, tokens in ((MODEL | {"num_hidden_layers": 1, "vocab_size": 64}, 32), (MODEL, TOKENS)):
        base = status_bytes("VmRSS")  # the second time, all code has been loaded by the first
        config = Qwen3Config(**options)
        model = build_model(config, RunSection(gradient_checkpointing=checkpointing), world.device)
        optimizer = torch.optim.AdamW(model.parameters())
        shape = flexcp.transformers.shape_of(config)
        Path("/proc/self/clear_refs").write_text("5")
        cost = flexcp.cost_model(shape, flexcp.hardware("cpu"))
        planner = flexcp.Planner(flexcp.Cluster(1, tokens), cost)

        class Data:
            lengths = np.array([tokens] * 2)

            def __len__(self) -> int:
                return 2

            def __getitem__(self, index: int, tokens: int = tokens) -> dict[str, Any]:
                return {"input_ids": np.arange(tokens) % 64}

        with (
            flexcp.transformers.enable(model),
            flexcp.Engine(model, optimizer, planner, Data(), global_batch=2, steps=2) as engine,
        ):
            for step in engine:
                for micro in step:
                    step.backward(model(**micro.inputs), micro)
                step.finish()
        del model, optimizer, engine, step, micro
    return base, status_bytes("VmHWM"), shape


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="resident peaks are read from /proc")
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_predicted_peak_is_that_of_a_rank(checkpointing: bool, monkeypatch: Any) -> None:
    """Within a tenth of what the process holds; what it holds for training within a sixth."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")

    [(base, measured, shape)] = run_ranks(peak, 1, checkpointing)

    memory = memory_model(shape, 1, element_bytes=4, sharding="ddp", checkpointing=checkpointing)
    assert base + memory.peak_bytes(TOKENS) == pytest.approx(measured, rel=0.1)
    assert memory.peak_bytes(TOKENS) == pytest.approx(measured - base, rel=1 / 6), memory
