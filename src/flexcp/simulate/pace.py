"""How fast each task goes on its ranks: their speeds, and the jitter of one step."""

from __future__ import annotations

from itertools import chain

import numpy as np
import numpy.typing as npt

from flexcp.core.plan import Plan
from flexcp.simulate.conditions import Conditions

Array = npt.NDArray[np.float64]


def paces(plan: Plan, step: int, conditions: Conditions) -> Array:
    """Pace of every task, that of its slowest member; 1 is what the cost model says.

    Jitter is a function of seed and step alone, whatever happens in the run.
    """
    cluster = plan.cluster
    degrees = np.array([task.degree for task in plan.tasks])
    if not (conditions.jitter or conditions.speeds or cluster.speeds):
        return np.ones(len(degrees))
    speeds = np.array(cluster.speeds) if cluster.speeds else np.ones(cluster.ranks)
    for rank, speed in conditions.speeds.items():
        speeds[rank] = speed
    members = speeds[list(chain.from_iterable(task.ranks for task in plan.tasks))]
    if conditions.jitter:
        members = members / jitter(len(members), conditions.jitter, conditions.seed, step)
    slowest: Array = np.minimum.reduceat(members, np.cumsum(degrees) - degrees)
    return slowest


def jitter(count: int, spread: float, seed: int, step: int) -> Array:
    """Log-normal factors of mean 1.

    Made from raw PCG64 bits by the formula of Box and Muller: NumPy keeps raw bits stable across versions,
    and promises no such thing for `Generator.normal`.

    >>> jitter(3, 0.1, seed=0, step=7).round(4).tolist() == jitter(5, 0.1, 0, 7)[:3].round(4).tolist()
    True
    """
    bits = np.random.PCG64(np.random.SeedSequence([seed, step])).random_raw(2 * count)
    uniform = (bits >> np.uint64(11)) * 2.0**-53
    radius = np.sqrt(-2.0 * np.log1p(-uniform[::2]))
    normal = radius * np.cos(2.0 * np.pi * uniform[1::2])
    factors: Array = np.exp(spread * normal - spread**2 / 2)
    return factors
