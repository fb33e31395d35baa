"""The sections of the page: for each plot a title, what to look for, the drawing, and its numbers."""

from __future__ import annotations

from flexcp.report.page.sections.beside import beside
from flexcp.report.page.sections.curves import gaps, parts, prediction, step_times
from flexcp.report.page.sections.distributions import degrees, lengths, memory
from flexcp.report.page.sections.policies import policies
from flexcp.report.page.sections.section import Section
from flexcp.report.page.sections.timeline import timeline
from flexcp.report.page.subject import Subject

__all__ = ["Section", "sections"]


def sections(subject: Subject) -> list[Section]:
    """All plots for which there are numbers, in reading order."""
    drawn = (
        (timeline, subject.timelines),
        (step_times, subject.steps),
        (gaps, subject.steps),
        (parts, subject.parts),
        (prediction, subject.pairs),
        (policies, subject.policies),
        (lengths, sum(subject.lengths.samples)),
        (degrees, subject.degrees),
        (memory, subject.memory.ranks),
    )
    first = [beside(subject, subject.beside)] if subject.beside else []
    return [*first, *(draw(subject) for draw, numbers in drawn if numbers)]
