"""What FlexCP costs where it cannot help: one rank against a bare loop, and a ring of two on long attention.

    python benchmarks/overhead.py [--short] [--out FILE]

Engine: one rank, every sample a pack of its own, against a plain loop over the same samples with the model's
own attention. Ring: forward and backward of one long causal sample on two ranks, a core each, against one.
Pairs are measured in turn in the same processes. Writes benchmarks/results/overhead.md.
"""

from __future__ import annotations

import argparse
import os
import time
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import head, median_of_pairs, paired, table, write
from small import RandomTokens, small_cost, small_model

import flexcp
from flexcp.attention import group_attention
from flexcp.core.layout import make_layout
from flexcp.core.sample import Sample
from flexcp.runtime.launch import launch
from flexcp.runtime.order import batch_indices
from flexcp.runtime.transport import Transport

SEED, BATCH, HEADS, WIDTH = 0, 8, 8, 64


def engine_rank(world, tokens, steps):
    """Wall and processor seconds of each step, by the engine and by the bare loop."""
    torch.set_num_threads(1)
    data = RandomTokens([tokens] * 64)
    planner = flexcp.Planner(flexcp.Cluster(1, tokens), small_cost())
    model, bare = small_model(hidden=256), small_model(hidden=256)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-4) for m in (model, bare)]
    found = {"engine": [], "bare loop": []}
    with (
        flexcp.transformers.enable(model),
        flexcp.Engine(
            model, optimizers[0], planner, data, global_batch=BATCH, steps=steps + 1, seed=SEED
        ) as engine,
    ):
        coming = iter(engine)
        for index in range(steps + 1):
            both = {
                "engine": partial(engine_step, engine, coming),
                "bare loop": partial(bare_step, bare, optimizers[1], data, index),
            }
            for name in sorted(both, reverse=bool(index % 2)):
                found[name].append(timed(both[name]))
    return {name: made[1:] for name, made in found.items()}


def engine_step(engine, coming):
    """One step by the engine."""
    step = next(coming)
    for micro in step:
        step.backward(engine.model(**micro.inputs), micro)
    return step.finish()


def bare_step(model, optimizer, data, index):
    """The same samples, one by one, as anybody would write it."""
    chosen = batch_indices(len(data), BATCH, SEED, index)
    supervised = sum(int(data.lengths[i]) - 1 for i in chosen)
    for sample in chosen:
        ids = torch.from_numpy(data[int(sample)]["input_ids"])
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        (F.cross_entropy(logits, ids[1:], reduction="sum") / supervised).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
    optimizer.step()
    optimizer.zero_grad()


def timed(work):
    """Wall and processor seconds of this process, all threads."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall_s, time.process_time() - cpu_s


def ring_rank(world, tokens, runs):
    """Wall and processor seconds of attention alone (rank 0, while rank 1 waits) and in a ring."""
    torch.set_num_threads(1)
    transport = Transport()
    generator = torch.Generator().manual_seed(SEED)
    found = {"one": [], "ring of 2": []}
    for index in range(runs + 1):
        for degree in (1, 2) if index % 2 else (2, 1):
            dist.barrier()
            if world.rank >= degree:
                continue
            layout = make_layout((Sample(0, tokens),), degree, 0)
            exchange = transport.exchange(range(degree))
            rows = layout.rows(exchange.member)
            q, k, v = (torch.randn(rows, HEADS, WIDTH, generator=generator) for _ in range(3))
            inputs = [x.requires_grad_() for x in (q, k, v)]
            found["one" if degree == 1 else "ring of 2"].append(
                timed(partial(attend, inputs, layout, exchange))
            )
    dist.barrier()
    return {name: made[1:] for name, made in found.items()}


def attend(inputs, layout, exchange):
    """Forward and backward."""
    group_attention(*inputs, layout, exchange).sum().backward()


def engine_page(found, tokens):
    """Engine over bare loop."""
    rows = []
    for column, name in enumerate(("wall-clock", "processor")):
        engine, bare = ([pair[column] for pair in found[way]] for way in ("engine", "bare loop"))
        least = min(engine) / min(bare)
        rows.append([name, f"{np.mean(bare):.3f}", f"{np.mean(engine):.3f}", paired(engine, bare)])
        rows[-1] += [f"{median_of_pairs(engine, bare) - 1:+.1%}", f"{least - 1:+.1%}"]
    columns = ["time", "bare s", "engine s", "engine / bare", "median of pairs", "fastest over fastest"]
    title = f"## Engine on one rank: {BATCH} samples of {tokens} tokens a step, {len(engine)} pairs"
    return [title, "", *table(columns, rows), ""]


def ring_page(ranks, tokens):
    """One process over a ring of two."""
    rows = []
    for column, name in enumerate(("wall-clock", "processor, busier rank")):
        one = [pair[column] for pair in ranks[0]["one"]]
        ring = [max(pair) for pair in zip(*([x[column] for x in r["ring of 2"]] for r in ranks), strict=True)]
        least = min(one) / min(ring)
        rows.append([name, f"{np.mean(one):.2f}", f"{np.mean(ring):.2f}", paired(one, ring)])
        rows[-1] += [f"{median_of_pairs(one, ring):.3f}", f"{least:.3f}"]
    columns = ["time", "one s", "ring s", "one / ring", "median of pairs", "fastest over fastest"]
    title = (
        f"## Ring of two: one causal sample of {tokens} tokens, {HEADS} heads of {WIDTH}, {len(one)} pairs"
    )
    return [title, "", *table(columns, rows), ""]


def main():
    """Run both and write the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--short", action="store_true", help="one small pair of each: does it run?")
    parser.add_argument("--out")
    given = parser.parse_args()
    load = os.getloadavg()[0]
    tokens, steps, long, runs = (64, 1, 128, 1) if given.short else (1024, 12, 8192, 4)
    page = engine_page(launch(engine_rank, 1, (tokens, steps))[0], tokens)
    page += ring_page(launch(ring_rank, 2, (long, runs)), long)
    write("overhead", [*head("What FlexCP costs", SEED, load), *page], given.out)


if __name__ == "__main__":
    main()
