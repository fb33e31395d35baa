"""What `flexcp simulate` computes: the run of every policy on one day, and the forms in which it is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from flexcp.cli.request import Request
from flexcp.core.errors import InfeasibleError, RankFailedError, UnsupportedError
from flexcp.core.run_folder import RunInfo
from flexcp.planner import Planner
from flexcp.report.tables import format_seconds
from flexcp.simulate import Conditions, RankTime, SimulatedStep, simulate
from flexcp.simulate.folder import SimulatedFolder

SIMULATION_SCHEMA = "flexcp.simulation/1"
_PARTS = {
    "compute": "computing",
    "messages": "messages not hidden",
    "sharing": "links or cores shared",
    "pace": "slow ranks and jitter",
    "idle": "idle, no task",
    "gather": "weights and gradients in waves",
    "reduce": "gradient reduction",
    "optimizer": "optimizer",
    "wait": "waiting for plan and data",
}


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """The run of one policy.

    Attributes:
        policy: its name.
        steps: as far as it came.
        failed: what ended it before its time.
        refusal: why the policy cannot plan.
    """

    policy: str
    steps: tuple[SimulatedStep, ...] = ()
    failed: RankFailedError | None = None
    refusal: str = ""

    @property
    def steps_s(self) -> list[float]:
        """Time of every step."""
        return [step.report.step_s for step in self.steps]

    def share_below_s(self, share: float) -> float:
        """The time that a share of the steps stay below, between steps linearly."""
        return float(np.quantile(self.steps_s, share))

    @property
    def tokens_per_s(self) -> float:
        """Of all ranks."""
        return sum(step.report.tokens for step in self.steps) / sum(self.steps_s)

    @property
    def shares(self) -> dict[str, float]:
        """Where the time of all ranks went, by the names of `RankTime`."""
        return sum((step.time for step in self.steps), RankTime()).shares

    def as_json(self) -> dict[str, Any]:
        """Steps in the form of metrics.jsonl, each with the shares of its time."""
        if self.refusal:
            return {"refusal": self.refusal}
        return {"steps": [step.report.to_record() | {"shares": step.time.shares} for step in self.steps]}


@dataclass(frozen=True, slots=True)
class Simulation:
    """The runs of all policies that were asked for, on the same day."""

    request: Request
    conditions: Conditions
    runs: tuple[SimulatedRun, ...]

    @property
    def failed(self) -> RankFailedError | None:
        """The first failure that ended a run."""
        return next((run.failed for run in self.runs if run.failed), None)

    @property
    def notices(self) -> list[str]:
        """What the user should know before believing the numbers."""
        notices: list[str] = list(self.request.inputs["notices"])
        failure = self.conditions.failure
        spared = [run.policy for run in self.runs if run.steps and not run.failed]
        if failure and spared:
            whose = "the run ends" if len(self.runs) == 1 else f"the runs of {', '.join(spared)} end"
            notices.append(f"Rank {failure.rank} has no time to fail: {whose} before {failure.at_s:g} s.")
        return notices

    def as_json(self) -> dict[str, Any]:
        """One run with its steps, or several by policy."""
        runs = {run.policy: run.as_json() for run in self.runs}
        return {
            "schema": SIMULATION_SCHEMA,
            "inputs": self.request.inputs | {"notices": self.notices, "policy": ",".join(runs)},
            "conditions": asdict(self.conditions),
            **(self.runs[0].as_json() if len(runs) == 1 else {"policies": runs}),
        }

    def show(self, console: Console, out: Path | None) -> None:
        """Headline, notices, table."""
        names = ", ".join(run.policy for run in self.runs)
        console.print(Text(f"{names}: {self.request.headline}", "dim"), highlight=False)
        for notice in self.notices:
            console.print(Text("note: ", "yellow").append(notice, "default"), highlight=False)
        if len(self.runs) > 1:
            console.print(_comparison(self.runs))
            for run in self.runs:
                if run.refusal:
                    console.print(Text(f"{run.policy}: {run.refusal}", "yellow"), highlight=False)
        elif self.runs[0].steps:
            console.print(_table(self.runs[0], self.request.setting.cluster.ranks))
        if out:
            console.print(f"wrote {out}; flexcp report {out} draws it", markup=False, highlight=False)


def simulated(
    request: Request,
    policies: Sequence[str],
    conditions: Conditions,
    out: Path | None,
    *,
    left_out: Mapping[str, str],
    shown: bool,
) -> Simulation:
    """Run every policy on the same samples and day; several of them one after the other.

    Args:
        request: what to plan.
        policies: names.
        conditions: the day.
        out: a new folder for the records of the one policy.
        left_out: policies that are told and not run, with the reason.
        shown: whether to draw progress on stderr.

    Raises:
        InputError: the one policy that was asked for cannot plan these samples, or `out` cannot be used.
    """
    runs = []
    with _progress(shown) as progress:
        for policy in policies:
            if policy in left_out:
                runs.append(SimulatedRun(policy, refusal=left_out[policy]))
                continue
            try:
                runs.append(_run(request, policy, conditions, out, progress))
            except (InfeasibleError, UnsupportedError) as error:
                if len(policies) == 1:
                    raise
                runs.append(SimulatedRun(policy, refusal=error.cause))
    return Simulation(request, conditions, tuple(runs))


def _run(
    request: Request, policy: str, conditions: Conditions, out: Path | None, progress: Progress
) -> SimulatedRun:
    setting = request.setting
    planner = Planner(setting.cluster, setting.cost, policy, setting.mode)
    steps: list[SimulatedStep] = []
    with ExitStack() as stack:
        folder = stack.enter_context(SimulatedFolder(out, _info(request, policy))) if out else None
        plans = (planner(batch) for batch in progress.track(request.batches, description=policy))
        try:
            for step in simulate(plans, setting.cost, conditions, folder.record if folder else None):
                steps.append(step)
                if folder:
                    folder.step(step.report)
        except RankFailedError as error:
            return SimulatedRun(policy, tuple(steps), error)
    return SimulatedRun(policy, tuple(steps))


def _info(request: Request, policy: str) -> RunInfo:
    given, setting = request.inputs, request.setting
    return RunInfo(
        origin="simulated",
        model=given["model"],
        hardware=given["hardware"],
        policy=policy,
        mode=setting.mode,
        cluster=setting.cluster,
        whole_below_tokens=setting.whole_below_tokens,
        coefficients=asdict(setting.cost),
    )


def _table(run: SimulatedRun, ranks: int) -> Table:
    reports = [step.report for step in run.steps]
    table = Table(title="Simulated run", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    slowest = max(reports, key=lambda report: report.step_s)
    table.add_row("steps", str(len(reports)))
    table.add_row("step, mean", format_seconds(fmean(run.steps_s)))
    table.add_row("step, median", format_seconds(run.share_below_s(0.5)))
    table.add_row("step, 95 % are below", format_seconds(run.share_below_s(0.95)))
    table.add_row("step, longest", f"{format_seconds(slowest.step_s)} (step {slowest.step})")
    table.add_row("tasks of a step, as planned", format_seconds(fmean(r.predicted_s for r in reports)))
    table.add_row("tasks of a step, simulated", format_seconds(fmean(r.measured_s for r in reports)))
    table.add_row("tokens/s", f"{run.tokens_per_s:,.0f}")
    table.add_row("tokens/s a rank", f"{run.tokens_per_s / ranks:,.0f}")
    table.add_section()
    shares = run.shares
    for part, label in _PARTS.items():
        table.add_row(label, f"{shares[part]:.1%}")
    return table


def _comparison(runs: Sequence[SimulatedRun]) -> Table:
    """One line a policy that came as far as a step; speed is against `static`, where that is among them."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    table.add_column("step", no_wrap=True)
    for name in ("mean", "median", "95 %", "longest", "speed", "tokens/s", "idle"):
        table.add_column(name, justify="right", no_wrap=True)
    base_s = next((fmean(run.steps_s) for run in runs if run.policy == "static" and run.steps), None)
    for run in runs:
        if run.steps:
            mean_s = fmean(run.steps_s)
            times_s = (mean_s, run.share_below_s(0.5), run.share_below_s(0.95), max(run.steps_s))
            table.add_row(
                run.policy,
                *map(format_seconds, times_s),
                f"{base_s / mean_s:.2f}×" if base_s else "–",
                f"{run.tokens_per_s:,.0f}",
                f"{run.shares['idle']:.1%}",
            )
    return table


def _progress(shown: bool) -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not (shown and console.is_terminal),
        transient=True,
    )
