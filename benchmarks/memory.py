"""Peak memory of real training ranks beside what is predicted from the shape of their model.

    python benchmarks/memory.py

Each case is a training run in fresh processes: two steps of two full packs a rank, then the same with larger
packs; the peak is the largest resident memory of a rank (VmHWM of Linux). Predicted is what the process holds
after a step of a tiny model, plus M(s). Every case runs twice: with an allocator that returns what is freed,
as those of accelerators count it, and with glibc's as it is, which keeps some; there M(s) is scaled by the
growth between the two smaller sizes, as a calibration is. Writes benchmarks/results/memory.md.
"""

from __future__ import annotations

import os
import platform
import re
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import Qwen3Config

import flexcp
from flexcp.cost.memory import memory_model
from flexcp.train.config import RunSection
from flexcp.train.model import build_model

ROOT = Path(__file__).parents[1]
SEED = 0
MB = 1e6
MODEL = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 768,
}
TINY = MODEL | {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32}
SIZES = (512, 1024, 2048)
RETURNED = "65536"  # larger pieces go back to the system at once


@dataclass(frozen=True)
class Case:
    """One run; `cut` puts one sample of all ranks' tokens into a pack."""

    ranks: int = 1
    sharding: str = "fsdp2"
    checkpointing: bool = False
    dtype: str = "fp32"
    cut: bool = False

    def lengths(self, tokens):
        """Samples of one step: two packs for every rank."""
        return [tokens * self.ranks] * 2 if self.cut else [tokens] * 2 * self.ranks


CASES = (
    Case(),
    Case(sharding="ddp"),
    Case(dtype="bf16"),
    Case(checkpointing=True),
    Case(ranks=2, cut=True),
)


class Counting:
    """Samples of given lengths, each counting upwards."""

    def __init__(self, lengths, vocab):
        self.lengths, self._vocab = np.array(lengths), vocab

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return {"input_ids": np.arange(self.lengths[index]) % self._vocab}


def resident_bytes(which):
    """A line of this process's status, such as VmRSS."""
    return 1024 * int(re.search(rf"{which}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def train(world, case, model_options, sizes):
    """Two steps of every size with a model of random weights; the peaks in bytes, and its shape."""
    config = Qwen3Config(**model_options, tie_word_embeddings=True)
    run = RunSection(seed=SEED, gradient_checkpointing=case.checkpointing)
    model = build_model(config, run, world.device)
    narrow = torch.bfloat16 if case.dtype == "bf16" else None
    model = flexcp.shard(
        model, case.sharding, blocks=flexcp.transformers.blocks_of(model), param_dtype=narrow
    )
    optimizer = torch.optim.AdamW(model.parameters())
    shape = flexcp.transformers.shape_of(config)
    cost = flexcp.cost_model(shape, flexcp.hardware("h100"))
    peaks = []
    for tokens in sizes:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
        planner = flexcp.Planner(flexcp.Cluster(world.size, tokens), cost)
        data = Counting(case.lengths(tokens), config.vocab_size)
        with (
            flexcp.transformers.enable(model),
            flexcp.Engine(model, optimizer, planner, data, global_batch=len(data), steps=2) as engine,
        ):
            for step in engine:
                for micro in step:
                    step.backward(model(**micro.inputs), micro)
                step.finish()
        peaks.append(resident_bytes("VmHWM"))
    return peaks, shape


def measure(world, case):
    """Bytes after a tiny model, the peaks of the case, and the shape of its model."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    train(world, replace(case, dtype="fp32", checkpointing=False), TINY, (64,))
    base = resident_bytes("VmRSS")
    return base, *train(world, case, MODEL, SIZES)


def memory(case, shape, token_scale=1.0):
    """M(s) of a case."""
    return memory_model(
        shape,
        case.ranks,
        element_bytes=2 if case.dtype == "bf16" else 4,
        sharding="ddp" if case.sharding == "ddp" else "zero1",
        checkpointing=case.checkpointing,
        token_scale=token_scale,
    )


def rows(case, threshold):
    """Lines of the table for the sizes of a case, and the relative errors."""
    os.environ.pop("MALLOC_MMAP_THRESHOLD_", None)
    if threshold:
        os.environ["MALLOC_MMAP_THRESHOLD_"] = threshold
    found = flexcp.launch(measure, case.ranks, (case,))
    base, peaks, shape = max(found, key=lambda of: of[1][-1])
    growth = (peaks[1] - peaks[0]) / (SIZES[1] - SIZES[0])
    scale = 1.0 if threshold else growth / memory(case, shape).bytes_per_token
    model = memory(case, shape, scale)
    lines, errors = [], []
    for tokens, peak in zip(SIZES, peaks, strict=True):
        predicted = base + model.peak_bytes(tokens)
        errors.append(predicted / peak - 1)
        cells = [case.ranks, case.sharding, case.dtype, "yes" if case.checkpointing else "no", tokens]
        cells += [f"{base / MB:.0f}", f"{model.states_bytes / MB:.0f}", f"{scale:.2f}"]
        cells += [f"{predicted / MB:.0f}", f"{peak / MB:.0f}", f"{errors[-1]:+.1%}"]
        print(cells, flush=True)
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines, errors


def table(threshold):
    """A table of all cases, with what to say of its errors."""
    lines, errors = [], []
    for case in CASES:
        more, found = rows(case, threshold)
        lines += more
        errors += found
    sizes = [abs(error) for error in errors]
    head = "| ranks | sharding | dtype | checkpointing | tokens a rank | before | states | scale | predicted "
    return [
        head + "| measured | error |",
        "|" + "---|" * 11,
        *lines,
        "",
        f"Mean error {sum(sizes) / len(sizes):.1%}, largest {max(sizes):.1%}.",
    ]


def main():
    """Run all cases and write the page."""
    page = [
        "# Memory: predicted and measured peaks of training ranks",
        "",
        f"`python benchmarks/memory.py`, seed {SEED}; flexcp {flexcp.__version__},",
        f"torch {torch.__version__}, transformers {transformers.__version__},",
        f"Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores.",
        "",
        "A Qwen3 of 12 layers x 256, vocabulary 8192, AdamW; two packs a rank and step. On two ranks every",
        "pack is one sample, cut over both. MB, the rank that needs most. *Before* is the process after a",
        "step of a tiny model; predicted = before + M(s).",
        "",
        "## Freed memory returned, as on an accelerator",
        "",
        f"`MALLOC_MMAP_THRESHOLD_={RETURNED}`; M(s) as counted, nothing is fitted.",
        "",
        *table(RETURNED),
        "",
        "## The allocator of glibc as it is",
        "",
        "*Scale* is the growth from the first size to the second over the counted one; the third is unseen.",
        "",
        *table(""),
    ]
    target = ROOT / "benchmarks/results/memory.md"
    target.write_text("\n".join(page) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
