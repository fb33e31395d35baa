"""Policy `ulysses`: one degree for all that the heads allow, all-to-all without overlap (arXiv 2309.14509).

The original cuts every sequence over the ranks of a group, and swaps that cut for one over heads around
attention, by all-to-all. So its degree divides the query heads. Where it exceeds the key/value heads, those
are repeated up to the degree, as its followers do; then it must be a multiple of them. Ours differs in being
fair: the best allowed degree that divides N, no padding, packs balanced by time, as `static` does.
"""

from __future__ import annotations

from flexcp.core.errors import InfeasibleError, UnsupportedError
from flexcp.core.layout import heads_divide
from flexcp.planner.policies import static
from flexcp.planner.problem import Assignment, Problem
from flexcp.planner.timeline import assignment_s


def assign(problem: Problem) -> Assignment:
    """Try every allowed degree that holds the longest sample; the best wins.

    Complexity: O(allowed degrees · waves · K log K).

    Raises:
        UnsupportedError: the cost model does not know the heads.
        InfeasibleError: the longest sample needs a wider group than the heads allow; both are named.
    """
    cost = problem.cost
    if not cost.heads:
        raise UnsupportedError("the cost model has no head counts", "Build it with `cost_model(shape, ...)`.")
    longest = problem.loads[0].tokens
    needed = problem.cluster.min_degree(longest)
    degrees = allowed_degrees(cost.heads, cost.kv_heads, problem.ranks)
    if needed > degrees[-1]:
        heads = f"{cost.heads} query, {cost.kv_heads} key/value heads, {problem.ranks} ranks"
        raise InfeasibleError(
            f"needs degree {needed}, heads allow {degrees[-1]} ({heads})",
            f"Rings have no such limit; or raise the tokens per rank to {-(-longest // degrees[-1])}.",
        )
    plans = [plan for degree in degrees if degree >= needed for plan in static.with_degree(problem, degree)]
    return min(plans, key=lambda waves: assignment_s(problem, waves))


def allowed_degrees(heads: int, kv_heads: int, ranks: int) -> list[int]:
    """Degrees that divide N and that the heads allow.

    >>> allowed_degrees(32, 8, 64), allowed_degrees(40, 8, 64), allowed_degrees(28, 4, 56)
    ([1, 2, 4, 8, 16, 32], [1, 2, 4, 8], [1, 2, 4, 28])
    """
    return [d for d in range(1, ranks + 1) if ranks % d == 0 and heads_divide(heads, kv_heads, d)]
