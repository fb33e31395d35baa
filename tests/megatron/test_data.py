"""Megatron's indexed files as training data: lengths, tokens, order, and a run that is resumed."""

from __future__ import annotations

import importlib.util
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flexcp.core.errors import ConfigError, DataError
from tests.harness import run_ranks
from tests.megatron.jobs import LENGTHS, make_planner, start

if importlib.util.find_spec("megatron") is None:
    pytest.skip(
        "megatron-core is not installed: pip install 'flexcp[train,megatron]'", allow_module_level=True
    )

DOCUMENTS = [[5], [7, 3], [1], [2, 9, 4]]  # lengths of the sequences of each document


def read(world: Any, folder: str) -> dict[str, Any]:
    """What is read of a file that megatron-core's own builder wrote."""
    start(world)
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    import flexcp

    prefix = f"{folder}/corpus"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    tokens = iter(range(1000))
    for lengths in DOCUMENTS:
        document = torch.tensor([next(tokens) for _ in range(sum(lengths))])
        builder.add_document(document, lengths)
    builder.finalize(f"{prefix}.idx")
    found: dict[str, Any] = {}
    for most in (None, 4):
        data = flexcp.megatron.IndexedDocuments(prefix, max_tokens=most)
        samples = [data[index]["input_ids"].tolist() for index in range(len(data))]
        found[str(most)] = data.lengths.tolist(), samples, data.name(len(data) - 1)
    for name, call in {
        "missing": lambda: flexcp.megatron.IndexedDocuments(f"{folder}/other"),
        "zero": lambda: flexcp.megatron.IndexedDocuments(prefix, max_tokens=0),
    }.items():
        try:
            call()
        except DataError as error:
            found[name] = str(error)
    found["tables"] = rotate()
    return found


# Samples and degree of micro-batches that follow each other.
ROTATED = [((4, 4), 2), ((7, 2, 9), 3), ((11,), 1), ((13, 5), 5), ((4, 4), 2)]


def rotate() -> list[list[tuple[list[int], Any]]]:
    """Positions and rotary table of every member of some groups in a row, by one model."""
    import torch

    from flexcp.core.layout import make_layout
    from flexcp.core.sample import samples_from_lengths
    from flexcp.integrations.megatron.batches import _seq_params
    from flexcp.runtime.batches import TaskContext
    from tests.megatron import host

    rotary = host.provider(host.make_config()).rotary_pos_emb
    found = []
    for lengths, degree in ROTATED:
        layout = make_layout(samples_from_lengths(lengths), degree, 0)
        tables = []
        for member in range(degree):
            rows = [row for piece in layout.pieces(member) for row in range(piece.start, piece.stop)]
            positions = torch.tensor(rows)
            context = TaskContext(layout, SimpleNamespace(member=member, degree=degree), 0)
            params = _seq_params(context, positions)
            length = rotary.get_rotary_seq_len(None, None, None, None, packed_seq_params=params)
            tables.append((rows, rotary(length, packed_seq=True, cp_group=None)[:, 0, 0].numpy()))
        found.append(tables)
    return found


def test_documents_are_samples_and_rows_keep_their_positions(tmp_path: Path) -> None:
    """Sequences of a document are one sample; long ones are cut; nothing is lost and nothing twice.

    And, in the same process, rotary tables of micro-batches whose degrees change from one to the next.
    """
    found = run_ranks(read, 1, str(tmp_path))[0]

    for most, (lengths, samples, last) in (("None", found["None"]), ("4", found["4"])):
        assert lengths == [len(sample) for sample in samples]
        assert list(chain.from_iterable(samples)) == list(range(sum(map(sum, DOCUMENTS))))
        assert last.startswith("document 3 of"), most
    assert found["None"][0] == [5, 10, 1, 15]
    assert found["4"][0] == [4, 1, 4, 4, 2, 1, 4, 4, 4, 3]
    assert "does not exist" in found["missing"]
    assert "max_tokens is 0" in found["zero"]
    frequencies = 10_000.0 ** (-np.arange(0, 8, 2) / 8)
    for tables, (lengths, degree) in zip(found["tables"], ROTATED, strict=True):
        # Rows are those of the uncut samples, whatever the degree was before.
        assert sorted(row for rows, _ in tables for row in rows) == sorted(
            row for length in lengths for row in range(length)
        )
        assert len(tables) == degree
        for rows, table in tables:
            angles = np.outer(rows, frequencies)
            np.testing.assert_allclose(table, np.concatenate([angles, angles], axis=1), rtol=1e-5)
    assert found["tables"][0][0][0] == [0, 3, 0, 3]


def train_and_resume(world: Any) -> dict[str, Any]:
    """Samples and losses of four steps, the last two by another engine; evaluation before and after."""
    start(world, tensor=1, pipeline=2)
    from megatron.core.pipeline_parallel import get_forward_backward_func

    import flexcp
    from tests.datasets import ListDataset
    from tests.megatron import host

    model, optimizer = host.wrap(host.provider(host.make_config()))

    def engine(dataset: Any = None, **options: Any) -> Any:
        data = dataset or ListDataset(LENGTHS)
        return flexcp.megatron.Engine(
            [model], make_planner(1), data, **{"global_batch": 5, "steps": 4, **options}
        )

    def evaluate(running: Any, dataset: Any) -> list[tuple[float, int]]:
        model.eval()
        found = []
        for step in running.evaluation(dataset):
            reports = get_forward_backward_func()(
                forward_step_func=host.forward_step, model=[model], forward_only=True, **step.schedule
            )
            found.append((step.finish(reports), step.supervised_tokens))
        model.train()
        return found

    found: dict[str, Any] = {"samples": []}

    def watched(running: Any, until: int) -> Any:
        for step in running:
            found["samples"].append([sample.id for sample in step.plan.samples])
            yield step
            if step.index + 1 == until:
                return

    with engine() as first:
        found["losses"] = host.train(watched(first, 2), model, optimizer)[0]
        state = first.state_dict()
        evaluations = [evaluate(first, ListDataset(LENGTHS[:7], unlabelled=()))]
    with engine() as second:
        second.load_state_dict(state)
        evaluations.append(evaluate(second, ListDataset(LENGTHS[:7], unlabelled=())))
        found["losses"] += host.train(watched(second, 9), model, optimizer)[0]
        found["state"] = second.state_dict()
    with engine(seed=1) as third:
        try:
            third.load_state_dict(state)
        except ConfigError as error:
            found["other seed"] = str(error)
    with engine(dataset=ListDataset(LENGTHS[:-1])) as other:
        try:
            other.load_state_dict(state)
        except ConfigError as error:
            found["other data"] = str(error)
    found["evaluations"] = evaluations
    return found


def test_a_resumed_run_sees_the_same_samples() -> None:
    """Order is a function of seed and step, for any grid; evaluation leaves the count of steps alone."""
    from flexcp.runtime.order import batch_indices
    from flexcp.runtime.settings import data_name
    from tests.datasets import ListDataset

    by_process = run_ranks(train_and_resume, 2)

    data = data_name(ListDataset(LENGTHS))
    for found in by_process:
        assert found["samples"] == [batch_indices(len(LENGTHS), 5, 0, step).tolist() for step in range(4)]
        assert found["state"] == {"step": 4, "seed": 0, "global_batch": 5, "data": data, "learnt_costs": {}}
        assert "seed = 0" in found["other seed"]
        assert f"data = {data}, this run has 18 samples" in found["other data"]
        assert found["losses"] == by_process[0]["losses"]
        before, after = found["evaluations"]
        assert before == after
        assert sum(tokens for _, tokens in before) > 0
