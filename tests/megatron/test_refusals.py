"""What FlexCP would compute wrongly under Megatron is refused by name, before step 0, on every process."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest

from flexcp.core.errors import ConfigError, FlexCPError, SampleTooLongError, UnsupportedError
from tests.datasets import ListDataset
from tests.harness import run_ranks
from tests.megatron import shim
from tests.megatron.jobs import make_planner

if importlib.util.find_spec("megatron") is None:
    pytest.skip(
        "megatron-core is not installed: pip install 'flexcp[train,megatron]'", allow_module_level=True
    )


# Pipeline and expert-parallel sizes.
GRIDS = {"plain": (1, 1), "pipeline": (2, 1), "experts": (1, 2)}


def provoke_all(world: Any) -> dict[str, dict[str, tuple[str, str]]]:
    """What is refused on each grid, by one world after the other."""
    shim.install()
    from megatron.core import parallel_state

    found = {}
    for name, (pipeline, expert) in GRIDS.items():
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=pipeline, expert_model_parallel_size=expert
        )
        found[name] = provoke(world, pipeline, expert)
        parallel_state.destroy_model_parallel()
    return found


def provoke(world: Any, pipeline: int, expert: int) -> dict[str, tuple[str, str]]:
    """Kind and text of every refusal, by name."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    import flexcp
    from tests.megatron import host

    found: dict[str, tuple[str, str]] = {}

    def expect(name: str, call: Callable[[], object]) -> None:
        try:
            call()
            found[name] = "", "nothing was raised"
        except FlexCPError as error:
            found[name] = type(error).__name__, str(error)

    def changed(**options: Any) -> Callable[[], object]:
        """The config after Megatron's own checks, of which some would come first."""

        def build() -> object:
            config = host.make_config()
            for name, value in options.items():
                setattr(config, name, value)
            return flexcp.megatron.enable(_with(host.provider(host.make_config()), config))

        return build

    def engine(model: Any = None, planner: Any = None, data: Any = None, **options: Any) -> Any:
        options = {"global_batch": 3, **options}
        return flexcp.megatron.Engine(
            model or host.provider(host.make_config()),
            planner or make_planner(world.size // pipeline),
            data or ListDataset([9, 20, 5]),
            **options,
        )

    cases: dict[str, dict[str, Any]] = {
        "cp": {"context_parallel_size": 2},
        "dynamic": {"hybrid_context_parallel": True},
        "interleaved": {"virtual_pipeline_model_parallel_size": 2},
        "mla": {"multi_latent_attention": True},
        "mamba": {"is_hybrid_model": True},
        "linear": {"experimental_attention_variant": "gated_delta_net"},
        "fp8": {"fp8": "e4m3"},
        "graphs": {"cuda_graph_impl": "local"},
        "old graphs": {"enable_cuda_graph": True},
        "dropout": {"attention_dropout": 0.1},
        "window": {"window_size": (128, 0)},
        "sinks": {"softmax_type": "learnable"},
        "mtp": {"mtp_num_layers": 1},
        "aux": {"num_moe_experts": 4, "moe_aux_loss_coeff": 0.01},
        "capacity": {"num_moe_experts": 4, "moe_expert_capacity_factor": 1.0},
        "average": {"calculate_per_token_loss": False},
        "two": {"fp8": "e4m3", "multi_latent_attention": True},
    }
    for name, options in cases.items():
        expect(name, changed(**options))
    if pipeline > 1:
        expect("lengths", changed(variable_seq_lengths=False))
    if pipeline > 1 or expert > 1:
        expect("mode", lambda: engine(planner=_free_running(world.size // pipeline)))
    experts = host.make_config(
        num_moe_experts=4,
        moe_ffn_hidden_size=48,
        recompute_granularity="selective",
        recompute_modules=["moe"],
    )
    expect("routers", lambda: host.provider(experts, aux=0.1))
    mla = get_gpt_layer_local_spec(multi_latent_attention=True)
    expect("mla spec", lambda: flexcp.megatron.with_attention(mla))
    expect("own attention", lambda: flexcp.megatron.enable(host.provider(host.make_config(), flexible=False)))
    expect("not gpt", lambda: flexcp.megatron.enable(host.Norm(host.make_config(), 8)))
    expect("chunks", lambda: engine(model=[host.provider(host.make_config())] * 2))
    expect("fsdp", lambda: engine(model=_fsdp(host.provider(host.make_config()))))
    expect("ranks", lambda: engine(planner=make_planner(world.size // pipeline + 1)))
    expect("too long", lambda: engine(data=ListDataset([9, 2000])))
    expect("batch", lambda: engine(global_batch=0))
    expect("no finalize", lambda: list(engine(model=_without(host.provider(host.make_config())))))
    return found


def _with(model: Any, config: Any) -> Any:
    model.config = config
    return model


def _without(model: Any) -> Any:
    model.config.finalize_model_grads_func = None
    return model


def _fsdp(model: Any) -> Any:
    from types import SimpleNamespace

    return SimpleNamespace(module=model, ddp_config=SimpleNamespace(use_megatron_fsdp=True))


def _free_running(ranks: int) -> Any:
    from flexcp.core.cluster import Cluster
    from flexcp.core.model_shape import ModelShape
    from flexcp.cost.model import cost_model
    from flexcp.cost.presets import hardware
    from flexcp.planner import Planner

    shape = ModelShape("tiny", 4, 32, 4, 2, 8, 48, 100)
    return Planner(Cluster(ranks, 256), cost_model(shape, hardware("cpu")))


NAMES = {
    "cp": (UnsupportedError, "context_parallel_size=2"),
    "dynamic": (UnsupportedError, "hybrid_context_parallel"),
    "interleaved": (UnsupportedError, "interleaved pipelines"),
    "mla": (UnsupportedError, "MLA"),
    "mamba": (UnsupportedError, "Mamba"),
    "linear": (UnsupportedError, "gated_delta_net"),
    "fp8": (UnsupportedError, "FP8"),
    "graphs": (UnsupportedError, "CUDA graphs"),
    "old graphs": (UnsupportedError, "CUDA graphs"),
    "dropout": (UnsupportedError, "attention_dropout=0.1"),
    "window": (UnsupportedError, "window_size=(128, 0)"),
    "sinks": (UnsupportedError, "softmax_type='learnable'"),
    "mtp": (UnsupportedError, "mtp_num_layers=1"),
    "aux": (UnsupportedError, "flexcp.megatron.enable(model, moe_aux_loss_coeff=…)"),
    "routers": (UnsupportedError, "recompute_modules has 'moe'"),
    "capacity": (UnsupportedError, "moe_expert_capacity_factor=1.0"),
    "average": (ConfigError, "calculate_per_token_loss is False"),
    "two": (UnsupportedError, "MLA), FP8"),
    "lengths": (ConfigError, "variable_seq_lengths is False"),
    "mode": (ConfigError, 'mode="lockstep"'),
    "mla spec": (UnsupportedError, "MLASelfAttention"),
    "own attention": (UnsupportedError, "DotProductAttention"),
    "not gpt": (UnsupportedError, "Norm is not a GPTModel"),
    "chunks": (UnsupportedError, "interleaved pipelines"),
    "fsdp": (UnsupportedError, "Megatron-FSDP"),
    "ranks": (ConfigError, "data-parallel ranks"),
    "too long": (SampleTooLongError, "2000 tokens"),
    "batch": (ConfigError, "global_batch is 0"),
    "no finalize": (ConfigError, "finalize_model_grads_func is not set"),
}


def test_what_would_go_wrong_is_refused_by_name() -> None:
    """On all processes alike, with a remedy."""
    by_process = run_ranks(provoke_all, 2)

    for grid, (pipeline, expert) in GRIDS.items():
        absent = {"lengths"} if pipeline == 1 else set()
        absent |= {"mode"} if pipeline == expert == 1 else set()
        for found in (of_process[grid] for of_process in by_process):
            assert set(found) == set(NAMES) - absent
            for name in found:
                kind, words = NAMES[name]
                assert found[name][0] == kind.__name__, (name, found[name])
                assert words in found[name][1], (name, found[name])
                assert "\n" in found[name][1], f"{name} has no remedy"
