"""Many points made few, without hiding what stands out."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from flexcp.report.page.subject import Curve


def thin_curves(
    steps: Sequence[int], curves: Sequence[Curve], most: int
) -> tuple[tuple[int, ...], tuple[Curve, ...]]:
    """Means over runs of neighbouring steps, each at the first step of its run.

    >>> thin_curves((0, 1, 2), (Curve("a", (1.0, 3.0, 5.0), "main"),), 2)
    ((0, 2), (Curve(name='a', values=(2.0, 5.0), style='main'),))
    """
    stride = -(-len(steps) // most)
    starts = range(0, len(steps), stride)
    thinned = tuple(
        Curve(curve.name, tuple(fmean(curve.values[i : i + stride]) for i in starts), curve.style)
        for curve in curves
    )
    return tuple(steps[start] for start in starts), thinned


def thin_peaks(
    ranks: Sequence[int], peaks: Sequence[int], most: int
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The highest of every run of neighbouring ranks, named after the run.

    >>> thin_peaks((0, 1, 2), (5, 9, 4), 2)
    (('0–1', '2'), (9, 4))
    """
    stride = -(-len(ranks) // most)
    starts = range(0, len(ranks), stride)
    runs = [ranks[start : start + stride] for start in starts]
    names = tuple(f"{run[0]}–{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    return names, tuple(max(peaks[start : start + stride]) for start in starts)
