"""`flexcp lengths`: from data to a file of sample lengths, and what their tail looks like.

Counts and shows; reads everything that `train` reads, and files that already hold lengths. Writes
nothing but `--out`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from flexcp.cli.outputs import require_writable
from flexcp.core.errors import ConfigError, DataError
from flexcp.core.lengths import read_lengths, require_suffix, write_lengths
from flexcp.train.data.dataset import ANY_FILE, open_documents, open_tokenizer
from flexcp.train.data.documents import Skipped
from flexcp.train.data.index import Progress as Report
from flexcp.train.data.index import build_index, skipped_by

LENGTHS_SCHEMA = "flexcp.lengths/1"
LONG_TOKENS = (8192, 32768, 131072)

_LENGTH_FILES = (".idx", ".json", ".csv", ".tsv", ".psv")
_BAR_CELLS = 32

Lengths = npt.NDArray[np.int64]


def lengths(
    paths: Annotated[list[Path], typer.Argument(help="Folders or files of data, or files of lengths.")],
    tokenizer: Annotated[
        str | None, typer.Option(help="'bytes' (default), or a tokenizer.json or its folder.")
    ] = None,
    pattern: Annotated[str | None, typer.Option(help="Files of a folder to read: '**/*.py'.")] = None,
    text_column: Annotated[str | None, typer.Option(help="Key or column that holds the text.")] = None,
    column: Annotated[
        str | None, typer.Option(help="The paths are length files; this column holds the lengths.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the lengths here: .json, .csv or .txt.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Turn training data into a file of sample lengths, and show its tail.

    Folders, .jsonl, .parquet, save_to_disk folders and text files are tokenized; .idx (Megatron), .json,
    .csv, .tsv and .psv hold lengths already.
    """
    if out is not None:
        require_suffix(out)
        require_writable(out)
    given = {"--tokenizer": tokenizer, "--pattern": pattern, "--text-column": text_column}
    counted = [path for path in paths if column is None and path.suffix not in _LENGTH_FILES]
    unused = [name for name, value in given.items() if value is not None]
    if unused and not counted:
        raise ConfigError(
            f"{', '.join(unused)} would change nothing: every path holds lengths already",
            "Leave it out, or give documents.",
        )
    arrays: list[Lengths] = []
    skipped: list[Skipped] = []
    for path in paths:
        if path in counted:
            found, notes = _count(path, tokenizer or "bytes", pattern or ANY_FILE, text_column or "text")
            skipped.extend(notes)
        else:
            found = read_lengths(path, column)
        arrays.append(found)
    everything = np.concatenate(arrays)
    if out is not None:
        write_lengths(out, everything)
    summary = summarize(everything, skipped)
    if as_json:
        typer.echo(json.dumps(summary))
    else:
        _show(Console(), summary, skipped, out)


def summarize(tokens: Lengths, skipped: Sequence[Skipped] = ()) -> dict[str, Any]:
    """All that is shown, as JSON values.

    `long_share` is the share of tokens in samples longer than each limit; `histogram` has one entry per
    power of two, `[from, below, samples, tokens]`.
    """
    total = int(tokens.sum())
    percentiles = np.percentile(tokens, [50, 90, 99], method="nearest")
    bits = np.frexp(tokens)[1]  # tokens are in [2**(bits - 1), 2**bits)
    histogram = [
        [1 << bit - 1, 1 << bit, int((bits == bit).sum()), int(tokens[bits == bit].sum())]
        for bit in range(int(bits.min()), int(bits.max()) + 1)
    ]
    return {
        "schema": LENGTHS_SCHEMA,
        "count": len(tokens),
        "total": total,
        **{f"p{p}": int(value) for p, value in zip((50, 90, 99), percentiles, strict=True)},
        "max": int(tokens.max()),
        "long_share": {str(limit): int(tokens[tokens > limit].sum()) / total for limit in LONG_TOKENS},
        "histogram": histogram,
        "skipped": [{"reason": s.reason, "count": s.count, "first": list(s.first)} for s in skipped],
    }


def _count(path: Path, tokenizer: str, pattern: str, column: str) -> tuple[Lengths, tuple[Skipped, ...]]:
    documents = open_documents(path, pattern=pattern, text_column=column)
    with _progress_bar(path) as report:
        counts = build_index(documents, open_tokenizer(tokenizer), report).lengths
    notes = (*documents.skipped, *skipped_by(documents, counts))
    if not (counts > 0).any():
        raise DataError(f"{path} gives no sample", "; ".join(map(str, notes)) or "It is empty.")
    return counts[counts > 0], notes


@contextmanager
def _progress_bar(path: Path) -> Iterator[Report]:
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(path.name or str(path))
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _show(console: Console, summary: dict[str, Any], skipped: Sequence[Skipped], out: Path | None) -> None:
    facts = Table.grid(padding=(0, 2))
    facts.add_column()
    facts.add_column(justify="right")
    facts.add_row("samples", f"{summary['count']:,}")
    facts.add_row("tokens", f"{summary['total']:,}")
    for name in ("p50", "p90", "p99", "max"):
        facts.add_row(name, f"{summary[name]:,}")
    for limit, share in summary["long_share"].items():
        facts.add_row(f"tokens in samples above {_short(int(limit))}", f"{share:.1%}")
    console.print(facts, highlight=False)
    console.print(_histogram(summary), highlight=False)
    for note in skipped:
        console.print(str(note), style="yellow", highlight=False, markup=False, soft_wrap=True)
    if out is not None:
        console.print(f"lengths written to {out}", highlight=False, markup=False, soft_wrap=True)


def _histogram(summary: dict[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 1))
    for name, side in (("length", "right"), ("samples", "right"), ("tokens", "right"), ("", "left")):
        table.add_column(name, justify=side)  # type: ignore[arg-type]
    most = max(tokens for *_, tokens in summary["histogram"])
    for start, stop, samples, tokens in summary["histogram"]:
        # Bars of tokens, not of samples: the tail is where the work is.
        bar = "█" * round(_BAR_CELLS * tokens / most)
        share = f"{tokens / summary['total']:.1%}"
        table.add_row(f"{_short(start)} – {_short(stop)}", f"{samples:,}", share, f"[cyan]{bar}[/]")
    return table


def _short(tokens: int) -> str:
    """A power of two as people write it.

    >>> _short(512), _short(131072), _short(1 << 20)
    ('512', '128k', '1M')
    """
    for power, unit in ((20, "M"), (10, "k")):
        if tokens >= 1 << power:
            return f"{tokens >> power}{unit}"
    return str(tokens)
