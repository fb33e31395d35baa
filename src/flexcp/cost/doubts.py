"""What a user should know before believing what a calibration predicts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from flexcp.core.model_shape import ModelShape
from flexcp.cost.calibration import Calibration
from flexcp.cost.fit import TERMS

_FAR = 4.0  # lengths beyond so many times the measured range are extrapolated
_POOR, _LOOSE = 0.15, 0.5  # errors and spreads from which a prediction is a guess
_FAR_MEMORY = 2.0  # measured and counted memory that differ by more deserve a look


def doubts(
    calibration: Calibration,
    shape: ModelShape,
    longest_tokens: int,
    max_degree: int,
    *,
    checkpointing: bool,
    crosses_nodes: bool = False,
) -> tuple[str, ...]:
    """What the user should know before times are predicted far from what was measured.

    Args:
        calibration: in use.
        shape: the model to plan for.
        longest_tokens: the longest sample.
        max_degree: the widest group that can occur.
        checkpointing: whether layers will be recomputed in the backward pass.
        crosses_nodes: whether a group may have ranks of several nodes.
    """
    found = list(_uncertain(calibration))
    model = calibration.setup.model
    if longest_tokens > _FAR * calibration.longest_tokens:
        found.append(
            f"The longest sample has {longest_tokens:,} tokens, the calibration saw "
            f"{calibration.longest_tokens:,}: times of long samples are extrapolated."
        )
    if max_degree > _FAR * max(calibration.degrees):
        found.append(
            f"Groups may have {max_degree} ranks, the calibration saw {max(calibration.degrees)}: "
            "times of wide groups are extrapolated."
        )
    if max_degree > 1 and calibration.setup.link is None:
        found.append(
            "The calibration was measured by one rank alone: links inside a node are those of the preset "
            f"{calibration.link_preset.name}."
        )
    if crosses_nodes and calibration.setup.inter_link is None:
        found.append(
            "The calibration was measured inside one node: links between nodes are those of the preset "
            f"{calibration.link_preset.name}."
        )
    if checkpointing != calibration.setup.checkpointing:
        found.append(
            f"The calibration was measured with{'' if calibration.setup.checkpointing else 'out'} "
            "recomputation of layers: its times are scaled by counted operations."
        )
    if replace(shape, name=model.name) != model:
        found.append(
            f"The calibration is of another model ({model.name}, {model.layers} layers x {model.hidden})"
            ": its times are scaled by counted operations."
        )
    if not 1 / _FAR_MEMORY <= calibration.token_scale <= _FAR_MEMORY:
        found.append(
            f"A token was measured to take {calibration.token_scale:.1f} times the bytes that are counted: "
            "tokens per rank follow the measurement."
        )
    return tuple(found)


def _uncertain(calibration: Calibration) -> Iterator[str]:
    """What the measurements did not pin down."""
    if calibration.error_mean > _POOR:
        yield (
            f"The calibration misses tasks that it was not fitted on by {calibration.error_mean:.0%} on "
            "average: measure again on an idle machine."
        )
    spreads, values = calibration.spreads, calibration.coefficients
    loose = [name for name in TERMS if spreads[name] > _LOOSE and values[name] > 0]
    if loose:
        moves = ", ".join(f"{term} ± {spreads[term]:.0%}" for term in loose)
        yield (f"The calibration hardly knows {moves}: measure more lengths, numbers of samples and degrees.")
