"""A small Megatron model, its forward step, and training by one process, which every test is held against.

Imported in processes that have installed the shim, after `initialize_model_parallel`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

import flexcp

PADDED_VOCAB = 100  # divides by the TP sizes of the tests
# A usual eps would let Adam blow up the rounding of gradients that are almost 0.
LR, EPS = 0.01, 1e-2


class Norm(nn.Module):
    """RMS norm; megatron-core's own needs Apex or Transformer Engine under sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return torch.rms_norm(x, x.shape[-1:], self.weight, self.eps)


def make_config(**options: Any) -> TransformerConfig:
    """Four layers, grouped queries, q and k normalised."""
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    pipeline = parallel_state.get_pipeline_model_parallel_world_size()
    return TransformerConfig(
        **{
            "num_layers": 4,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "kv_channels": 8,
            "ffn_hidden_size": 48,
            "qk_layernorm": True,
            "normalization": "RMSNorm",
            "gated_linear_unit": True,
            "add_bias_linear": False,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "tensor_model_parallel_size": tensor,
            "pipeline_model_parallel_size": pipeline,
            "sequence_parallel": tensor > 1,
            "pipeline_dtype": torch.float32,
            "variable_seq_lengths": True,
            "moe_token_dispatcher_type": "alltoall",
            "calculate_per_token_loss": True,
            # Without these the local spec asks for Apex, Transformer Engine or a GPU.
            "use_cpu_initialization": True,
            "gradient_accumulation_fusion": False,
            "masked_softmax_fusion": False,
            "bias_dropout_fusion": False,
            "persist_layer_norm": False,
            "apply_rope_fusion": False,
            "finalize_model_grads_func": finalize_model_grads,
            **options,
        }
    )


def local_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """Megatron's own layers, with a norm that runs anywhere."""
    layer = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm)
    parts, attention = layer.submodules, layer.submodules.self_attention.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = Norm
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = Norm
    pipeline = config.pipeline_model_parallel_size
    return TransformerBlockSubmodules([layer] * (config.num_layers // pipeline), Norm)


def provider(
    config: TransformerConfig, *, flexible: bool = True, aux: float = 0.0, spec: Any = None, **options: Any
) -> GPTModel:
    """The model provider of a user, with the two lines that FlexCP needs; without them Megatron's own."""
    model_parallel_cuda_manual_seed(7)
    torch.manual_seed(7)
    spec = spec or local_spec(config)
    model = GPTModel(
        config,
        flexcp.megatron.with_attention(spec) if flexible else spec,
        vocab_size=PADDED_VOCAB,
        max_sequence_length=4096,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        **{"share_embeddings_and_output_weights": True, **options},
    )
    return flexcp.megatron.enable(model, moe_aux_loss_coeff=aux) if flexible else model


def forward_step(data_iterator: Any, model: Any) -> tuple[Tensor, Any]:
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


def loss_function(loss_mask: Tensor, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    loss = (output.float().view(-1) * loss_mask.view(-1)).sum()
    tokens = loss_mask.sum().detach().to(torch.int)
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens])}


def wrap(model: GPTModel, **options: Any) -> tuple[DistributedDataParallel, Any]:
    """Megatron's DDP and Adam."""
    sharded = options.get("use_distributed_optimizer", False)
    ddp = DistributedDataParallel(
        model.config, DistributedDataParallelConfig(check_for_nan_in_grad=True, **options), model
    )
    if options.get("overlap_grad_reduce"):
        model.config.no_sync_func = ddp.no_sync
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=LR,
            adam_eps=EPS,
            weight_decay=0.0,
            clip_grad=1.0,
            use_distributed_optimizer=sharded,
        ),
        [ddp],
    )
    return ddp, optimizer


def train(engine: Any, ddp: Any, optimizer: Any) -> tuple[list[float], list[dict[str, Tensor]]]:
    """Losses and reduced gradients of every step, by name of this process's parameters."""
    losses, gradients = [], []
    forward_backward = get_forward_backward_func()
    for step in engine:
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        reports = forward_backward(
            forward_step_func=forward_step, model=[ddp], forward_only=False, **step.schedule
        )
        gradients.append(gradients_of(ddp))
        optimizer.step()
        losses.append(step.finish(reports))
    return losses, gradients


def gradients_of(ddp: Any) -> dict[str, Tensor]:
    """Reduced gradients; of a distributed optimizer every rank holds a shard of each bucket."""
    if ddp.ddp_config.use_distributed_optimizer:
        group = parallel_state.get_data_parallel_group()
        assert not ddp.expert_parallel_buffers
        for bucket in (bucket for buffer in ddp.buffers for bucket in buffer.buckets):
            shards = bucket.grad_data.chunk(group.size())
            own = shards[group.rank()].clone()
            torch.distributed.all_gather(list(shards), own, group=group)
    return {name: parameter.main_grad.clone() for name, parameter in ddp.module.named_parameters()}


def seed_weights(model: Any, weights: dict[str, Tensor]) -> None:
    """Give this process its share of a whole model's weights."""
    own = own_share(model, weights)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(own[name])


def own_share(model: Any, whole: dict[str, Tensor]) -> dict[str, Tensor]:
    """By name of this process's parameters: layers of its pipeline stage, slices of its TP rank."""
    size = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    first = model.decoder.layers[0].layer_number - 1
    shares = {}
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        if "layers" in parts:
            at = parts.index("layers") + 1
            parts[at] = str(int(parts[at]) + first)
        if "local_experts" in parts:
            at = parts.index("local_experts") + 1
            parts[at] = str(int(parts[at]) + _first_expert(model.config))
        source = ".".join(parts)
        if source == "output_layer.weight" and source not in whole:
            source = "embedding.word_embeddings.weight"
        value = whole[source]
        if value.shape != parameter.shape:
            value = _slice(source, value, parameter.shape, rank, size)
        shares[name] = value
    return shares


def _first_expert(config: TransformerConfig) -> int:
    """Of this process; the experts are shared out over its expert-parallel group."""
    size = parallel_state.get_expert_model_parallel_world_size()
    return parallel_state.get_expert_model_parallel_rank() * (config.num_moe_experts // size)


def _slice(name: str, value: Tensor, shape: Sequence[int], rank: int, size: int) -> Tensor:
    axis = next(i for i, (a, b) in enumerate(zip(value.shape, shape, strict=True)) if a != b)
    if "linear_fc1" in name:  # gate and up projection lie one after the other, and each is cut
        return torch.cat([half.chunk(size, axis)[rank] for half in value.chunk(2, axis)], axis)
    return value.chunk(size, axis)[rank]


def reference(
    weights: dict[str, Tensor], dataset: Any, batches: Sequence[Sequence[int]], **options: Any
) -> tuple[list[float], list[dict[str, Tensor]]]:
    """The same training by one process, sample by sample, by Megatron's own attention and torch's Adam."""
    model = provider(make_config(**options), flexible=False)
    model.load_state_dict(weights, strict=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS, weight_decay=0.0)
    losses, gradients = [], []
    for batch in batches:
        optimizer.zero_grad()
        sums = torch.zeros(())
        count = sum(int((torch.as_tensor(dataset[index]["labels"])[1:] >= 0).sum()) for index in batch)
        # The auxiliary loss is divided with the others; Megatron attaches it, times the tokens of a sample.
        MoEAuxLossAutoScaler.set_loss_scale(torch.full((1,), 1.0 / count))
        for index in batch:
            example = dataset[index]
            ids = torch.as_tensor(example["input_ids"])[None]
            targets = torch.as_tensor(example["labels"])[None, 1:]
            mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)[None, None]
            positions = torch.arange(ids.shape[1])[None]
            labels = torch.nn.functional.pad(targets.where(targets >= 0, 0), (0, 1))
            token_losses = model(ids, positions, mask, labels=labels)[0, :-1]
            sums = sums + (token_losses * (targets[0] >= 0)).sum()
        loss = sums / count
        loss.backward()
        losses.append(float(loss.detach()))
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return losses, gradients


class StaticStep:
    """Megatron's own layout: each rank runs whole samples in turn, one a micro-batch."""

    def __init__(self, dataset: Any, batch: Sequence[int]) -> None:
        rank = parallel_state.get_data_parallel_rank()
        own = batch[rank :: parallel_state.get_data_parallel_world_size()]
        self.schedule = {
            "data_iterator": iter([whole_sample(dataset[index]) for index in own]),
            "num_microbatches": len(own),
            "seq_length": 1,
            "micro_batch_size": 1,
        }

    def finish(self, reports: Sequence[dict[str, Tensor]]) -> float:
        total = sum(report["lm loss"].double() for report in reports)
        torch.distributed.all_reduce(total)
        return float(total[0] / total[1])


def whole_sample(example: Any) -> dict[str, Any]:
    """A batch as Megatron's own GPT data set makes it."""
    ids = torch.as_tensor(example["input_ids"])[None]
    targets = torch.nn.functional.pad(torch.as_tensor(example["labels"])[None, 1:], (0, 1), value=-100)
    rows = ids.shape[1]
    return {
        "tokens": ids,
        "labels": targets.where(targets >= 0, 0),
        "loss_mask": (targets >= 0).float(),
        "attention_mask": torch.ones(rows, rows, dtype=torch.bool).triu(1)[None, None],
        "position_ids": torch.arange(rows)[None],
        "packed_seq_params": None,
    }
