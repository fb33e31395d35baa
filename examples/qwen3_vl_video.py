"""Training on videos of very different lengths: a tiny Qwen3-VL, frames drawn by this script, 3 CPU ranks.

A square crosses the picture; the text after the video says in which direction. Most videos are short, a few
are long, and only these are cut: their frames are encoded by all ranks of the group, once.

python examples/qwen3_vl_video.py
"""

import numpy as np
import torch
from transformers import AutoModelForImageTextToText, Qwen3VLConfig

import flexcp

PATCH, SIDE = 4, 16  # pixels; two frames are one patch deep, 2 x 2 patches are one token
VIDEO, START, END = 60, 61, 62
WORDS = {"left": [1, 2, 3], "right": [1, 2, 4], "up": [1, 2, 5], "down": [1, 2, 6]}
RULE = flexcp.images.SmartResize(
    PATCH, least_pixels=SIDE**2, most_pixels=SIDE**2, least_video_pixels=SIDE**2, between=3
)  # between two runs of video tokens: a time stamp, END and START


def crossing(frames: int, direction: str) -> np.ndarray:
    """A white square on black, [frames, 3, SIDE, SIDE]."""
    video = np.zeros((frames, 3, SIDE, SIDE), dtype=np.float32)
    for i in range(frames):
        at = int((SIDE - 4) * i / max(1, frames - 1))
        at = SIDE - 4 - at if direction in ("left", "up") else at
        rows, columns = (slice(6, 10), slice(at, at + 4))
        video[i, :, rows, columns] = 1.0
        if direction in ("up", "down"):
            video[i] = video[i].transpose(0, 2, 1)
    return video


def patches(video: np.ndarray) -> np.ndarray:
    """As the encoder wants them, [patches, 3 * 2 * PATCH * PATCH]; the four of a token are neighbours."""
    video = np.concatenate([video, video[-1:]]) if len(video) % 2 else video
    blocks = SIDE // PATCH // 2
    parts = video.reshape(-1, 2, 3, blocks, 2, PATCH, blocks, 2, PATCH)
    return parts.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(-1, 3 * 2 * PATCH * PATCH)


class Crossings:
    """Map-style data. Lengths, and what a video costs, are known before a frame is drawn."""

    def __init__(self, samples: int, shape, hardware) -> None:
        chance = np.random.default_rng(0)
        self.frames = np.minimum(150, 4 * (1 + chance.pareto(0.8, samples))).astype(int)
        self.directions = chance.choice(list(WORDS), samples)
        self.shape, self.hardware = shape, hardware
        self.lengths = np.array([self.rows(i).tokens for i in range(samples)])

    def __len__(self) -> int:
        return len(self.frames)

    def rows(self, index: int):
        """START, the video with what lies between its frames, END, and the words."""
        return flexcp.images.lay_out([1, RULE.video(int(self.frames[index]), SIDE, SIDE), 1 + 3])

    def sample(self, index: int) -> flexcp.Sample:
        """As the planner sees it."""
        return flexcp.image_sample(index, self.rows(index), self.shape, self.hardware, checkpointing=False)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        rows, words = self.rows(index), WORDS[self.directions[index]]
        ids = np.full(rows.tokens, 7)  # the time stamp
        for start, stop in rows.spans:
            ids[start - 1], ids[start:stop], ids[stop] = START, VIDEO, END
        ids[-3:] = words
        labels = np.full(rows.tokens, -100)
        labels[-3:] = words
        video = crossing(int(self.frames[index]), self.directions[index])
        grid = [[len(rows.spans), SIDE // PATCH, SIDE // PATCH]]
        return {
            "input_ids": ids,
            "labels": labels,
            "pixel_values_videos": patches(video),
            "video_grid_thw": np.array(grid),
        }


def train(world: flexcp.World) -> None:
    """What every rank runs."""
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": 64,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 64,
            "patch_size": PATCH,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
        video_token_id=VIDEO,
        image_token_id=59,
    )
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config)
    model = flexcp.shard(model, "fsdp2", blocks=flexcp.transformers.blocks_of(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    shape, hardware = flexcp.transformers.shape_of(config), flexcp.hardware("cpu")
    cost = flexcp.cost_model(shape, hardware, checkpointing=False)
    planner = flexcp.Planner(flexcp.Cluster(ranks=world.size, tokens_per_rank=220), cost)
    dataset = Crossings(300, shape, hardware)

    engine = flexcp.Engine(model, optimizer, planner, dataset, global_batch=24, steps=20)
    with flexcp.transformers.enable(model), engine:
        for step in engine:
            for micro in step:
                step.backward(model(**micro.inputs), micro)
            report = step.finish()
            if world.rank == 0 and step.index % 4 == 3:
                frames = [dataset.frames[sample.id] for sample in step.plan.samples]
                degrees = ", ".join(f"{n} on {d}" for d, n in report.degrees.items())
                print(
                    f"step {step.index + 1:2}  loss {report.loss:.1f}  "
                    f"videos of {min(frames)} to {max(frames):3} frames  packs: {degrees}"
                )


if __name__ == "__main__":
    flexcp.launch(train, 3)
