"""How parameters are held, and the one gradient reduction of a step.

Between `begin` and `reduce` there is no collective at all, so every rank runs its own number of tasks,
also none (facts about FSDP2 that this rests on are in docs/runtime.md).
"""

from __future__ import annotations

import hashlib
import types
from collections.abc import Iterable, Iterator
from typing import Any, Literal, Protocol, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from flexcp.core.errors import ConfigError, UnknownNameError
from flexcp.runtime.agreement import require_agreement

ShardingKind = Literal["ddp", "fsdp2"]
EQUAL_WEIGHTS = (
    "Give all ranks the same weights: seed before making the model, or load one file on all ranks."
)
_BUCKET_BYTES = 64 * 2**20


class Sharding(Protocol):
    """What the engine asks of a way to hold parameters."""

    def begin(self) -> None:
        """Make parameters usable for any number of forward and backward passes."""

    def before_backward(self) -> None:
        """Keep them so through a backward that does not touch all of them."""

    def reduce(self) -> None:
        """Sum gradients over all ranks, once."""

    def release(self) -> None:
        """End a step without gradients (evaluation)."""


def shard(
    model: nn.Module,
    kind: ShardingKind,
    *,
    blocks: Iterable[nn.Module] = (),
    param_dtype: torch.dtype | None = None,
) -> nn.Module:
    """Wrap a model as the engine wants it.

    Args:
        model: on its device, the same weights on every rank.
        kind: `ddp` keeps everything on every rank; `fsdp2` shards weights, gradients and optimizer states
            between steps and gathers the weights once per step.
        blocks: the repeated layers, each its own FSDP unit; ignored by `ddp`.
        param_dtype: dtype of the compute copies under `fsdp2` (gradients are summed in fp32).

    Raises:
        UnknownNameError: another kind.
        DisagreementError: `fsdp2` would make one model of the parts of different ones. (`ddp` takes the
            weights of rank 0.)
    """
    if kind not in get_args(ShardingKind):
        raise UnknownNameError("sharding", kind, get_args(ShardingKind))
    if kind == "ddp":
        # Buffers are never trained here; broadcasting them in forward would be a collective that ranks
        # without a task do not join.
        # (Set afterwards because the constructor's argument has another name in every other torch version.)
        wrapped = DistributedDataParallel(model)
        wrapped.broadcast_buffers = False
        return wrapped
    require_agreement({"weights of the model": weights_checksum(model)}, EQUAL_WEIGHTS)
    device = next(model.parameters()).device
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(
        param_dtype=param_dtype, reduce_dtype=torch.float32 if param_dtype else None
    )
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
    return model


def weights_checksum(model: nn.Module) -> str:
    """Equal for equal bits, on any device: integers are summed where they lie, in whatever order."""
    sums = [
        parameter.detach().contiguous().view(-1).view(_integers(parameter))
        for parameter in model.parameters()
    ]
    totals = torch.stack([part.sum(dtype=torch.int64) for part in sums]).tolist() if sums else []
    return hashlib.sha256(repr(totals).encode()).hexdigest()[:16]


def _integers(parameter: Tensor) -> torch.dtype:
    """Of the size of its elements."""
    return {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(parameter.element_size(), torch.uint8)


def sharding_of(model: nn.Module) -> Sharding:
    """The strategy that fits how `model` was wrapped.

    Raises:
        ConfigError: the wrapping does something in the middle of a step that free-running ranks cannot.
    """
    model = getattr(model, "_orig_mod", model)  # what torch.compile has put around it
    if isinstance(model, FSDPModule):
        return GatheredOnce(model)
    if isinstance(model, DistributedDataParallel):
        if model.broadcast_buffers and any(True for _ in model.module.buffers()):
            raise ConfigError(
                "DistributedDataParallel broadcasts buffers in forward; idle ranks would not join",
                "Set model.broadcast_buffers = False, or use flexcp.shard(model, 'ddp').",
            )
        return Replicated(model)
    return Replicated(model)


class Replicated:
    """Every rank holds all parameters; gradients are summed in flat buckets after the last backward.

    For a `DistributedDataParallel` model its own reduction stays switched off: it averages, and it would
    run inside whichever backward happens to be a rank's last.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._ddp = model if isinstance(model, DistributedDataParallel) else None

    def begin(self) -> None:
        """Switch DDP's own reduction off for good."""
        if self._ddp is not None:
            self._ddp.require_backward_grad_sync = False

    def before_backward(self) -> None:
        """Nothing can be lost."""

    def reduce(self) -> None:
        """One all-reduce per bucket of equal dtype, in parameter order, the same on every rank."""
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if dist.get_world_size() == 1:
            return
        for bucket in _buckets([cast(Tensor, p.grad) for p in self._parameters]):
            flat = torch.cat([grad.reshape(-1) for grad in bucket])
            dist.all_reduce(flat)
            for grad, part in zip(bucket, torch.split(flat, [g.numel() for g in bucket]), strict=True):
                grad.copy_(part.view_as(grad))

    def release(self) -> None:
        """Nothing was gathered."""


def _buckets(grads: list[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for grad in grads:
        nbytes = grad.numel() * grad.element_size()
        if bucket and (size + nbytes > _BUCKET_BYTES or grad.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(grad)
        size += nbytes
    if bucket:
        yield bucket


def _flush(self: nn.Module, tick: Tensor) -> Tensor:
    """A forward of the root that computes nothing; its backward makes every unit reduce what it holds."""
    return tick * 1


class GatheredOnce:
    """FSDP2 with weights gathered once at the start of a step and gradients reduced once at its end.

    Memory as ZeRO-1 during the step and as ZeRO-3 between steps. Built from public FSDP2 calls only.
    """

    def __init__(self, model: Any) -> None:
        self._root = model
        self._units = [unit for unit in self._root.modules() if isinstance(unit, FSDPModule)]
        self._handles: list[Any] = []
        for unit in self._units:
            # The loss is already divided by the global token count. Factor 1 alone would select an
            # operation (PREMUL_SUM) that gloo does not have.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        # A user's own wrapping may gather and free the weights in every forward: collectives in mid-step.
        self._root.set_reshard_after_forward(False)
        self._root.flexcp_flush = types.MethodType(_flush, model)
        register_fsdp_forward_method(self._root, "flexcp_flush")
        device = next(self._root.parameters()).device
        self._tick = torch.zeros((), device=device, requires_grad=True)

    def begin(self) -> None:
        """Gather all weights, in the same order on all ranks and before any ring message."""
        self._synchronize(False)
        self._handles = [unit.unshard(async_op=True) for unit in self._units]

    def before_backward(self) -> None:
        """Wait for units that no forward has used yet (an encoder, in a task without images).

        FSDP2 drops what was gathered and not waited for at the end of a backward, and the next forward of
        the unit would gather it again, alone.
        """
        self._wait()

    def reduce(self) -> None:
        """Reduce-scatter every unit once, also on ranks that ran no task."""
        self._wait()
        for parameter in self._root.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        # With sync still off: moves low-precision gradients into the fp32 accumulators.
        self._root.flexcp_flush(self._tick).backward()
        self._synchronize(True)
        self._root.flexcp_flush(self._tick).backward()

    def release(self) -> None:
        """Let the gathered weights go."""
        self._wait()
        for unit in self._units:
            unit.reshard()

    def _synchronize(self, on: bool) -> None:
        self._root.set_requires_gradient_sync(on)
        self._root.set_reshard_after_backward(on)

    def _wait(self) -> None:
        for handle in self._handles:
            if handle is not None:
                handle.wait()
        self._handles = []


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Scale all gradients so that their global 2-norm is at most `max_norm` (may be infinite).

    Returns the norm before; NaN or infinite if a gradient is.
    """
    norm = nn.utils.clip_grad_norm_(list(parameters), max_norm)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
