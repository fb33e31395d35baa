"""The sections of the page: for each plot a title, what to look for, the drawing, and its numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flexcp.report.page import charts, gantt
from flexcp.report.page.limits import MOST_BARS, MOST_POINTS
from flexcp.report.page.markup import Markup, element, join
from flexcp.report.page.subject import Curve, PolicyRow, Subject, spread
from flexcp.report.page.thinning import thin_curves, thin_peaks
from flexcp.report.tables import format_degrees, format_seconds


@dataclass(frozen=True, slots=True)
class Section:
    """One plot.

    Attributes:
        anchor: its id in the page.
        title, look: heading, and the sentence that says what to look for.
        drawing: the plot, with its legend.
        table: its numbers: heads, then rows.
    """

    anchor: str
    title: str
    look: str
    drawing: Markup
    table: tuple[Sequence[str], Sequence[Sequence[str]]] | None = None

    def markup(self) -> Markup:
        """The section as HTML."""
        return element(
            "section",
            element("h2", self.title),
            element("p", self.look, class_="look"),
            element("figure", self.drawing, role="group", aria_label=self.title),
            _table(*self.table) if self.table else "",
            id=self.anchor,
            class_="card",
        )


def sections(subject: Subject) -> list[Section]:
    """All plots for which there are numbers, in reading order."""
    found = [_steps(subject), _gaps(subject)]
    if subject.timelines:
        found.insert(0, _timeline(subject))
    if subject.parts:
        found.append(_parts(subject))
    if subject.pairs:
        found.append(_prediction(subject))
    if subject.policies:
        found.append(_policies(subject))
    if sum(subject.lengths.samples):
        found.append(_lengths(subject))
    if subject.degrees:
        found.append(_degrees(subject))
    if subject.memory.ranks:
        found.append(_memory(subject))
    return found


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Markup:
    head = element("tr", [element("th", name, scope="col") for name in heads])
    body = [element("tr", [element("td", cell) for cell in row]) for row in rows]
    scroll = element("div", element("table", element("thead", head), element("tbody", body)), class_="scroll")
    return element("details", element("summary", "Numbers"), scroll)


def _legend(keys: Sequence[tuple[str, str]]) -> Markup:
    spans = [
        element("span", element("i", class_=f"swatch {style}"), name, class_="key") for style, name in keys
    ]
    return element("p", spans, class_="legend")


def _timeline(subject: Subject) -> Section:
    planned = subject.origin == "planned"
    drawn = [
        gantt.draw(line, subject.ranks_shown, subject.cluster.ranks_per_node) for line in subject.timelines
    ]
    first = next((i for i, line in enumerate(subject.timelines) if line.step == subject.focus), 0)
    options = [
        element("option", f"{line.step}", value=f"{line.step}", selected=index == first)
        for index, line in enumerate(subject.timelines)
    ]
    controls = element(
        "div",
        element("label", "Step ", element("select", options, id="step")),
        element("button", "–", id="out", type="button", aria_label="Zoom out"),
        element("button", "+", id="in", type="button", aria_label="Zoom in"),
        element("span", "hover a box, or tab into the plot and use the arrow keys", class_="hint"),
        class_="controls",
    )
    steps = [
        element(
            "div",
            element("p", one.notice, class_="notice") if one.notice else "",
            element(
                "div",
                one.labels,
                element("div", one.plot, class_="scroller"),
                class_="chart",
            ),
            class_="step",
            data_step=line.step,
            data_pairs=not planned,
            hidden=index != first,
        )
        for index, (line, one) in enumerate(zip(subject.timelines, drawn, strict=True))
    ]
    degrees = [box.degree for line in subject.timelines for panel in line.panels for box in panel.boxes]
    other = "the policy it is compared with" if planned else f"what was {subject.origin}"
    look = (
        "Each box is a pack of samples on the ranks that share it, as wide as its time. "
        f"Above is the plan, below {other}, on one axis of time. "
        "Look for idle ground on the right, where ranks wait for others"
        + (", and for boxes that outgrew their prediction." if not planned else ".")
    )
    return Section(
        "timeline",
        "Timeline: ranks × time",
        look,
        join([controls, gantt.legend(degrees, marks=not planned), *steps]),
    )


def _steps(subject: Subject) -> Section:
    steps, curves = thin_curves(subject.steps, subject.curves, MOST_POINTS)
    tips = [
        f"step {step}\n" + "\n".join(f"{c.name}: {format_seconds(c.values[index])}" for c in curves)
        for index, step in enumerate(steps)
    ]
    scale = charts.seconds(max(max(curve.values) for curve in curves))
    look = "Seconds a step. Look for " + (
        "the distance of each policy from the bound, which no plan can beat."
        if subject.origin == "planned"
        else f"predicted and {subject.origin} running side by side; the whole step adds data, reduction "
        "and optimizer."
    )
    return Section(
        "steps",
        "Step time",
        look + _means(subject, steps),
        join([_keys(curves), charts.lines(curves, steps, scale, tips)]),
        _curve_table(steps, curves, format_seconds),
    )


def _gaps(subject: Subject) -> Section:
    steps, gaps = thin_curves(subject.steps, subject.gaps, MOST_POINTS)
    low = min(1.0, *(min(curve.values) for curve in gaps))
    high = max(1.05, *(max(curve.values) for curve in gaps))
    one = Curve("1", (1.0,) * len(steps), "bound")
    tips = [
        f"step {step}\n" + "\n".join(f"{curve.name}: {curve.values[index]:.3f}" for curve in gaps)
        for index, step in enumerate(steps)
    ]
    look = (
        "Step time over its bound; 1 cannot be improved. Look for steps that stand out: "
        "their batches are hard to balance."
        if subject.origin == "planned"
        else "Two ratios that are 1 at best: what planning left on the table (predicted / bound), and how "
        "far times are from their prediction."
    )
    drawing = charts.lines((one, *gaps), steps, charts.linear(low, high, "ratio"), tips)
    return Section(
        "gap",
        "Gap",
        look + _means(subject, steps),
        join([_keys(gaps), drawing]),
        _curve_table(steps, gaps, "{:.3f}".format),
    )


def _means(subject: Subject, steps: Sequence[int]) -> str:
    if len(steps) == len(subject.steps):
        return ""
    return f" Points are means of neighbouring steps, {len(steps)} of {len(subject.steps):,} steps."


def _keys(curves: Sequence[Curve]) -> Markup:
    """Lines are told apart by their dashes too."""
    spans = [
        element(
            "span",
            element(
                "svg",
                element("path", class_=f"line {curve.style}", d="M0 5H26"),
                width=26,
                height=10,
                aria_hidden="true",
            ),
            curve.name,
            class_="key",
        )
        for curve in curves
    ]
    return element("p", spans, class_="legend")


def _curve_table(
    steps: Sequence[int], curves: Sequence[Curve], form: Callable[[float], str]
) -> tuple[list[str], list[list[str]]]:
    return (
        ["step", *(curve.name for curve in curves)],
        [[f"{step}", *(form(curve.values[index]) for curve in curves)] for index, step in enumerate(steps)],
    )


def _parts(subject: Subject) -> Section:
    names, shares = list(subject.parts), [100 * share for share in subject.parts.values()]
    texts = [f"{share:.1f} %" for share in shares]
    tips = [f"{name}\n{text} of the time" for name, text in zip(names, texts, strict=True)]
    scale = charts.linear(0.0, max(shares), "share, %")
    look = (
        "Shares of the time of a step, mean of the ranks and of the steps after the first. Look for anything "
        "beside compute: waits for plan, data or messages, idle ranks, and what any step costs."
    )
    drawing = charts.bars(names, [("main", shares)], scale, tips, "part of a step")
    table = (["part", "share"], list(zip(names, texts, strict=True)))
    return Section("parts", "Where the time went", look, drawing, table)


def _prediction(subject: Subject) -> Section:
    tips = [
        (
            before,
            after,
            f"{word}\npredicted {format_seconds(before)}\n{subject.origin} {format_seconds(after)}",
        )
        for before, after, word in subject.pairs
    ]
    look = (
        "One dot a task. On the dashed line prediction is right; above it the task took longer. "
        "A cloud along a parallel line is a machine slower than its calibration, a bend is a wrong formula."
    )
    return Section(
        "prediction",
        f"Tasks: predicted and {subject.origin}",
        look,
        element("div", charts.dots(tips, ("predicted", subject.origin)), class_="square"),
    )


def _policies(subject: Subject) -> Section:
    served = [row for row in subject.policies if not row.refusal]
    base = next((row for row in served if row.name == subject.baseline), None)
    rows = [
        [
            row.name,
            format_seconds(row.step_s),
            f"{row.step_s / row.bound_s:.3f}",
            f"{base.step_s / row.step_s:.2f}×" if base else "–",
            f"{row.waves:.1f}",
            f"{row.idle_share:.1%}",
            format_degrees(row.degrees, most=8),
        ]
        if not row.refusal
        else [row.name, "–", "–", "–", "–", "–", row.refusal]
        for row in subject.policies
    ]
    heads = [
        "policy",
        "step",
        "gap",
        f"speed against {base.name if base else '–'}",
        "waves",
        "idle",
        "degree×groups",
    ]
    refused = "; ".join(f"{row.name}: {row.refusal}" for row in subject.policies if row.refusal)
    look = (
        "Predicted seconds a step of every policy on the same samples. "
        "Look for how much of a bar stands above the line, the bound of its own plans."
        + (f" Without a plan: {refused}." if refused else "")
        if served
        else f"No policy can plan these samples. {refused}."
    )
    if subject.origin != "planned":
        look = f"The samples of the steps in the timeline, planned again. {look}"
    drawing = _ranking(served, subject.policy) if served else ""
    return Section("policies", "Policies", look, join([drawing]), (heads, rows))


def _ranking(served: Sequence[PolicyRow], marked: str) -> Markup:
    tips = [
        f"{row.name}\nstep {format_seconds(row.step_s)}\nbound {format_seconds(row.bound_s)}"
        for row in served
    ]
    times = [(row.name, row.step_s, row.bound_s) for row in served]
    scale = charts.seconds(1.08 * max(row.step_s for row in served))
    key = element("span", element("i", class_="swatch-line"), "bound of its plans", class_="key")
    return join([element("p", key, class_="legend"), charts.ranking(times, marked, scale, tips)])


def _lengths(subject: Subject) -> Section:
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
    keys = _legend([("main", "share of samples"), ("other", "share of tokens")])
    return Section(
        "lengths", "Lengths", look, join([keys, drawing]), (["tokens", "samples", "tokens in all"], rows)
    )


def _power_of_two(value: int) -> str:
    return f"{value // 1024}k" if value >= 1024 else f"{value}"


def _degrees(subject: Subject) -> Section:
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
    keys = _legend([("main", "share of tasks"), ("other", "share of busy time")])
    return Section(
        "degrees", "Degrees", look, join([keys, drawing]), (["degree", "tasks", "busy time"], rows)
    )


def _memory(subject: Subject) -> Section:
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
