"""How samples, tasks and memory are distributed: lengths, degrees, tokens on ranks."""

from __future__ import annotations

from flexcp.report.markup import join
from flexcp.report.page import charts
from flexcp.report.page.limits import MOST_BARS
from flexcp.report.page.sections.section import Section, legend
from flexcp.report.page.subject import Subject, spread
from flexcp.report.page.thinning import thin_peaks


def lengths(subject: Subject) -> Section:
    """Samples and tokens by length."""
    lengths = subject.lengths
    samples, tokens = sum(lengths.samples), sum(lengths.tokens)
    shares = [
        [100 * value / total for value in values]
        for values, total in ((lengths.samples, samples), (lengths.tokens, tokens))
    ]
    labels = [_power_of_two(edge) for edge in lengths.edges[:-1]]
    tips = [
        f"{low:,} to {high - 1:,} tokens\n{count:,.0f} samples, {a:.1f} %\n{size:,.0f} tokens, {b:.1f} %"
        for low, high, count, size, a, b in zip(
            lengths.edges[:-1], lengths.edges[1:], lengths.samples, lengths.tokens, *shares, strict=True
        )
    ]
    drawing = charts.bars(
        labels,
        [("main", shares[0]), ("other", shares[1])],
        charts.linear(0.0, max(map(max, shares)), "share, %"),
        tips,
        "tokens of a sample, from",
    )
    look = (
        f"{samples:,.0f} samples, {tokens:,.0f} tokens. Look for the tail: where few samples hold many "
        "of the tokens, a static layout sizes everything for them."
    )
    rows = [
        [f"{low:,} – {high - 1:,}", f"{count:,.0f}", f"{size:,.0f}"]
        for low, high, count, size in zip(
            lengths.edges[:-1], lengths.edges[1:], lengths.samples, lengths.tokens, strict=True
        )
    ]
    keys = legend([("main", "share of samples"), ("other", "share of tokens")])
    return Section(
        "lengths", "Lengths", look, join([keys, drawing]), (["tokens", "samples", "tokens in all"], rows)
    )


def _power_of_two(value: int) -> str:
    return f"{value // 1024}k" if value >= 1024 else f"{value}"


def degrees(subject: Subject) -> Section:
    """Tasks and busy time by degree."""
    shown = [subject.degrees[index] for index in spread(len(subject.degrees), MOST_BARS)]
    tasks, seconds = sum(d.tasks for d in subject.degrees), sum(d.rank_s for d in subject.degrees)
    counts = [100 * d.tasks / tasks for d in shown]
    times = [100 * d.rank_s / seconds if seconds else 0.0 for d in shown]
    tips = [
        f"degree {d.degree}\n{d.tasks:,} tasks, {a:.1f} %\n{b:.1f} % of the busy time of all ranks"
        for d, a, b in zip(shown, counts, times, strict=True)
    ]
    drawing = charts.bars(
        [f"{d.degree}" for d in shown],
        [("main", counts), ("other", times)],
        charts.linear(0.0, max(*counts, *times), "share, %"),
        tips,
        "degree: ranks that share a pack",
    )
    few = (
        f" {len(shown)} of {len(subject.degrees)} degrees are drawn."
        if len(shown) < len(subject.degrees)
        else ""
    )
    look = (
        "How many ranks share a pack. Look for degrees that are no powers of two, and for how much of the "
        f"time a few wide groups take.{few}"
    )
    rows = [[f"{d.degree}", f"{d.tasks:,}", f"{b:.1f} %"] for d, b in zip(shown, times, strict=True)]
    keys = legend([("main", "share of tasks"), ("other", "share of busy time")])
    return Section(
        "degrees", "Degrees", look, join([keys, drawing]), (["degree", "tasks", "busy time"], rows)
    )


def memory(subject: Subject) -> Section:
    """The most tokens of each rank."""
    memory = subject.memory
    labels, peaks = thin_peaks(memory.ranks, memory.peak_tokens, MOST_BARS)
    capacity = memory.capacity_tokens
    tips = [
        f"ranks {label}\nat most {peak:,} tokens\n{peak / capacity:.1%} of {capacity:,}"
        for label, peak in zip(labels, peaks, strict=True)
    ]
    drawing = charts.bars(
        [label.split("–")[0] for label in labels],
        [("main", [float(peak) for peak in peaks])],
        charts.linear(0.0, 1.1 * max(capacity, *peaks), "tokens"),
        tips,
        "rank",
        limit=(float(capacity), f"{capacity:,} tokens a rank"),
    )
    group = (
        f" A bar is the fullest of {-(-len(memory.ranks) // len(labels))} neighbouring ranks."
        if len(labels) < len(memory.ranks)
        else ""
    )
    look = (
        "The most tokens a rank held at a time, against what it may hold. Look for bars that touch the line: "
        f"there memory, not time, decided the degree.{group}"
    )
    rows = [[label, f"{peak:,}", f"{peak / capacity:.1%}"] for label, peak in zip(labels, peaks, strict=True)]
    return Section("memory", "Memory", look, drawing, (["rank", "tokens", "of the budget"], rows))
