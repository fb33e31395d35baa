"""Policy `flexcp`, the default: plans the whole global batch at once, by time, within memory.

Its own plan is taken as it is once it is within 0.5 % of the bound. Until then `paper` and `static` are asked
too, and the best plan wins. So flexcp <= max(other, 1.005 · bound), and flexcp <= other wherever its own plan
is not that close. In lockstep this holds up to 4096 samples; beyond, `paper`, which packs in O(K·K'), would
take minutes and is not asked. Free-running it holds up to 256 samples: more samples fill every rank, and
asking takes longer than planning. From there to 4096 others are asked where the own plan is 3 % off.

The search takes every group to be a ring, and so does the bound that stops it. In the plan that wins, every
group has the fastest exchange that it may use.
"""

from __future__ import annotations

from flexcp.core.plan import Task
from flexcp.planner.bounds import lower_bound_s
from flexcp.planner.degrees import LongSamples, long_samples
from flexcp.planner.exchanges import with_fastest_exchanges
from flexcp.planner.list_schedule import ListSchedule, list_schedule, tasks
from flexcp.planner.policies import paper, static
from flexcp.planner.problem import Problem
from flexcp.planner.timeline import makespan_s, schedule
from flexcp.planner.waves import search

# No more is tried once a plan is within this factor of the bound.
CLOSE_ENOUGH = 1.005
# Others are asked for batches up to this many samples; free-running, beyond so many only where a step is far
# from the bound. Such steps are also sought among lockstep plans, run without their barriers.
MOST_ASKED_SAMPLES = 4096
MOST_ALWAYS_ASKED = 256
_FAR = 1.03
# Other ways to lay out rings are tried where the first leaves a step this far from the bound.
_NEAR = 1.015
# A target is not sought more closely than this share of the bound.
_CLOSE_TARGETS = 0.002
# Free-running: the longest that one long sample may run, as shares of the step.
_SHARES = (0.5, 0.25)
# Targets tried for each way to lay out rings, at most.
_TARGETS = 4
_ROUNDING = 1 + 1e-9


def plan_tasks(problem: Problem) -> tuple[Task, ...]:
    """The tasks of a search among rings, then the fastest exchange for each.

    Complexity: that of the search.
    """
    return with_fastest_exchanges(problem, _rings(problem))


def _rings(problem: Problem) -> tuple[Task, ...]:
    """Free-running: list schedules for several targets. Lockstep: a search for waves. Both stop when close.

    Complexity: that of `list_schedule` or `waves.search`; the other policies' on top where they are asked.
    """
    bound_s = lower_bound_s(problem)
    enough_s = CLOSE_ENOUGH * bound_s
    best: tuple[Task, ...] = ()
    if problem.mode == "free-running":
        best = tasks(problem, list_schedules(problem, enough_s))
        if problem.size > MOST_ALWAYS_ASKED:
            enough_s = _FAR * bound_s
        if makespan_s(best) <= enough_s or problem.size > MOST_ASKED_SAMPLES:
            return best
    if not best or makespan_s(best) > _FAR * bound_s:
        made = [schedule(problem, waves) for waves in search(problem, enough_s)]
        best = min([best, *made] if best else made, key=makespan_s)
    if makespan_s(best) <= enough_s or problem.size > MOST_ASKED_SAMPLES:
        return best
    return min(
        best, *(schedule(problem, ask(problem)) for ask in (paper.assign, static.assign)), key=makespan_s
    )


def list_schedules(problem: Problem, goal_s: float) -> ListSchedule:
    """The best list schedule; the first that is close enough.

    Rings stay inside nodes where they fit. Where that leaves a step far from the bound, any ranks may form a
    ring, at the price of links between nodes, and samples may get more ranks than the target asks for.
    """
    bound_s = lower_bound_s(problem)
    samples = long_samples(problem, _SHARES[-1] * bound_s * problem.cluster.top_speed)
    node = problem.cluster.ranks_per_node
    best = list_schedule(problem, samples, (bound_s + goal_s) / 2, 1.0, node)
    best = _lower(problem, samples, best, goal_s, (1.0, node))
    for layout in ((1.0, problem.ranks), *((share, node) for share in _SHARES)):
        if best.step_s > _NEAR * bound_s:
            best = _lower(problem, samples, best, goal_s, layout)
    return best


def _lower(
    problem: Problem, samples: LongSamples, best: ListSchedule, goal_s: float, layout: tuple[float, int]
) -> ListSchedule:
    """The best step by bisecting for the least target that can be met: the goal first, no lower."""
    low_s = lower_bound_s(problem)
    close_s = _CLOSE_TARGETS * low_s
    target_s = goal_s
    for _ in range(_TARGETS):
        if best.step_s <= max(goal_s, low_s + close_s):
            break
        made = list_schedule(problem, samples, target_s, *layout)
        if made.step_s > target_s * _ROUNDING:
            low_s = target_s
        best = min(best, made, key=lambda x: x.step_s)
        target_s = max(goal_s, (low_s + best.step_s) / 2)
    return best
