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
    from megatron.core.models.common.embeddings.rotary_pos_embedding import MultimodalRotaryEmbedding
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    from flexcp.integrations.megatron import batches, experts
    from flexcp.integrations.megatron.config import check_supported, shape_of
    from flexcp.integrations.megatron.engine import _check_functions
    from flexcp.integrations.megatron.hooks import LocalRotary, enable
    from flexcp.integrations.megatron.recording import device_name

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


REFUSED = {
    "fp4='nvfp4'": {"fp4": "nvfp4"},
    "CUDA graphs": {"external_cuda_graph": True},
    "moe_z_loss_coeff=0.001": {"num_moe_experts": 4, "moe_z_loss_coeff": 1e-3},
    "moe_input_jitter_eps=0.01": {"num_moe_experts": 4, "moe_input_jitter_eps": 1e-2},
    "moe_router_enable_expert_bias": {"num_moe_experts": 4, "moe_router_enable_expert_bias": True},
    "'sinkhorn'": {"num_moe_experts": 4, "moe_router_load_balancing_type": "sinkhorn"},
    "qk_clip=True": {"qk_clip": True},
    "log_max_attention_logit=True": {"log_max_attention_logit": True},
    "flash_decode=True": {"flash_decode": True},
}


def config_of(**options: Any) -> Any:
    """After Megatron's own checks, of which some would come first."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a default of its own
        config = TransformerConfig(
            num_layers=2,
            hidden_size=32,
            num_attention_heads=4,
            attention_dropout=0.0,
            calculate_per_token_loss=True,
            use_cpu_initialization=True,
        )
    for name, value in options.items():
        setattr(config, name, value)
    return config


@pytest.mark.parametrize("words", REFUSED)
def test_options_that_would_go_wrong_are_refused_by_name(words: str) -> None:
    """One at a time: without it the config is taken."""
    check_supported(config_of())
    with pytest.raises(UnsupportedError, match="FlexCP does not train with") as caught:
        check_supported(config_of(**REFUSED[words]))
    assert words in caught.value.cause
    assert caught.value.remedy


def test_positions_of_three_axes_are_refused() -> None:
    """A model that rotates by them, wherever it got its spec."""
    model, rotary = GPTModel.__new__(GPTModel), MultimodalRotaryEmbedding.__new__(MultimodalRotaryEmbedding)
    for module in (model, rotary):
        nn.Module.__init__(module)
    model.config, model.decoder, model.rotary_pos_emb = config_of(), SimpleNamespace(layers=[]), rotary
    with pytest.raises(UnsupportedError, match="position_embedding_type 'mrope'"):
        enable(model)


def test_overlapped_reduction_needs_its_function() -> None:
    """Every backward pass would reduce, and gradients would be added up several times."""
    config = config_of(finalize_model_grads_func=print)
    _check_functions(config, SimpleNamespace(overlap_grad_reduce=False))
    with pytest.raises(ConfigError, match=r"config\.no_sync_func is not set"):
        _check_functions(config, SimpleNamespace(overlap_grad_reduce=True))
    config.no_sync_func = print
    _check_functions(config, SimpleNamespace(overlap_grad_reduce=True))


def test_a_device_is_called_by_its_own_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by that of CUDA, which knows no other."""
    devices = SimpleNamespace(get_device_name=lambda device: f"{device.type} of some vendor")
    monkeypatch.setattr(torch, "get_device_module", lambda device: devices)
    assert device_name(torch.device("xpu", 0)) == "xpu of some vendor"
    assert device_name(torch.device("cpu")) == "cpu"


def test_a_shape_counts_what_a_token_meets() -> None:
    """Two matrices without a gate; of experts those that are chosen; embeddings apart, as in GPTModel."""
    plain = shape_of(config_of(ffn_hidden_size=96), 100)
    assert (plain.intermediate, plain.extra_parameters, plain.tied) == (64, 0, False)
    assert shape_of(config_of(ffn_hidden_size=96, gated_linear_unit=True), 100, tied=True).intermediate == 96
    mixture = {
        "gated_linear_unit": True,
        "ffn_hidden_size": 96,
        "num_moe_experts": 8,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 24,
        "moe_shared_expert_intermediate_size": 16,
    }
    every = shape_of(config_of(**mixture), 100)
    assert (every.intermediate, every.extra_parameters) == (2 * 24 + 16, 2 * 6 * 3 * 32 * 24)
    for half in (2, [0, 1]):
        shape = shape_of(config_of(**mixture, moe_layer_freq=half), 100)
        assert (shape.intermediate, shape.extra_parameters) == ((96 + 64) // 2, 6 * 3 * 32 * 24)
