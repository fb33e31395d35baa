"""What no plan can beat under the same cost model; every plan carries it as `bound_s`.

Bounds are about the model, not the machine: they ignore nothing that the model charges at its cheapest.
"""

from __future__ import annotations

import numpy as np

from flexcp.planner.problem import Problem


def lower_bound_s(problem: Problem) -> float:
    """The largest of three bounds on the makespan of a step.

    1. Work: every rank-second of every sample without communication, spread evenly over N ranks, plus the
       constant cost of packs that memory forces (`_forced_packs_s`).
    2. The longest sample: alone at its best degree. A pack that contains a sample takes no less.
    3. Samples of more than half of what the cluster holds: no two of them can run at a time, so their best
       times add up.

    All three hold in both modes. Complexity: O(K·N) for the table of times, which is shared.
    """
    best_s = problem.sample_table_s.min(axis=1)
    tokens = np.array([load.tokens for load in problem.loads])
    huge_s = float(best_s[2 * tokens > problem.cluster.capacity_tokens].sum())
    work_s = float(problem.work_s.sum()) / problem.ranks + _forced_packs_s(problem)
    return max(work_s, float(best_s.max()), huge_s)


def _forced_packs_s(problem: Problem) -> float:
    """Seconds of `pack_s` that no plan avoids.

    Lockstep: memory forces ceil(tokens / (N·E)) waves, each with at least one pack. Within a wave the
    longest pack takes pack_s plus at least 1/N of the wave's work, so this adds to the work bound in full.
    Free-running: ceil(tokens / E) rank-sized packs, spread over N ranks.
    """
    cluster, pack_s = problem.cluster, problem.cost.pack_s
    if problem.mode == "lockstep":
        return pack_s * -(-problem.tokens // cluster.capacity_tokens)
    return pack_s * -(-problem.tokens // cluster.tokens_per_rank) / problem.ranks
