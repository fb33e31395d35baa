"""Policy `flexcp`, the default: plans the whole global batch at once, by time, within memory.

Its own plan is taken as it is once it is close to the bound; until then `paper` and `static` are asked too,
and the best plan wins. So flexcp <= max(other, close · bound), where close is 1.005 in lockstep, and
free-running up to 256 samples; beyond, where every rank has many tasks and asking takes much longer than
planning, it is 1.01. Above 4096 samples nobody is asked: `paper` packs in O(K·K').

The search takes every group to be a ring, and so does the bound that stops it. Every group then gets the
fastest exchange that it may use; where work alone does not explain the step, `ulysses` is asked as well.
"""

from __future__ import annotations

from dataclasses import replace

from flexcp.core.errors import InfeasibleError
from flexcp.core.plan import Task
from flexcp.planner.bounds import lower_bound_s
from flexcp.planner.degrees import LongSamples, long_samples
from flexcp.planner.exchanges import with_fastest_exchanges
from flexcp.planner.list_schedule import Layout, ListSchedule, list_schedule, scheduled_tasks
from flexcp.planner.policies import paper, static, ulysses
from flexcp.planner.problem import Problem
from flexcp.planner.timeline import makespan_s, schedule
from flexcp.planner.waves import search

# Step over bound at which a search ends: nothing more is tried.
CLOSE_ENOUGH = 1.005
# Free-running: above this, rings are laid out in other ways too, and others are asked (up to 256 samples they
# are asked above CLOSE_ENOUGH) ...
NEAR = 1.01
# ... and above this, where short samples do not fill the gaps, lockstep plans, run without their barriers.
FAR = 1.03
MOST_ALWAYS_ASKED, MOST_ASKED_SAMPLES = 256, 4096
# Targets tried for each way to lay out rings, and how closely they are sought, as a share of the bound.
_TARGETS, _CLOSE_TARGETS = 4, 0.002
# Ways to lay out rings: inside nodes; over any ranks, at the price of links between nodes; inside nodes, with
# more ranks than the target asks for.
_SHARES = (1.0, 0.5, 0.25)
_ROUNDING = 1 + 1e-9


def plan_tasks(problem: Problem) -> tuple[Task, ...]:
    """The best of a few plans, each with the fastest exchange for every group.

    Where rings are far from what no exchange can beat, the work of all samples, `ulysses` is asked too.

    Complexity: that of the search, and of `ulysses` where it is asked.
    """
    best = min((with_fastest_exchanges(problem, plan) for plan in _rings(problem)), key=makespan_s)
    work_s = problem.total_work_s / problem.cluster.rank_equivalents + problem.cost.pack_s
    if makespan_s(best) <= NEAR * work_s or problem.size > MOST_ASKED_SAMPLES or not problem.cost.heads:
        return best
    heads = replace(problem, cost=problem.cost.with_exchange("all-to-all"))
    try:
        other = schedule(heads, ulysses.assign(heads))
    except InfeasibleError:  # it needs more ranks than the heads allow
        return best
    return min(best, with_fastest_exchanges(problem, other), key=makespan_s)


def _rings(problem: Problem) -> list[tuple[Task, ...]]:
    """Plans of rings. Free-running: a list schedule. Lockstep: waves. Others where these are far off.

    Waves run without their barriers are no slower, so free-running asks for them too where it is far off.

    Complexity: that of `list_schedule` or `waves.search`; the other policies' on top where they are asked.
    """
    bound_s = lower_bound_s(problem)
    enough_s = CLOSE_ENOUGH * bound_s
    plans: list[tuple[Task, ...]] = []
    if problem.mode == "free-running":
        plans.append(scheduled_tasks(problem, list_schedules(problem, enough_s)))
        if problem.size > MOST_ALWAYS_ASKED:
            enough_s = NEAR * bound_s
        if makespan_s(plans[0]) <= enough_s or problem.size > MOST_ASKED_SAMPLES:
            return plans
    if not plans or makespan_s(plans[0]) > FAR * bound_s:
        waves = problem if problem.mode == "lockstep" else replace(problem, mode="lockstep")
        plans += [schedule(problem, found) for found in search(waves, CLOSE_ENOUGH * lower_bound_s(waves))]
    if min(map(makespan_s, plans)) <= enough_s or problem.size > MOST_ASKED_SAMPLES:
        return plans
    return [*plans, *(schedule(problem, ask(problem)) for ask in (paper.assign, static.assign))]


def list_schedules(problem: Problem, goal_s: float) -> ListSchedule:
    """The best list schedule; the first that is close enough."""
    bound_s = lower_bound_s(problem)
    # No layout asks a sample for less than the least share of the step, so no shorter one gets several ranks.
    samples = long_samples(problem, min(_SHARES) * bound_s)
    node = problem.cluster.ranks_per_node
    inside = Layout(_SHARES[0], node)
    # Half-way to the goal: most batches can be planned that well, and a step may be a little over its target.
    best = list_schedule(problem, samples, (bound_s + goal_s) / 2, inside)
    best = _lower(problem, samples, best, goal_s, inside)
    for layout in (Layout(_SHARES[0], problem.ranks), *(Layout(share, node) for share in _SHARES[1:])):
        if best.step_s > NEAR * bound_s:
            best = _lower(problem, samples, best, goal_s, layout)
    return best


def _lower(
    problem: Problem, samples: LongSamples, best: ListSchedule, goal_s: float, layout: Layout
) -> ListSchedule:
    """The best step by bisecting for the least target that can be met: the goal first, no lower."""
    low_s = lower_bound_s(problem)
    close_s = _CLOSE_TARGETS * low_s
    target_s = goal_s
    for _ in range(_TARGETS):
        if best.step_s <= max(goal_s, low_s + close_s):
            break
        made = list_schedule(problem, samples, target_s, layout)
        if made.step_s > target_s * _ROUNDING:
            low_s = target_s
        best = min(best, made, key=lambda x: x.step_s)
        target_s = max(goal_s, (low_s + best.step_s) / 2)
    return best
