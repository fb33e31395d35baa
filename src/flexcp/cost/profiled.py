"""What profiling leaves: the calibration, and the tasks that it was fitted to."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass

from flexcp.cost.calibration import Calibration, Setup, fit_calibration
from flexcp.cost.measurements import COLUMNS, Measurement


@dataclass(frozen=True)
class Profiled:
    """A calibration beside its measurements."""

    calibration: Calibration
    tasks: tuple[Measurement, ...]

    @classmethod
    def of(cls, tasks: Sequence[Measurement], setup: Setup) -> Profiled:
        """Fit measured tasks; see `cost.calibration.fit_calibration`."""
        return cls(fit_calibration(tasks, setup), tuple(tasks))

    def worst(self, count: int) -> list[tuple[Measurement, float]]:
        """The tasks that the fitted formula misses most, and by how much: predicted over measured, less 1."""
        cost = self.calibration.cost
        errors = [(task, cost.task_s(task.load, task.degree) / task.seconds - 1) for task in self.tasks]
        return sorted(errors, key=lambda pair: -abs(pair[1]))[:count]

    def to_csv(self) -> str:
        """A table that `cost.measurements.read_measurements` reads."""
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        table.writerow(COLUMNS)
        table.writerows((*task.load.counts, task.degree, repr(task.seconds)) for task in self.tasks)
        return text.getvalue()
