"""A whole pretraining run in Megatron-Core with flexible groups: data, model, loop, evaluation, checkpoints.

    torchrun --nproc-per-node 8 examples/megatron_pretrain.py --tensor 2 --pipeline 2 --folder runs/megatron

Needs GPUs: on CPUs Megatron-Core runs only under the shim of FlexCP's tests (tests/megatron/on_cpu.py).
Sequence parallelism is on where Transformer Engine is installed, since Megatron's own norm has none.

Trains a small byte-level model on the sources of Python's standard library, whose lengths have a long tail.
Start it again with more --steps, and it goes on from its checkpoint. `flexcp report runs/megatron` shows it.
"""

import argparse
import importlib.util
import sysconfig
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

import flexcp

VOCAB = 256  # bytes
HAS_TE = importlib.util.find_spec("transformer_engine") is not None


def write_corpus(prefix: Path, sources: list[Path]) -> None:
    """Megatron's .bin and .idx, a document for each file; a preprocessed corpus of yours is the same."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for path in sources:
        if data := path.read_bytes():
            builder.add_document(torch.tensor(list(data)), [len(data)])
    builder.finalize(f"{prefix}.idx")


def model_config(options: argparse.Namespace) -> TransformerConfig:
    """What FlexCP asks for is at the end."""
    return TransformerConfig(
        num_layers=options.layers,
        hidden_size=options.hidden,
        num_attention_heads=4,
        num_query_groups=2,
        normalization="RMSNorm",
        gated_linear_unit=True,
        add_bias_linear=False,
        hidden_dropout=0.0,
        tensor_model_parallel_size=options.tensor,
        pipeline_model_parallel_size=options.pipeline,
        pipeline_dtype=torch.float32,
        sequence_parallel=HAS_TE and options.tensor > 1,  # Megatron's own norm cannot, that of TE can
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        attention_dropout=0.0,
        calculate_per_token_loss=True,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # asked for by the line above, also without experts
        finalize_model_grads_func=finalize_model_grads,
    )


def model_provider(config: TransformerConfig, longest: int) -> GPTModel:
    """Megatron's, and two lines of FlexCP."""
    spec = get_gpt_layer_with_transformer_engine_spec() if HAS_TE else get_gpt_layer_local_spec()
    spec = flexcp.megatron.with_attention(spec)
    model = GPTModel(
        config,
        spec,
        vocab_size=VOCAB,
        max_sequence_length=longest,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
    )
    return flexcp.megatron.enable(model)


def forward_step(data_iterator, model):
    """As in Megatron-LM's pretrain_gpt.py, but for where the batch comes from."""
    batch = next(data_iterator)
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        packed_seq_params=batch["packed_seq_params"],
    )
    return output, partial(loss_function, batch["loss_mask"])


def loss_function(loss_mask, output):
    """Megatron-LM's, for a loss per token."""
    loss = (output.float().view(-1) * loss_mask.view(-1)).sum()
    tokens = loss_mask.sum().detach().to(torch.int)
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens])}


class Training:
    """Model, optimizer and schedule, and the three things one does with them."""

    def __init__(self, options: argparse.Namespace, config: TransformerConfig, longest: int) -> None:
        model = model_provider(config, longest).cuda()
        # Without Transformer Engine Megatron saves a sharded optimizer, but cannot load it.
        settings = DistributedDataParallelConfig(use_distributed_optimizer=HAS_TE)
        self.model = DistributedDataParallel(config, settings, model)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=options.lr,
                min_lr=0.1 * options.lr,
                clip_grad=1.0,
                use_distributed_optimizer=HAS_TE,
            ),
            [self.model],
        )
        self.schedule = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=options.lr,
            min_lr=0.1 * options.lr,
            lr_warmup_steps=2,
            lr_decay_steps=1000,
            lr_decay_style="cosine",
            start_wd=0.01,
            end_wd=0.01,
            wd_incr_steps=1000,
            wd_incr_style="constant",
        )

    def step(self, step: flexcp.megatron.Step) -> float:
        """One global batch."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = self.run(step, forward_only=False)
        _, grad_norm, _ = self.optimizer.step()
        self.schedule.step(increment=1)
        return step.finish(losses, grad_norm=grad_norm)

    def evaluate(self, engine: flexcp.megatron.Engine, dataset: flexcp.megatron.IndexedDocuments) -> float:
        """Mean loss over all supervised tokens of a data set."""
        self.model.eval()
        total = tokens = 0.0
        for step in engine.evaluation(dataset):
            loss = step.finish(self.run(step, forward_only=True))
            total, tokens = total + loss * step.supervised_tokens, tokens + step.supervised_tokens
        self.model.train()
        return total / tokens

    def run(self, step: flexcp.megatron.Step, *, forward_only: bool):
        """Megatron's schedule."""
        return get_forward_backward_func()(
            forward_step_func=forward_step, model=[self.model], forward_only=forward_only, **step.schedule
        )

    def state(self, engine: flexcp.megatron.Engine, *, loading: bool = False) -> dict:
        """All that a resumed run needs, FlexCP's part under a key of its own."""
        weights = self.model.module.sharded_state_dict()
        kind = {"distrib_optim_sharding_type": "fully_reshardable"}
        return {
            "model": weights,
            "optimizer": self.optimizer.sharded_state_dict(weights, is_loading=loading, metadata=kind),
            "schedule": self.schedule.state_dict(),
            "flexcp": engine.state_dict(),
        }

    def save(self, engine: flexcp.megatron.Engine, folder: Path) -> None:
        """A checkpoint of Megatron's, for any number of ranks."""
        path = folder / f"step-{engine.next_step:06d}"
        if dist.get_rank() == 0:
            path.mkdir(parents=True)
        dist.barrier()
        dist_checkpointing.save(self.state(engine), str(path))

    def resume(self, engine: flexcp.megatron.Engine, path: Path) -> None:
        """Go on where `save` was called."""
        state = dist_checkpointing.load(self.state(engine, loading=True), str(path))
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        engine.load_state_dict(state["flexcp"])


def pretrain(world: flexcp.World, options: argparse.Namespace) -> None:
    """What every process runs."""
    parallel_state.initialize_model_parallel(options.tensor, options.pipeline)
    model_parallel_cuda_manual_seed(options.seed)
    torch.manual_seed(options.seed)
    prefixes = {name: options.folder / "data" / name for name in ("train", "held-out")}
    if world.rank == 0 and not IndexedDataset.exists(str(prefixes["train"])):
        sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        write_corpus(prefixes["held-out"], sources[::40])
        write_corpus(prefixes["train"], [path for path in sources if path not in sources[::40]])
    dist.barrier()
    cluster = flexcp.megatron.cluster(options.tokens_per_rank)
    most = min(options.max_tokens, cluster.capacity_tokens)
    data, held_out = (
        flexcp.megatron.IndexedDocuments(str(path), max_tokens=most) for path in prefixes.values()
    )

    config = model_config(options)
    device = flexcp.hardware(options.hardware).cell(options.tensor, options.pipeline)
    cost = flexcp.cost_model(flexcp.megatron.shape_of(config, VOCAB), device, checkpointing=False)
    mode = "lockstep" if options.pipeline > 1 else "free-running"
    planner = flexcp.Planner(cluster, cost, mode=mode)

    training = Training(options, config, longest=most)
    engine = flexcp.megatron.Engine(
        [training.model],
        planner,
        data,
        global_batch=options.global_batch,
        steps=options.steps,
        folder=options.folder,
        learn_costs=True,
    )
    with engine:
        if checkpoints := sorted((options.folder / "checkpoints").glob("step-*")):
            training.resume(engine, checkpoints[-1])
        for step in engine:
            loss = training.step(step)
            if world.rank == 0:
                packs = ", ".join(f"{count} on {degree}" for degree, count in step.plan.degrees.items())
                print(f"step {step.index + 1:3}  loss {loss:.3f}  packs: {packs}", flush=True)
        loss = training.evaluate(engine, held_out)
        if world.rank == 0:
            print(f"after {engine.next_step} steps: held-out loss {loss:.3f}", flush=True)
        training.save(engine, options.folder / "checkpoints")


def parse() -> argparse.Namespace:
    """Sizes for a first try; give larger ones to a real model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/megatron"))
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--pipeline", type=int, default=1)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--tokens-per-rank", type=int, default=4096)
    parser.add_argument("--max-tokens", type=int, default=16384, help="longer documents are cut")
    parser.add_argument("--global-batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hardware", default="h100", choices=["h100", "h200", "a100", "cpu"])
    return parser.parse_args()


if __name__ == "__main__":
    flexcp.launch(pretrain, torch.accelerator.device_count(), (parse(),))
