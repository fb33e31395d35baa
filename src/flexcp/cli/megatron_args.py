"""A Megatron-LM launch script as a planning request: its numbers, and what FlexCP would change in it.

Reads flags, not shell: comments go, lines are joined, plain assignments are put in. What stays a variable,
and what FlexCP has no use for, is named and left alone.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path

from flexcp.cli.comparison import Setting
from flexcp.core.errors import ConfigError
from flexcp.core.model_shape import ModelShape, feed_forward
from flexcp.core.plan import Plan
from flexcp.planner.timeline import fill_s
from flexcp.report.tables import format_seconds

Flags = Mapping[str, str]

RANKS_PER_NODE, GLOBAL_BATCH = 8, 512  # of `plan` where nobody says otherwise

_VALUE = r"""[A-Za-z_]\w*\+?=(?:"[^"]*"|'[^']*'|[^\s();"']+)"""
_ASSIGNMENTS = re.compile(rf"^\s*(?:export\s+)?({_VALUE}(?:[ \t]+{_VALUE})*)\s*$", re.MULTILINE)
_ASSIGNMENT = re.compile(r"""(\w+)(\+?)=("[^"]*"|'[^']*'|\S+)""")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|(\w+))")
_COMMENT = re.compile(r"(^|\s)#.*$", re.MULTILINE)
_DEEP = 5  # variables inside variables
_DIGITS = 10  # of a count
_CLOSE = 0.75  # how alike names are of which one may be meant

_TP, _PP, _EP = (f"{kind}-model-parallel-size" for kind in ("tensor", "pipeline", "expert"))
_CP = "context-parallel-size"
# Megatron's default, without --ffn-hidden-size: 4 widths, of which a gated one takes two thirds.
_FFN = 4
_VOCAB_MULTIPLE = 128
_TOPK = 2  # experts of a token
# Read for a number, and left as they are.
_MODEL = {"num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads", "kv-channels", "swiglu"}
_HEADS = {"group-query-attention", "num-query-groups", "num-experts", "untie-embeddings-and-output-weights"}
_VOCAB = {"vocab-size", "padded-vocab-size", "make-vocab-size-divisible-by"}
_EXPERTS = {"moe-router-topk", "moe-ffn-hidden-size", "moe-shared-expert-intermediate-size"}
_BATCH = {"global-batch-size", "micro-batch-size", "seq-length", "variable-seq-lengths"}
_LAUNCH = {"nnodes", "nproc-per-node", "nproc_per_node"}
_LOSS = {"calculate-per-token-loss", "attention-dropout"}
_RECOMPUTE = {"recompute-granularity", "recompute-activations"}
_READ = {_TP, _PP, _CP, _EP} | _MODEL | _HEADS | _EXPERTS | _VOCAB | _BATCH | _LAUNCH | _LOSS | _RECOMPUTE
# What `flexcp.megatron` refuses before step 0, and what to do about it.
_REFUSED = {
    "hybrid-context-parallel": "FlexCP plans in its place",
    "dynamic-context-parallel": "FlexCP plans in its place",
    "multi-latent-attention": "not supported",
    "fp8-format": "not supported",
    "fp4-format": "not supported",
    "enable-cuda-graph": "lengths change with every micro-batch",
    "cuda-graph-impl": "lengths change with every micro-batch",
    "use-megatron-fsdp": "use the distributed optimizer",
    "num-layers-per-virtual-pipeline-stage": "interleaved pipelines are not supported",
    "num-virtual-stages-per-pipeline-rank": "interleaved pipelines are not supported",
    "mtp-num-layers": "not supported",
    "moe-z-loss-coeff": "not supported",
    "moe-expert-capacity-factor": "not supported",
    "moe-aux-loss-coeff": "give it to flexcp.megatron.enable(model, moe_aux_loss_coeff=…)",
    "window-size": "not supported",
    "qk-clip": "not supported",
}


@dataclass(frozen=True, slots=True)
class MegatronRun:
    """What a launch script says.

    Attributes:
        source: what to call it.
        shape: the model.
        tensor, pipeline, context, expert: sizes of the grid today.
        checkpointing: whole layers are recomputed in the backward pass.
        ranks: N, cells of tensor x pipeline processes; None if the script does not say on how many devices.
        devices_per_node: that a node has; None likewise.
        global_batch: samples a step; None likewise.
        tokens_per_device: of a micro-batch, that one context-parallel rank holds today; None likewise.
        changes: what would have to change, a sentence each.
        notices: what was assumed, and flags that were not read.
    """

    source: str
    shape: ModelShape
    tensor: int
    pipeline: int
    context: int
    expert: int
    checkpointing: bool
    ranks: int | None
    devices_per_node: int | None
    global_batch: int | None
    tokens_per_device: int | None
    changes: tuple[str, ...]
    notices: tuple[str, ...]

    @property
    def devices(self) -> int:
        """Of one cell."""
        return self.tensor * self.pipeline

    @property
    def ranks_per_node(self) -> int | None:
        """Cells that share a node's links: those whose tensor-parallel processes are all in it."""
        if self.devices_per_node is None:
            return None
        return max(1, self.devices_per_node // self.tensor)


def read_megatron_args(text: str) -> MegatronRun:
    """Read flags, or with a leading `@` a file of them: a launch script, or what it passes on.

    Raises:
        ConfigError: there is no such file, a number is missing, or is not one.
    """
    source, content = "--from-megatron-args", text
    if text.startswith("@"):
        source = text[1:]
        try:
            content = Path(source).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{source} cannot be read ({getattr(error, 'strerror', None) or 'not a text'})",
                'Give the flags themselves, or @ and the path of a launch script: "@pretrain.sh".',
            ) from None
    return _run(source, *_flags(content, source))


def _flags(content: str, source: str) -> tuple[dict[str, str], list[str]]:
    """Flags with their values, the last one wins; and what a reader should know of them."""
    content = _COMMENT.sub(r"\1", content.replace("\\\n", " "))
    variables = _variables(content)
    for _ in range(_DEEP):
        content = _VARIABLE.sub(partial(_value_of, variables=variables), content)
    try:
        tokens = shlex.split(content.replace("(", " ").replace(")", " "))
    except ValueError as error:
        raise ConfigError(
            f"{source} is not a list of flags ({error})", "Give the flags as the shell would pass them on."
        ) from None
    given: list[tuple[str, str]] = []
    for token in tokens:
        if token.startswith("--"):
            name, _, value = token[2:].partition("=")
            given.append((name, value))
        elif given and not given[-1][1]:
            given[-1] = given[-1][0], token
    if not given:
        raise ConfigError(f"{source} has no flag", 'Such as "--num-layers 32 --hidden-size 4096".')
    notices = []
    unset = [f"--{name} {value}" for name, value in given if "$" in value and name in _READ]
    if unset:
        notices.append(f"variables that {source} does not set: {', '.join(dict.fromkeys(unset))}.")
    known = [(name, value) for name, value in given if not ("$" in value and name in _READ)]
    for name in sorted(_READ):
        values = dict.fromkeys(value for other, value in known if other == name)
        if len(values) > 1:
            notices.append(f"--{name} is given as {', '.join(values)}: the last counts.")
    return dict(known), notices


def _variables(content: str) -> dict[str, str]:
    """Plain assignments, in their order: a later one may append to an earlier."""
    variables: dict[str, str] = {}
    for line in _ASSIGNMENTS.findall(content):
        for name, append, value in _ASSIGNMENT.findall(line):
            text = _VARIABLE.sub(partial(_value_of, variables=variables), value.strip("\"'"))
            variables[name] = variables.get(name, "") + text if append else text
    return variables


def _value_of(found: re.Match[str], variables: Mapping[str, str]) -> str:
    name = found[1] or found[3]
    return variables.get(name, found[0] if found[2] is None else found[2])


def _run(source: str, flags: Flags, notices: list[str]) -> MegatronRun:
    shape = _shape(source, flags, notices)
    tensor, pipeline, context, expert = (_count(flags, name, 1) for name in (_TP, _PP, _CP, _EP))
    per_node = _optional(flags, "nproc-per-node") or _optional(flags, "nproc_per_node")
    ranks = None
    if per_node is not None:
        processes = per_node * _count(flags, "nnodes", 1)
        if processes % (tensor * pipeline * context):
            raise ConfigError(
                f"{processes} processes are no multiple of TP {tensor} x PP {pipeline} x CP {context}",
                "Check --nproc-per-node and --nnodes, or leave them out and give --ranks.",
            )
        ranks = processes // (tensor * pipeline)
        if ranks % expert:
            raise ConfigError(
                f"{ranks} cells of TP {tensor} x PP {pipeline} are no multiple of EP {expert}",
                f"Check --{_EP}, --nproc-per-node and --nnodes.",
            )
    sequence = _optional(flags, "seq-length")
    rows = None if sequence is None else -(-sequence * _count(flags, "micro-batch-size", 1) // context)
    unread = sorted(f"--{name}" for name in flags if name not in _READ and name not in _REFUSED)
    if unread:
        notices.append(f"not read, and left as they are: {' '.join(unread)}.")
        meant = {flag: get_close_matches(flag[2:], _READ, 1, _CLOSE) for flag in unread}
        near = [f"{flag} (--{found[0]}?)" for flag, found in meant.items() if found]
        if near:
            notices.append(f"perhaps misspelt: {', '.join(near)}.")
    return MegatronRun(
        source,
        shape,
        tensor,
        pipeline,
        context,
        expert,
        _recomputes(flags, notices),
        ranks,
        per_node,
        _optional(flags, "global-batch-size"),
        rows,
        tuple(_changes(flags, pipeline, context)),
        tuple(notices),
    )


def _recomputes(flags: Flags, notices: list[str]) -> bool:
    """Whether whole layers are; what recomputes less is counted as nothing, so that memory suffices."""
    granularity = flags.get("recompute-granularity", "")
    if granularity == "selective" or "recompute-activations" in flags:
        notices.append("selective recomputation is counted as none: a rank may hold more tokens.")
    return granularity == "full"


def _shape(source: str, flags: Flags, notices: list[str]) -> ModelShape:
    needed = ("num-layers", "hidden-size", "num-attention-heads")
    missing = [name for name in needed if name not in flags]
    if missing:
        raise ConfigError(
            f"{source} lacks {', '.join(f'--{name}' for name in missing)}",
            "Give the flags that describe the model, as pretrain_gpt.py takes them.",
        )
    layers, hidden, heads = (_count(flags, name, 0) for name in needed)
    gated = "swiglu" in flags
    groups = _count(flags, "num-query-groups", 1) if "group-query-attention" in flags else heads
    if heads % groups:
        raise ConfigError(
            f"{heads} attention heads are no multiple of {groups} query groups",
            "Check --num-attention-heads and --num-query-groups.",
        )
    wide = int(_FFN * hidden * 2 / 3) // 64 * 64 if gated else _FFN * hidden
    intermediate = _count(flags, "ffn-hidden-size", wide)
    intermediate, idle = feed_forward(
        hidden,
        layers,
        intermediate,
        gated=gated,
        experts=_count(flags, "num-experts", 0),
        chosen=_count(flags, "moe-router-topk", _TOPK),
        expert_width=_count(flags, "moe-ffn-hidden-size", intermediate),
        shared_width=_count(flags, "moe-shared-expert-intermediate-size", 0),
    )
    vocab = _optional(flags, "padded-vocab-size") or _optional(flags, "vocab-size")
    if vocab is None:
        vocab = 128 * 1024
        notices.append(f"no --vocab-size: {vocab:,} assumed; it matters to memory alone.")
    multiple = _count(flags, "make-vocab-size-divisible-by", _VOCAB_MULTIPLE) * _count(flags, _TP, 1)
    if "num-experts" in flags:
        notices.append("every layer is counted as a mixture of experts (--moe-layer-freq is not read).")
    return ModelShape(
        Path(source).stem if source != "--from-megatron-args" else "megatron-gpt",
        layers,
        hidden,
        heads,
        groups,
        _count(flags, "kv-channels", max(1, hidden // heads)),
        intermediate,
        -(-vocab // multiple) * multiple,
        tied="untie-embeddings-and-output-weights" not in flags,
        extra_parameters=idle,
    )


def _changes(flags: Flags, pipeline: int, context: int) -> list[str]:
    """What to do to the script."""
    changes = []
    if context > 1:
        changes.append(f"remove --{_CP} {context}: groups of any degree are made of the data-parallel ranks")
    for name, why in _REFUSED.items():
        if name in flags and flags[name] != "none" and not _is_zero(flags[name]):
            changes.append(f"remove --{name} {flags[name]}".rstrip() + f": {why}")
    if not _is_zero(flags.get("attention-dropout", "0.1")):
        changes.append("add --attention-dropout 0 (Megatron's default is 0.1)")
    if "calculate-per-token-loss" not in flags:
        changes.append("add --calculate-per-token-loss: micro-batches are of unequal size")
    if pipeline > 1 and "variable-seq-lengths" not in flags:
        changes.append("set variable_seq_lengths=True and moe_token_dispatcher_type='alltoall' in the config")
    if "seq-length" in flags:
        changes.append(f"--seq-length {flags['seq-length']} cuts and pads no more: samples stay whole")
    changes.append("model provider, forward step and loop: the lines in docs/megatron.md")
    return changes


def _is_zero(text: str) -> bool:
    """As a number, however it is written."""
    try:
        return float(text) == 0
    except ValueError:
        return False


def _optional(flags: Flags, name: str) -> int | None:
    return _count(flags, name, 0) if name in flags else None


def _count(flags: Flags, name: str, default: int) -> int:
    if name not in flags:
        return default
    value = flags[name]
    if not value.isascii() or not value.isdigit() or len(value) > _DIGITS or int(value) < 1:
        raise ConfigError(f"--{name} is {value[:40]!r}", "It is a whole number of at least 1.")
    return int(value)


@dataclass(frozen=True, slots=True)
class Asked:
    """The options of `plan` where a launch script may have spoken for the user."""

    model: str
    ranks: int
    ranks_per_node: int
    global_batch: int
    mode: str
    current_cp: int | None


def asked_of(
    run: MegatronRun | None,
    model: str | None,
    ranks: int | None,
    ranks_per_node: int | None,
    global_batch: int | None,
    mode: str,
    current_cp: int | None,
) -> Asked:
    """What was asked for: options first, then the script, then defaults.

    Pipelines and experts run in lockstep.

    Raises:
        ConfigError: model or ranks are missing, or the model was given twice.
    """
    if run is None:
        missing = [f"--{name}" for name, value in (("model", model), ("ranks", ranks)) if value is None]
        if missing:
            raise ConfigError(
                f"{' and '.join(missing)} missing",
                "Such as --model qwen3-8b --ranks 64; or --from-megatron-args with a launch script.",
            )
    elif model is not None:
        raise ConfigError("--model and --from-megatron-args both describe the model", "Leave one out.")
    ranks = ranks if ranks is not None or run is None else run.ranks
    if ranks is None:
        raise ConfigError(
            "the script does not say on how many devices it runs",
            "Add --ranks, the number of TP x PP cells, or --nproc-per-node and --nnodes to the flags.",
        )
    if run is not None and run.context > 1 and current_cp is None and ranks % run.context == 0:
        current_cp = run.context
    return Asked(
        model or (run.shape.name if run is not None else ""),
        ranks,
        _first(ranks_per_node, run.ranks_per_node if run else None, RANKS_PER_NODE),
        _first(global_batch, run.global_batch if run else None, GLOBAL_BATCH),
        "lockstep" if run is not None and max(run.pipeline, run.expert) > 1 else mode,
        current_cp,
    )


def _first(*values: int | None) -> int:
    return next(value for value in values if value is not None)


def fill_notice(run: MegatronRun, plan: Plan) -> str:
    """What predictions leave out of a pipeline."""
    added = format_seconds(fill_s(plan, run.pipeline))
    return f"filling the {run.pipeline} stages adds {added} to a step of {plan.policy}; times leave it out."


def changes_of(run: MegatronRun, setting: Setting) -> tuple[str, ...]:
    """What FlexCP would change, first what a rank is."""
    cluster = setting.cluster
    cell = f"TP {run.tensor} × PP {run.pipeline}"
    groups = f"N = {cluster.ranks} ranks, each a {cell} cell; groups of 1 to {cluster.ranks} of them"
    today = f", was CP {run.context} for every sample" if run.context > 1 else ""
    rows = f" (today {run.tokens_per_device:,})" if run.tokens_per_device is not None else ""
    holds = f"up to {cluster.tokens_per_rank:,} tokens a rank{rows}"
    return (f"{groups}{today}; {holds}", *run.changes)
