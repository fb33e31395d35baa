"""What FlexCP hangs onto a Megatron model, in this process: no grid, no ranks."""

from __future__ import annotations

import importlib.util
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from flexcp.core.errors import ConfigError, UnsupportedError
from flexcp.core.layout import make_layout
from flexcp.core.sample import samples_from_lengths
from flexcp.profiler.alone import AloneTransport
from flexcp.runtime.batches import TaskContext

if importlib.util.find_spec("megatron") is None:
    pytest.skip(
        "megatron-core is not installed: pip install 'flexcp[train,megatron]'", allow_module_level=True
    )

with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
    warnings.simplefilter("ignore")  # Megatron's own: what it would rather have installed
    patch.setattr(torch, "compile", lambda function=None, **_: function)  # takes 10 s to import
    from flexcp.integrations.megatron import batches, experts
    from flexcp.integrations.megatron.hooks import LocalRotary

EXPERTS, WIDTH, COEFFICIENT = 4, 8, 0.1


class Router(nn.Module):
    """As Megatron's, of which the loss reads no more."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, generator=torch.Generator().manual_seed(0)))
        self.topk, self.score_function = 2, "softmax"
        self.config = SimpleNamespace(sequence_parallel=False)

    def gating(self, x: Tensor) -> Tensor:
        return x @ self.weight.T

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.gating(x).flatten(0, -2)
        return logits.softmax(-1), logits.detach() > 0


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Module()
        self.mlp.router = Router()

    def forward(self, x: Tensor, packed_seq_params: Any = None) -> Tensor:
        probabilities, _ = self.mlp.router(x)
        return probabilities


def model_of(*layers: Layer) -> Any:
    config = SimpleNamespace(recompute_granularity=None, recompute_modules=None)
    return SimpleNamespace(config=config, decoder=SimpleNamespace(layers=list(layers)))


def params_of_pack(lengths: list[int], padding: int = 0) -> batches.SeqParams:
    """Of one rank that holds whole samples."""
    layout = make_layout(samples_from_lengths(lengths), 1, 0)
    context = TaskContext(layout, AloneTransport().exchange((0,)), padding)
    positions = torch.cat([*(torch.arange(n) for n in lengths), torch.zeros(padding, dtype=torch.int64)])
    return batches._seq_params(context, positions)


def gradient(layer: Layer, params: Any) -> Tensor:
    """Of the router, by the auxiliary loss alone."""
    layer.zero_grad()
    x = torch.randn(len(params.positions), 1, WIDTH, generator=torch.Generator().manual_seed(1))
    (layer(x, packed_seq_params=params) * 0.0).sum().backward()
    assert layer.mlp.router.weight.grad is not None
    return layer.mlp.router.weight.grad.clone()


def test_a_model_enabled_twice_adds_its_auxiliary_loss_once() -> None:
    """The Engine enables what its user may have enabled; another weight is no second loss either."""
    layer, params = Layer(), params_of_pack([5, 9], padding=2)
    model = model_of(layer)
    experts.add_balancing_loss(model, COEFFICIENT)
    once = gradient(layer, params)
    experts.add_balancing_loss(model, COEFFICIENT)

    assert once.abs().max() > 0
    assert torch.equal(gradient(layer, params), once)
    with pytest.raises(ConfigError, match=r"0\.2; the model was enabled with 0\.1"):
        experts.add_balancing_loss(model, 0.2)


def test_a_layer_that_does_not_hear_of_the_task_does_not_train_unbalanced() -> None:
    """It would in silence; where nothing is trained it may be called so."""
    layer = Layer()
    experts.add_balancing_loss(model_of(layer), COEFFICIENT)
    x = torch.zeros(3, 1, WIDTH)
    with pytest.raises(UnsupportedError, match="without the keyword packed_seq_params"):
        layer(x, params_of_pack([3]))
    with torch.no_grad():
        layer(x)
    layer.eval()
    layer(x)


class NoTables(TorchFunctionMode):
    """Fails where a table is made of numbers of the host, which a device would have to wait for."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function not in (torch.Tensor.new_tensor, torch.tensor, torch.as_tensor), function
        return function(*args, **kwargs or {})


def test_passes_do_not_wait_for_the_device() -> None:
    """What they need beside the rows is made once a pack. Values of `meta` tensors cannot be read at all."""
    layer, params = Layer(), params_of_pack([5, 9, 300], padding=2)
    experts.add_balancing_loss(model_of(layer), COEFFICIENT)
    with NoTables():
        layer(torch.zeros(316, 1, WIDTH), packed_seq_params=params)

    class Table(nn.Module):
        def forward(self, rows: int) -> Tensor:
            assert rows == 512
            return torch.zeros(rows, 1, 1, WIDTH, device="meta")

    params.positions = params.positions.to("meta")
    rotary = LocalRotary(Table())
    asked = rotary.get_rotary_seq_len(None, None, None, None, packed_seq_params=params)
    assert rotary(asked).shape == (316, 1, 1, WIDTH)


@pytest.mark.parametrize(("lengths", "rows"), [([1], 1), ([2], 2), ([128], 128), ([129, 4], 256)])
def test_a_rotary_table_holds_every_position(lengths: list[int], rows: int) -> None:
    """And is a power of two long, so that Megatron keeps few of them."""
    params = params_of_pack(lengths, padding=3)
    assert params.table_rows == rows > int(params.positions.max())
    assert params.sample_tokens.tolist() == [*lengths, float("inf")]
