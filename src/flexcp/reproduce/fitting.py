"""The constants that the paper does not give, each fitted on stated rows; everything else is predicted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean

from flexcp.reproduce.layouts import batches_of, cluster_of, cost_at, padded_s, planned_s
from flexcp.reproduce.published import Published
from flexcp.reproduce.workloads import Workload, workload

SCHEDULE_MODEL, SCHEDULE_DATA = "qwen3-vl-2b", "openvid"
SCALING_MODEL, SCALING_DATA = "qwen3-8b", "github"
SCALING_CONTEXT = 65_536  # what 8 ranks of 8192 tokens hold
GLOBAL_BATCH = 512

# (constant, what it is, the published numbers that it is fitted on)
FITTED_ON = (
    ("speed", "share of the preset's rates that the machine reaches", "scaling: DeepSpeed at 8 devices"),
    ("fixed_s", "seconds of a step beside its tasks", "schedule: compute at (128, 64) and (512, 16)"),
    ("schedule", "tokens per second of video, planning table", "the same two rows"),
    ("github", "lengths over those of the list", "main: FCP seconds of Qwen3-8B"),
    ("commoncrawl", "lengths over those of the stated body", "main: FCP seconds of Qwen3-8B"),
    ("msrvtt", "tokens per second of video", "main: FCP seconds of Qwen3-VL-8B"),
    ("openvid", "tokens per second of video", "main: FCP seconds of Qwen3-VL-8B"),
)
FITTED_MAIN = {
    "github": "qwen3-8b",
    "commoncrawl": "qwen3-8b",
    "msrvtt": "qwen3-vl-8b",
    "openvid": "qwen3-vl-8b",
}
FITTED_SCHEDULE = ((128, 64), (512, 16))
FITTED_SCALING = 8

_ROUNDS = 6
_GUESS = {"github": 0.6, "commoncrawl": 2.0, "msrvtt": 200.0, "openvid": 300.0}

_MOST_CALLS = 9
_CLOSE = 5e-4  # the seconds printed have three or four digits

Progress = Callable[[str, int, int], None]
"""What is being done, how many parts are done, of how many."""


def silent(_label: str, _done: int, _of: int) -> None:
    """No progress shown."""


@dataclass(frozen=True, slots=True)
class Constants:
    """Fitted constants.

    Attributes:
        speed: share of the preset's rates.
        fixed_s: seconds of a step beside its tasks: gradient reduction, optimizer, the framework.
        scales: tokens per unit of each data set's lengths; "schedule" for the planning table.
    """

    speed: float
    fixed_s: float
    scales: Mapping[str, float]

    def workload(self, data: str) -> Workload:
        """A data set with its fitted scale; Wikipedia's is known."""
        found = workload(data)
        return found.scaled(self.scales[data]) if data in self.scales else found


@lru_cache(maxsize=4)  # the experiments of one process share their constants
def fit_constants(published: Published, steps: int, seed: int, progress: Progress = silent) -> Constants:
    """Fit all constants.

    Speed, fixed seconds and the two scales that they depend on are found in turn, a few times over; each
    leans little on the others. The other scales follow, one number on one row each.
    """
    speed, fixed_s = 1.0, 0.0
    scales = dict(_GUESS) | {"schedule": _GUESS[SCHEDULE_DATA]}
    parts = _ROUNDS + len(FITTED_MAIN)
    for turn in range(_ROUNDS):
        progress("fitting", turn, parts)
        if turn:
            met = _fit_speed(published, steps, seed, Constants(speed, fixed_s, scales))
            speed = math.sqrt(speed * met)  # half way, or waves that appear and vanish make it swing
        scales["schedule"], fixed_s = _fit_schedule(published, steps, seed, speed, scales["schedule"])
        scales["github"] = _fit_main(published, "github", steps, seed, Constants(speed, fixed_s, scales))
    for part, data in enumerate(FITTED_MAIN):
        progress("fitting", _ROUNDS + part, parts)
        if data != "github":
            scales[data] = _fit_main(published, data, steps, seed, Constants(speed, fixed_s, scales))
    progress("fitting", parts, parts)
    return Constants(speed, fixed_s, scales)


def schedule_compute_s(
    scale: float, speed: float, global_batch: int, ranks: int, steps: int, seed: int, policy: str = "paper"
) -> float:
    """Planned seconds of the planning table's step, without the fixed ones."""
    data = workload(SCHEDULE_DATA).scaled(scale)
    batches = batches_of(data, SCHEDULE_MODEL, global_batch, steps, seed)
    return planned_s(batches, cluster_of(ranks), cost_at(SCHEDULE_MODEL, speed), policy)


def _fit_schedule(
    published: Published, steps: int, seed: int, speed: float, guess: float
) -> tuple[float, float]:
    """The scale from the difference of two rows, in which the fixed seconds cancel; then those."""
    few, many = FITTED_SCHEDULE
    known = [published.schedule_row(*row).compute_s for row in (few, many)]

    def difference(scale: float) -> float:
        return schedule_compute_s(scale, speed, *many, steps, seed) - schedule_compute_s(
            scale, speed, *few, steps, seed
        )

    scale = solve(difference, known[1] - known[0], guess)
    return scale, max(0.0, known[0] - schedule_compute_s(scale, speed, *few, steps, seed))


def _fit_main(published: Published, data: str, steps: int, seed: int, constants: Constants) -> float:
    model = FITTED_MAIN[data]
    target_s = published.main_row(model, data).fcp_s - constants.fixed_s
    cluster, cost = cluster_of(64), cost_at(model, constants.speed)

    def seconds(scale: float) -> float:
        batches = batches_of(workload(data).scaled(scale), model, GLOBAL_BATCH, steps, seed)
        return planned_s(batches, cluster, cost, "paper")

    return solve(seconds, target_s, constants.scales[data])


def _fit_speed(published: Published, steps: int, seed: int, constants: Constants) -> float:
    ranks = FITTED_SCALING
    data = constants.workload(SCALING_DATA).within(SCALING_CONTEXT)
    batches = data.batches(GLOBAL_BATCH, steps, seed)
    tokens = fmean(sum(sample.tokens for sample in batch) for batch in batches)
    target_s = tokens / (1000 * published.scaling_row(ranks).deepspeed * ranks) - constants.fixed_s

    def rate(speed: float) -> float:
        cost = cost_at(SCALING_MODEL, speed)
        return 1 / padded_s(batches, cluster_of(ranks), cost, "all-to-all", SCALING_CONTEXT)

    return solve(rate, 1 / target_s, constants.speed)


def solve(function: Callable[[float], float], target: float, guess: float) -> float:
    """Where a rising function meets a target: secants in logarithms, then the closest point seen.

    Planned seconds jump by a wave here and there, so the target may lie in a jump.

    >>> round(solve(lambda x: 3 * x**2, 12.0, 1.0), 2)
    2.0
    """
    goal = math.log(target)
    points = [(math.log(guess), math.log(function(guess)))]
    while len(points) < _MOST_CALLS and abs(points[-1][1] - goal) > _CLOSE:
        (x, y), slope = points[-1], 1.0
        if len(points) > 1 and points[-2][0] != x:
            slope = min(3.0, max(0.5, (y - points[-2][1]) / (x - points[-2][0])))
        x += (goal - y) / slope
        points.append((x, math.log(function(math.exp(x)))))
    return math.exp(min(points, key=lambda point: abs(point[1] - goal))[0])
