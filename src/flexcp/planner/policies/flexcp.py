"""Policy `flexcp`, the default: plans the whole global batch at once, by time, within memory.

Its own plan is taken as it is once it is within 0.5 % of the bound. Until then `paper` and `static` are asked
too, and the best plan wins. So flexcp <= max(other, 1.005 · bound) always, and flexcp <= other wherever its
own plan is not that close. This holds up to 4096 samples; beyond, `paper`,
which packs in O(K·K'), would take minutes and is not asked.
"""

from __future__ import annotations

from flexcp.planner.bounds import lower_bound_s
from flexcp.planner.degrees import long_samples
from flexcp.planner.list_schedule import ListSchedule, in_waves, list_schedule
from flexcp.planner.policies import paper, static
from flexcp.planner.problem import Assignment, Problem
from flexcp.planner.timeline import makespan_s, schedule
from flexcp.planner.waves import search

# No more is tried once a plan is within this factor of the bound.
CLOSE_ENOUGH = 1.005
# Beyond this a free-running step is also sought among lockstep plans, run without their barriers.
_FAR = 1.03
# Others are asked, and free-running steps sought among lockstep plans, for batches up to this many samples.
MOST_ASKED_SAMPLES = 4096
# Free-running: the longest that one long sample may run, as shares of the bound of the step.
_SHARES = (1.0, 0.5, 0.25, 0.12)
# Where the bound itself cannot be met, shares above 1: part of the way to the best step found.
_LONGER = (0.5, 0.75, 0.25)


def assign(problem: Problem) -> Assignment:
    """Free-running: list schedules, several ways. Lockstep: a search for waves. Both stop when close.

    Complexity: that of `list_schedule` or `waves.search`; the other policies' on top where the gap is wide.
    """
    goal_s = CLOSE_ENOUGH * lower_bound_s(problem)
    candidates: list[Assignment] = []
    if problem.mode == "free-running":
        made = list_schedules(problem, goal_s)
        candidates.append(in_waves(problem, made))
        if made.step_s <= goal_s or problem.size > MOST_ASKED_SAMPLES:
            return candidates[0]
    if not candidates or made.step_s > _FAR * lower_bound_s(problem):
        candidates += search(problem)
    best = min(candidates, key=lambda candidate: _step_s(problem, candidate))
    if _step_s(problem, best) <= goal_s or problem.size > MOST_ASKED_SAMPLES:
        return best
    return min((best, paper.assign(problem), static.assign(problem)), key=lambda x: _step_s(problem, x))


def _step_s(problem: Problem, assignment: Assignment) -> float:
    return makespan_s(schedule(problem, assignment))


def list_schedules(problem: Problem, goal_s: float) -> ListSchedule:
    """The best list schedule; the first that is close enough.

    First rings stay inside nodes where they fit. Where that leaves too much idle, any ranks may form a ring,
    at the price of links between nodes.
    """
    bound_s = lower_bound_s(problem)
    samples = long_samples(problem, _SHARES[-1] * bound_s * problem.cluster.top_speed)
    node, everywhere = problem.cluster.ranks_per_node, problem.ranks

    best = list_schedule(problem, samples, bound_s, 1.0, node)
    for block in (node, everywhere):
        for share in _SHARES:
            if best.step_s <= goal_s:
                return best
            made = list_schedule(problem, samples, bound_s, share, block)
            best = min(best, made, key=lambda x: x.step_s)
    over = best.step_s / bound_s - 1
    for part in _LONGER:
        if best.step_s > goal_s:
            made = list_schedule(problem, samples, bound_s, 1 + part * over, node)
            best = min(best, made, key=lambda x: x.step_s)
    return best
