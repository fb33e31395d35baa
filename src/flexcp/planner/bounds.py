"""What no plan can beat under the same cost model; every plan carries it as `bound_s`.

Bounds are about the model, not the machine: they ignore nothing that the model charges at its cheapest.

Notation: R is the sum of `work_s`, P = ceil(tokens / E), c = pack_s, r = ring_step_s. T(d) is the time on d
ranks inside a node where they fit, which no placement beats. Ranks of different speed are counted in ranks of
the top speed, which is 1: a group of d ranks whose slowest has speed u is busy T / u, and then uses up at
least d·T of the Σ speeds that the cluster has in a second. So N below is Σ speeds.

Sums run from left to right (`cumsum`), so they are the same on every machine.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flexcp.planner.degrees import LongSamples, long_samples
from flexcp.planner.problem import Array, Integers, Problem

_BISECTIONS = 24
# A bound explains the whole if it is within half a percent of it.
_TIGHT = 1.005
# Degrees at which `_rate_beside` is worked out.
_RATES = 24


class Bound(NamedTuple):
    """Seconds, and what they are the time of, as the end of a sentence."""

    seconds: float
    reason: str


def lower_bound_s(problem: Problem) -> float:
    """Seconds that no plan of this mode can beat; see `lower_bound`."""
    return lower_bound(problem).seconds


@lru_cache(maxsize=1)  # the policy and the plan ask for the same problem
def lower_bound(problem: Problem) -> Bound:
    """The largest of the bounds that hold in this mode.

    Both modes: the best time of the longest sample, `_one_at_a_time_s` and `_area_s`. Free-running: work
    with the rank-sized packs that memory forces, (R + P·c) / N. Lockstep: `_waves_s` and, with ranks of one
    speed, `_beside_longest_s`.

    Complexity: O(24·(K + N) + K log K), and 24 questions to the ladder of the long samples.
    """
    ranks = problem.cluster.rank_equivalents
    floor_s = problem.total_work_s / ranks + problem.cost.pack_s
    if problem.mode == "free-running":
        packs = -(-problem.tokens // problem.cluster.tokens_per_rank)
        floor_s = max(floor_s, (problem.total_work_s + packs * problem.cost.pack_s) / ranks)
    samples = long_samples(problem, floor_s)
    bounds = [Bound(floor_s, "the work of all samples on all ranks")]
    if len(samples.index):
        row = int(samples.best_s.argmax())
        tokens = int(problem.counts[samples.index[row], 0])
        ranks_of_best = int(samples.ladder.degrees(samples.best_s)[row])
        where = "one rank" if ranks_of_best == 1 else f"its best {ranks_of_best} ranks"
        what = f"the longest sample, {tokens:,} tokens, on {where}"
        bounds.append(Bound(float(samples.best_s[row]), what))
        bounds.append(Bound(_one_at_a_time_s(problem, samples), "samples that memory runs one at a time"))
    if problem.mode == "lockstep":
        bounds.append(Bound(_waves_s(problem, samples), "the waves that memory forces"))
        beside_s = _beside_longest_s(problem, samples)
        bounds.append(Bound(beside_s, "the longest sample, and what memory leaves no room for beside it"))
    largest = max(bounds, key=lambda bound: bound.seconds)
    area_s = _area_s(problem, samples, largest.seconds)
    return Bound(area_s, (bounds[0] if area_s > _TIGHT * largest.seconds else largest).reason)


def _one_at_a_time_s(problem: Problem, samples: LongSamples) -> float:
    """Samples of more than half of what the cluster holds never run at a time: their best times add up."""
    huge = 2 * problem.counts[samples.index, 0] > problem.cluster.capacity_tokens
    return float(np.cumsum(np.append(samples.best_s[huge], 0.0))[-1])


def _area_s(problem: Problem, samples: LongSamples, floor_s: float) -> float:
    """Least T that leaves enough rank-time, when every sample has the degree that T forces on it.

    A step of T seconds has no task longer than T. A pack takes no less than any of its samples, so sample s
    runs at a degree of at least d_s(T), the least with T_s(d) <= T. A task of degree d and length t <= T
    spends at least h(d) = c + (d - 1) r of it on overhead wherever a sample is cut, so the share of its
    rank-time that does work is at most 1 - h(d) / t <= 1 - h(d_s(T)) / T. All tasks fit into N·T, hence
    Σ work_s / (T - h(d_s(T))) <= N. The left side falls with T; every T that violates this is a bound.
    """
    cost, ranks = problem.cost, problem.cluster.rank_equivalents
    ring_step_s = cost.ring_step_s if cost.exchange == "ring" else 0.0
    work_s = problem.work_s[samples.index]
    ring_steps_s = ring_step_s * problem.counts[samples.index, 4]  # none where the sample is never cut

    def fits(total_s: float) -> bool:
        degrees = samples.ladder.degrees(total_s)
        useful_s = total_s - cost.pack_s - (degrees - 1) * ring_steps_s
        shares = float(np.cumsum(work_s / useful_s)[-1]) if len(work_s) else 0.0
        return shares + samples.others_work_s / (total_s - cost.pack_s) <= ranks * (1 + 1e-12)

    if floor_s <= cost.pack_s or fits(floor_s):
        return floor_s
    low, high = floor_s, 2 * floor_s
    while not fits(high):
        low, high = high, 2 * high
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return low


def _waves_s(problem: Problem, samples: LongSamples) -> float:
    """Lockstep: the waves that memory forces, what they must last, and what fits beside their samples.

    Let the waves of a plan be sorted by falling length, t_1 >= t_2 >= … >= t_W.

    1. W >= W_0 = ceil(tokens / (N·E)): a wave holds at most N·E tokens.
    2. t_k >= B_k: let j be the first sample, by falling best time, such that samples 1..j need k waves,
       because they have more than (k - 1)·N·E tokens, or because k of them have more than N·E / 2 each.
       Then k waves hold some sample of 1..j, and each of them lasts at least best_j = B_k.
    3. The first m waves hold at most m·N·E tokens, so at most the work M(m·N·E) of the densest samples
       that make up as many tokens (the last one in part: a fractional knapsack is solved greedily).
    4. Every other wave of work w lasts at least c + w / N: its slowest pack lasts at least c, and the
       area of all its packs is at least N' c + w for the N' <= N ranks it uses.

    So the step lasts at least Σ_{k <= m} B_k + (R - M(m·N·E))⁺ / N + (W_0 - m)⁺·c for every m for which
    B_1 .. B_m are known.
    """
    capacity = problem.cluster.capacity_tokens
    forced = max(1, -(-problem.tokens // capacity))
    longest_s = forced_lengths_s(problem, samples)
    beside_s = np.append(0.0, _densest_work_s(problem, capacity * np.arange(1, len(longest_s) + 1)))
    rest_s = np.maximum(0.0, problem.total_work_s - beside_s) / problem.cluster.rank_equivalents
    waves = np.maximum(0, forced - np.arange(len(longest_s) + 1))
    ends_s = np.append(0.0, np.cumsum(longest_s)) + rest_s + waves * problem.cost.pack_s
    return float(ends_s.max())


def _beside_longest_s(problem: Problem, samples: LongSamples) -> float:
    """Lockstep: the wave of the sample with the largest best time and all other waves, where least.

    Let this sample, of work w, run on d ranks; its wave lasts t >= T(d). What else can the wave do?

    1. On the other N - d ranks fit at most (N - d)·E tokens, so at most the work M((N - d)·E) of the densest
       other samples, and at most (N - d)·(t - c).
    2. Other samples of the same pack, of work e. By computation e <= d·(t - c - (d - 1) r) - w. By traffic:
       let T_cm(d) be the time of the sample if its attention took none. Traffic, linear and per-sample terms
       are sums over the samples of a pack (at least: whole samples may be spread unevenly); only the maximum
       of attention and traffic is not, and T_cm keeps the traffic. So

           d·(t - T_cm(d)) >= Σ a,   a = token_s·l + sample_s + [cut]·(d - 1)(l·kv_bytes/bandwidth + sample_s)

       over these samples, of work g each: e <= k·d·(t - T_cm(d)) with k the largest g / a. Samples whose
       attention exceeds their traffic find it hidden behind that of the long one, so k may exceed 1.
    3. All other work, spread over N ranks, is in other waves, of which there are at least W_0 - 1 (step 4 of
       `_waves_s`).

    So the step lasts at least f(t) = t + (R - w - e(t) - M(t)) / N + (W_0 - 1)·c with the least of the limits
    for e and M; where the numerator is negative this only says less. Both are concave in t, so f is convex
    and made of lines: its least value is at t = T(d), or where one limit takes over from the other. The
    least over all d is a bound. With ranks of several speeds this is not worked out, and 0 is returned.
    """
    if not len(samples.index) or problem.cluster.speeds:
        return 0.0
    cluster, cost, ranks = problem.cluster, problem.cost, problem.cluster.ranks
    row = int(np.argmax(samples.best_s))
    sample = int(samples.index[row])
    degree = np.arange(int(samples.ladder.least[row]), ranks + 1)
    alone = problem.columns[:, sample : sample + 1]
    crosses = degree > cluster.ranks_per_node
    times_s = cost.seconds(alone, degree, crosses)
    ring_step_s = cost.ring_step_s * problem.rows[sample][4] if cost.exchange == "ring" else 0.0
    fixed_s = cost.pack_s + (degree - 1) * ring_step_s
    work_s = float(problem.work_s[sample])
    rate, traffic_s = _rate_beside(problem, sample, degree, crosses)
    most_s = _densest_work_s(problem, (ranks - degree) * cluster.tokens_per_rank, without=sample)

    def step_s(t: Array) -> Array:
        own_s = np.minimum(degree * (t - fixed_s) - work_s, rate * degree * (t - traffic_s))
        beside_s = np.minimum(most_s, (ranks - degree) * (t - cost.pack_s))
        return np.asarray(t + (problem.total_work_s - work_s - own_s - beside_s) / ranks)

    with np.errstate(divide="ignore", invalid="ignore"):
        own_turns_s = (rate * degree * traffic_s - degree * fixed_s - work_s) / ((rate - 1) * degree)
        beside_turns_s = cost.pack_s + most_s / (ranks - degree)
    turns = [np.where(np.isfinite(t), np.maximum(t, times_s), times_s) for t in (own_turns_s, beside_turns_s)]
    waves = max(1, -(-problem.tokens // cluster.capacity_tokens))
    least_s = np.minimum.reduce([step_s(times_s), *map(step_s, turns)])
    return float(np.maximum(times_s, least_s).min()) + (waves - 1) * cost.pack_s


def _rate_beside(
    problem: Problem, sample: int, degree: Integers, crosses: npt.NDArray[np.bool_]
) -> tuple[Array, Array]:
    """At least k, and T_cm, of `_beside_longest_s` at ascending degrees; each shape (degrees,).

    Where no ring is walked, other samples cost what their work takes: k = 1 from the end of the sample on.
    Else k falls with d on one kind of link, so what it is at fewer ranks is enough; a few are looked at.
    """
    cost = problem.cost
    alone = problem.columns[:, sample : sample + 1]
    if cost.exchange != "ring":
        return np.ones(len(degree)), cost.seconds(alone, degree, crosses)
    if not problem.rows[sample][4]:
        return np.ones(len(degree)), cost.pack_s + problem.work_s[sample] / degree
    others = np.delete(problem.columns, sample, axis=1)
    tokens, cut_tokens, cut = others[0], others[3], others[4]
    gained_s = np.delete(problem.work_s, sample)
    looks = np.unique(np.geomspace(1, len(degree), _RATES).astype(int) - 1)
    looks = np.union1d(looks, np.flatnonzero(crosses)[:1])
    rate = np.zeros(len(degree))
    for look in looks.tolist():
        bytes_per_s = (cost.inter if crosses[look] else cost.intra).bytes_per_s
        ring_s = cost.kv_bytes_per_token * cut_tokens / bytes_per_s + cost.sample_s * cut
        spent_s = cost.token_s * tokens + cost.sample_s + (degree[look] - 1) * ring_s
        if not (spent_s > 0).all():  # then only computation limits what a pack takes
            return np.ones(len(degree)), cost.pack_s + problem.work_s[sample] / degree
        rate[look:] = np.max(gained_s / spent_s, initial=0.0)
    traffic = replace(cost, pair_s=0.0)  # attention that the ring hides costs nothing
    return rate, traffic.seconds(alone, degree, crosses)


def forced_lengths_s(problem: Problem, samples: LongSamples) -> Array:
    """B_1, B_2, … of `_waves_s`, as far as the long samples reach."""
    if not len(samples.index):
        return np.zeros(0)
    capacity = problem.cluster.capacity_tokens
    order = np.argsort(-samples.best_s, kind="stable")
    tokens: Integers = problem.counts[samples.index[order], 0]
    needed = np.maximum(-(-np.cumsum(tokens) // capacity), np.cumsum(2 * tokens > capacity))
    first = np.searchsorted(needed, np.arange(1, int(needed[-1]) + 1))
    return np.asarray(samples.best_s[order][first])


def _densest_work_s(problem: Problem, tokens: Integers, without: int | None = None) -> Array:
    """Most work that samples of so many tokens can hold, the last sample in part."""
    density = problem.work_s / problem.counts[:, 0]
    order = np.argsort(-density, kind="stable")
    if without is not None:
        order = order[order != without]
    upto_tokens = np.append(0, np.cumsum(problem.counts[order, 0]))
    upto_s = np.append(0.0, np.cumsum(problem.work_s[order]))
    return np.asarray(np.interp(tokens, upto_tokens, upto_s))
