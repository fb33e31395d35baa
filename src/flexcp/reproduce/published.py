"""The published numbers as data (arXiv 2602.21788v2 unless a field says otherwise); nothing here is ours."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class MainRow:
    """One row of the main table: 64 Ascend 910C, global batch 512, context up to 128k."""

    model: str
    data: str
    fcp_s: float
    baseline_s: float
    baseline: str  # the better of "megatron" and "deepspeed"
    ratio: float


@dataclass(frozen=True, slots=True)
class ScheduleRow:
    """Planning cost, Qwen3-VL-2B; the data set is not named."""

    global_batch: int
    ranks: int
    compute_s: float
    schedule_ms: float  # all of it: gathering, preparing, solving
    solver_ms: float


@dataclass(frozen=True, slots=True)
class ScalingRow:
    """Thousand tokens per second and device; model, data and global batch are not named."""

    ranks: int
    deepspeed: float
    megatron: float
    fcp_over_deepspeed: float


@dataclass(frozen=True, slots=True)
class NoiseRow:
    """Gaussian noise on the coefficients of the cost model."""

    sigma: float
    same_plan: str
    slower: str


@dataclass(frozen=True, slots=True)
class ReleasedRow:
    """Unbalanced micro-batches by the generator of the released code, from its development log."""

    model: str
    fcp_s: float
    static_s: float
    ratio: float


@dataclass(frozen=True, slots=True)
class Published:
    """All tables."""

    main: tuple[MainRow, ...] = (
        MainRow("qwen3-8b", "github", 12.85, 17.60, "megatron", 1.37),
        MainRow("llama3-8b", "github", 13.10, 17.82, "megatron", 1.36),
        MainRow("qwen3-8b", "commoncrawl", 11.20, 14.56, "deepspeed", 1.30),
        MainRow("llama3-8b", "commoncrawl", 11.55, 14.90, "deepspeed", 1.29),
        MainRow("llama3.2-1b", "wikipedia", 6.80, 7.14, "deepspeed", 1.05),
        MainRow("internvl3-8b", "msrvtt", 14.20, 19.60, "megatron", 1.38),
        MainRow("qwen3-vl-8b", "msrvtt", 13.90, 19.04, "megatron", 1.37),
        MainRow("internvl3-8b", "openvid", 15.10, 20.39, "deepspeed", 1.35),
        MainRow("qwen3-vl-8b", "openvid", 14.80, 19.83, "deepspeed", 1.34),
    )
    extreme_ratio: float = 2.24  # 1 sample of 128k and many of 2-8k; no seconds, no count
    schedule: tuple[ScheduleRow, ...] = (
        ScheduleRow(128, 64, 6.34, 448, 23),
        ScheduleRow(256, 64, 7.58, 696, 45),
        ScheduleRow(512, 64, 11.65, 905, 86),
        ScheduleRow(512, 32, 18.26, 537, 44),
        ScheduleRow(512, 16, 34.45, 282, 20),
    )
    scaling: tuple[ScalingRow, ...] = (
        ScalingRow(8, 2.0, 1.8, 1.02),
        ScalingRow(64, 1.7, 1.52, 1.16),
    )
    noise: tuple[NoiseRow, ...] = (NoiseRow(0.2, "100 %", "0 %"), NoiseRow(0.5, "> 88 %", "< 6 %"))
    released: tuple[ReleasedRow, ...] = field(
        default=(
            ReleasedRow("qwen3-vl-2b", 9.127, 13.138, 1.44),
            ReleasedRow("internvl3-8b", 15.174, 27.916, 1.84),
        )
    )

    def main_row(self, model: str, data: str) -> MainRow:
        """A row of the main table."""
        return next(row for row in self.main if (row.model, row.data) == (model, data))

    def schedule_row(self, global_batch: int, ranks: int) -> ScheduleRow:
        """A row of the planning table."""
        return next(r for r in self.schedule if (r.global_batch, r.ranks) == (global_batch, ranks))

    def scaling_row(self, ranks: int) -> ScalingRow:
        """A row of the scaling table."""
        return next(row for row in self.scaling if row.ranks == ranks)


PUBLISHED = Published()
