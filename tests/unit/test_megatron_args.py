"""`flexcp plan --from-megatron-args`: the numbers of a launch script, and what would change in it."""

import json
import re

import pytest

from flexcp.cli import main
from flexcp.cli.megatron_args import read_megatron_args
from flexcp.core.errors import ConfigError

SCRIPT = """#!/bin/bash
# --num-layers 99 is not meant
export GPUS_PER_NODE=8
NNODES=4
TP=2
RUN_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes ${NNODES}
    --master_addr $MASTER_ADDR
)
MODEL="--num-layers 32 --hidden-size 4096 \\
    --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --swiglu --untie-embeddings-and-output-weights --vocab-size 128256"
torchrun ${RUN_ARGS[@]} pretrain_gpt.py $MODEL \\
    --tensor-model-parallel-size $TP --pipeline-model-parallel-size ${PP:-2} --context-parallel-size 2 \\
    --seq-length 32768 --micro-batch-size 1 --global-batch-size=12 --lr 1e-4 --fp8-format hybrid
"""
SHORT = "--num-layers 2 --hidden-size 64 --num-attention-heads 4"


@pytest.fixture
def lengths(tmp_path):
    """Some lengths with a long tail."""
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps([200 * (1 + index % 7) for index in range(40)] + [60_000, 30_000]))
    return str(path)


def plain(text):
    return " ".join(re.sub(r"\x1b\[[0-9;]*m", "", text).split())


def test_a_script_is_read_for_its_numbers(tmp_path):
    """Comments, variables, arrays and defaults are the shell's; the last value wins."""
    path = tmp_path / "pretrain.sh"
    path.write_text(SCRIPT)

    run = read_megatron_args(f"@{path}")

    shape = run.shape
    assert (shape.layers, shape.hidden, shape.heads, shape.kv_heads) == (32, 4096, 32, 8)
    assert (shape.head_dim, shape.intermediate, shape.vocab, shape.tied) == (128, 14336, 128256, False)
    assert (run.tensor, run.pipeline, run.context, run.ranks) == (2, 2, 2, 8)
    assert (run.global_batch, run.devices_per_node, run.ranks_per_node) == (12, 8, 4)
    assert run.tokens_per_device == 16384
    assert run.notices == ("not read, and left as they are: --lr --master_addr.",)
    changes = " | ".join(run.changes)
    for words in (
        "remove --context-parallel-size 2",
        "remove --fp8-format hybrid",
        "--calculate-per-token-loss",
    ):
        assert words in changes
    assert "variable_seq_lengths=True" in changes


def test_what_the_flags_leave_open_is_as_megatron_has_it():
    """4 widths, two of three of them counted where there is no gate; tied; one rank a device."""
    run = read_megatron_args(f"{SHORT} --attention-dropout 0.0 --calculate-per-token-loss --vocab-size $V")

    assert (run.shape.intermediate, run.shape.kv_heads, run.shape.head_dim) == (170, 4, 16)
    assert run.shape.tied
    assert run.ranks is None
    assert any("--vocab-size $V" in notice for notice in run.notices)
    assert not any("add" in change for change in run.changes)
    assert read_megatron_args(f"{SHORT} --swiglu").shape.intermediate == 128


def test_experts_count_as_far_as_a_token_meets_them():
    """Two of them unless the flags say otherwise, and those that all tokens meet."""
    script = f"{SHORT} --swiglu --num-experts 8 --moe-ffn-hidden-size 24"
    shape = read_megatron_args(script).shape
    assert (shape.intermediate, shape.extra_parameters) == (48, 2 * 6 * 3 * 64 * 24)
    more = read_megatron_args(f"{script} --moe-router-topk 3 --moe-shared-expert-intermediate-size 16").shape
    assert (more.intermediate, more.extra_parameters) == (3 * 24 + 16, 2 * 5 * 3 * 64 * 24)


@pytest.mark.parametrize(
    ("text", "cause", "remedy"),
    [
        ("@nowhere.sh", "nowhere.sh cannot be read", "path of a launch script"),
        ("--hidden-size 64", "lacks --num-layers, --num-attention-heads", "describe the model"),
        (f"{SHORT} --num-layers many", "--num-layers is 'many'", "whole number"),
        (f"{SHORT} --tensor-model-parallel-size 0", "--tensor-model-parallel-size is '0'", "at least 1"),
        (f"{SHORT} --nproc-per-node 6 --context-parallel-size 4", "6 processes are no multiple", "--ranks"),
        ("", "has no flag", "--num-layers 32"),
        ("--num-layers '2", "is not a list of flags", "as the shell"),
    ],
)
def test_what_cannot_be_read_is_named(text, cause, remedy):
    with pytest.raises(ConfigError) as found:
        read_megatron_args(text)

    assert cause in str(found.value)
    assert remedy in str(found.value)


def test_a_plan_says_what_flexcp_would_change(lengths, tmp_path, capfd):
    """N, groups, tokens a rank; the layout in use is the baseline; pipelines run in lockstep."""
    path = tmp_path / "pretrain.sh"
    path.write_text(SCRIPT)

    assert main(["plan", lengths, "--from-megatron-args", f"@{path}", "--json"]) == 0
    given = json.loads(capfd.readouterr().out)
    inputs = given["inputs"]

    assert (inputs["ranks"], inputs["ranks_per_node"], inputs["global_batch"]) == (8, 4, 12)
    assert (inputs["mode"], inputs["current_cp"], given["baseline"]) == ("lockstep", 2, "static cp=2")
    assert inputs["megatron_changes"][0].startswith("N = 8 ranks, each a TP 2 × PP 2 cell; groups of 1 to 8")
    assert f"{inputs['tokens_per_rank']:,} tokens a rank (today 16,384)" in inputs["megatron_changes"][0]

    assert main(["plan", lengths, "--from-megatron-args", f"@{path}"]) == 0
    shown = plain(capfd.readouterr().out)
    assert "note: filling the 2 stages adds" in shown
    assert "do: remove --context-parallel-size 2" in shown
    assert "note: not read, and left as they are: --lr --master_addr." in shown


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        (["--from-megatron-args", SHORT], "does not say on how many devices"),
        (["--from-megatron-args", SHORT, "--model", "qwen3-8b", "--ranks", "8"], "both describe the model"),
        ([], "--model and --ranks missing"),
        (["--model", "qwen3-8b"], "--ranks missing"),
    ],
)
def test_model_and_ranks_are_given_once(lengths, capfd, options, cause):
    assert main(["plan", lengths, *options]) == 2
    assert cause in plain(capfd.readouterr().err)


def test_options_win_over_the_script(lengths, capfd):
    """Numbers that are given twice are the option's."""
    flags = f"{SHORT} --nproc-per-node 8 --global-batch-size 4"
    options = ["--ranks", "2", "--ranks-per-node", "2", "--global-batch", "6", "--json"]

    assert main(["plan", lengths, "--from-megatron-args", flags, *options]) == 0
    inputs = json.loads(capfd.readouterr().out)["inputs"]

    assert (inputs["ranks"], inputs["ranks_per_node"], inputs["global_batch"]) == (2, 2, 6)
    assert inputs["mode"] == "free-running"


def test_assignments_are_followed_in_their_order(tmp_path):
    """Several a line, appended to, made of one another."""
    script = tmp_path / "run.sh"
    script.write_text(
        f'ARGS="{SHORT}"\nexport A=1 TP=4 GBS=64\nOPT="--global-batch-size $GBS"\n'
        'OPT="$OPT --context-parallel-size 2"\nARGS+=" --swiglu"\n'
        "torchrun pretrain.py $ARGS $OPT --tensor-model-parallel-size $TP\n"
    )
    run = read_megatron_args(f"@{script}")

    assert (run.global_batch, run.context, run.tensor) == (64, 2, 4)
    assert not any("does not set" in notice for notice in run.notices)


@pytest.mark.parametrize(
    ("more", "notice"),
    [
        (
            "--tensor-model-parallel-size 4 --tensor-model-parallel-size 8",
            "--tensor-model-parallel-size is given as 4, 8: the last counts",
        ),
        ("--num_layers 64", "perhaps misspelt: --num_layers (--num-layers?)"),
        ("--recompute-granularity selective", "selective recomputation is counted as none"),
    ],
)
def test_what_may_be_a_mistake_is_noticed(more, notice):
    assert any(notice in found for found in read_megatron_args(f"{SHORT} {more}").notices)


@pytest.mark.parametrize(
    ("more", "cause"),
    [
        ("--num-layers " + "9" * 5000, "--num-layers is '999"),
        ("--group-query-attention --num-query-groups 3", "no multiple of 3 query groups"),
        ("--nproc-per-node 4 --expert-model-parallel-size 8", "no multiple of EP 8"),
    ],
)
def test_what_cannot_be_is_refused(more, cause):
    with pytest.raises(ConfigError, match=cause):
        read_megatron_args(f"{SHORT} {more}")


@pytest.mark.parametrize(("flag", "recomputed"), [("", False), ("--recompute-granularity full", True)])
def test_a_plan_recomputes_as_the_script_does(tmp_path, capfd, flag, recomputed):
    """Ten times the tokens fit where whole layers are computed again."""
    lengths = tmp_path / "lengths.json"
    lengths.write_text("[100, 200]")
    given = ["plan", str(lengths), "--ranks", "2", "--json", "--from-megatron-args"]
    assert main([*given, f"{SHORT} --expert-model-parallel-size 2 {flag}"]) == 0
    inputs = json.loads(capfd.readouterr().out)["inputs"]
    assert inputs["checkpointing"] is recomputed
    assert inputs["mode"] == "lockstep"  # experts meet in every layer
