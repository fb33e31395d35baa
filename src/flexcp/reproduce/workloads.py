"""Length distributions of the published data sets: known percentiles, or a stated body and a Pareto tail.

A distribution is a list of knots, (share of samples below, value). Between two knots it is the Pareto law
through both: the logarithm of the value is linear in the logarithm of the share that exceeds it. Beyond the
last knot the law of the last two goes on, so a tail needs no rule of its own. Every number has an origin.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from flexcp.core.errors import ConfigError, UnknownNameError
from flexcp.core.sample import Sample, samples_from_lengths

Array = npt.NDArray[np.float64]
Knots = tuple[tuple[float, float], ...]

CONTEXT_TOKENS = 131_072  # "context up to 128k" in arXiv 2602.21788v2; longer documents are cut there


@dataclass(frozen=True, slots=True)
class Workload:
    """Lengths of one data set.

    Attributes:
        name: data set.
        knots: ascending pairs of (share of samples below, value); the first share is 0, the last below 1.
        unit: what the values are before `scale`: `tokens`, or `s` (seconds of video).
        scale: tokens per unit. 1 for tokens that are known; else a fitted constant (`reproduce.fitting`).
        longest: the largest value there is, in `unit`; infinite where only the context limits.
        origin: where every number is from.
        context_tokens: longer samples are cut to this.
    """

    name: str
    knots: Knots
    unit: str
    origin: str
    scale: float = 1.0
    longest: float = math.inf
    context_tokens: int = CONTEXT_TOKENS

    def __post_init__(self) -> None:
        shares = [share for share, _ in self.knots]
        values = [value for _, value in self.knots]
        rising = all(a < b for xs in (shares, values) for a, b in pairwise(xs))
        if len(self.knots) < 2 or shares[0] != 0.0 or not rising or shares[-1] >= 1.0 or values[0] <= 0:
            raise ConfigError(
                f"the knots of {self.name} are {self.knots}",
                "Give at least two, from share 0 to a share below 1, both columns rising, values positive.",
            )
        if not 0 < self.scale < math.inf:
            raise ConfigError(f"the scale of {self.name} is {self.scale}", "It is a positive number.")

    def scaled(self, scale: float) -> Workload:
        """The same shape with another number of tokens per unit."""
        return replace(self, scale=scale)

    def within(self, context_tokens: int) -> Workload:
        """The same lengths cut at another context."""
        return replace(self, context_tokens=context_tokens)

    def tokens(self, share_below: Array) -> npt.NDArray[np.int64]:
        """Lengths at the given shares: the quantile function.

        >>> WORKLOADS["wikipedia"].tokens(np.array([0.5, 0.99, 0.99999])).tolist()
        [347, 10921, 131072]
        """
        shares, values = np.array(self.knots).T
        exceeding = -np.log1p(-share_below)
        known, logs = -np.log1p(-shares), np.log(values)
        slope = (logs[-1] - logs[-2]) / (known[-1] - known[-2])
        beyond = np.maximum(exceeding - known[-1], 0.0)
        value = np.exp(np.interp(exceeding, known, logs) + slope * beyond)
        length = np.rint(self.scale * np.minimum(value, self.longest))
        return np.asarray(np.clip(length, 1, self.context_tokens), dtype=np.int64)

    @property
    def longest_tokens(self) -> int:
        """The longest sample that can occur: what a static degree must be sized for."""
        return int(min(self.context_tokens, max(1.0, np.rint(min(self.longest * self.scale, 2.0**62)))))

    def mean_tokens(self, points: int = 200_000) -> float:
        """Mean length, from equally spaced quantiles."""
        return float(self.tokens((np.arange(points) + 0.5) / points).mean())

    def batches(self, global_batch: int, steps: int, seed: int) -> tuple[tuple[Sample, ...], ...]:
        """Global batches; the same seed gives the same shares whatever the scale, so fits are smooth."""
        shares = np.random.default_rng(seed).random((steps, global_batch))
        return tuple(samples_from_lengths(row.tolist()) for row in self.tokens(shares))


def _lognormal_body(median: float, sigma: float, tail_index: float, start: float) -> Knots:
    """Quartiles and 90 % of a log-normal law, then a Pareto tail of the given index to 99.9 %."""
    normal = ((0.25, -0.674490), (0.5, 0.0), (0.75, 0.674490), (0.9, 1.281552))
    body = tuple((share, median * math.exp(sigma * z)) for share, z in normal)
    last = body[-1][1]
    return ((0.0, start), *body, (0.999, last * (0.1 / 0.001) ** (1 / tail_index)))


_FLEXSP = "arXiv 2412.01523 (FlexSP)"
_WIKIPEDIA = Workload(
    name="wikipedia",
    knots=(
        (0.0, 16),
        (0.25, 146),
        (0.5, 347),
        (0.75, 862),
        (0.9, 2112),
        (0.95, 3721),
        (0.99, 10_921),
        (0.999, 37_367),
        (0.9999, 102_060),
    ),
    unit="tokens",
    origin="All percentiles: the 1,000,000 token lengths in the data file of the FlexSP code (PKU-DAIR/"
    "Hetu-Galvatron). Shortest, 16: assumed.",
)
_GITHUB = Workload(
    name="github",
    knots=(
        (0.0, 16),
        (0.25, 399),
        (0.5, 1276),
        (0.75, 4021),
        (0.9, 9542),
        (0.95, 16_250),
        (0.99, 38_323),
        (0.999, 104_518),
    ),
    unit="tokens",
    origin="No statistics are published. Shape: 2,500 Python source files in Qwen tokens, the list that the "
    "tests ship; the tail goes on as between its 99 and 99.9 %, index 2.3. Shortest, 16: assumed. Scale: "
    "fitted.",
)
_COMMONCRAWL = Workload(
    name="commoncrawl",
    knots=_lognormal_body(median=347, sigma=1.258, tail_index=1.35, start=16),
    unit="tokens",
    origin="No statistics are published. Body: log-normal with the median and the fitted sigma of Wikipedia "
    f"(347, 1.258), assumed alike, as both are web text. Tail: Pareto of index 1.35, from a batch of 512 in "
    f"{_FLEXSP}, figure 5b: 20, 7 and 3 samples on groups of at least 16, 32 and 64 GPUs, taken to double "
    "in length each. Shortest, 16: assumed. Scale: fitted.",
)
_MSRVTT_INDEX = 2.78
_MSRVTT = Workload(
    name="msrvtt",
    knots=((0.0, 10.0), (1 - 3.0**-_MSRVTT_INDEX, 30.0)),
    unit="s",
    longest=30.0,
    origin="Clips of 10 to 30 s, as the data set is usually described; a Pareto law cut at 30 s whose index, "
    "2.78, gives the mean of 41.2 hours over 10,000 clips (MSR-VTT, CVPR 2016). Tokens per second of video: "
    "fitted.",
)
_OPENVID = Workload(
    name="openvid",
    knots=(
        (0.0, 0.5),
        (0.25, 2.0),
        (0.567, 5.0),
        (0.741, 10.0),
        (0.873, 20.0),
        (0.922, 30.0),
        (0.974, 60.0),
        (0.999, 300.0),
    ),
    unit="s",
    longest=300.0,
    origin="No statistics of OpenVid are published. Durations: 1,000 clips of InternVid as counted in the "
    "log of the released FCP code; they agree with what the first version of the paper says of its videos "
    "(most below 8 s, few above 64 s). Shortest, 0.5 s: assumed. Tokens per second of video: fitted.",
)
WORKLOADS = {w.name: w for w in (_WIKIPEDIA, _GITHUB, _COMMONCRAWL, _MSRVTT, _OPENVID)}


def workload(name: str) -> Workload:
    """Look a data set up by name.

    Raises:
        UnknownNameError: names the nearest and all of them.
    """
    try:
        return WORKLOADS[name]
    except KeyError:
        raise UnknownNameError("data set", name, WORKLOADS) from None
