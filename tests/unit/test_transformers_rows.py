"""Rows of trainers as samples: packs taken apart, padding cut off, labels as the collator makes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from flexcp.core.errors import DataError, UnsupportedError
from flexcp.integrations.transformers.rows import RowSamples, cut_at_cu_seq_lens, cut_at_positions


def collate(rows: list[Any]) -> dict[str, Any]:
    """Pads to a multiple of 8, as collators do, and masks token 3."""
    ids = torch.tensor(rows[0]["input_ids"])
    padded = torch.cat([ids, torch.zeros(-len(ids) % 8, dtype=ids.dtype)])
    return {
        "input_ids": padded[None],
        "attention_mask": (torch.arange(len(padded)) < len(ids)).long()[None],
        "labels": torch.where(padded == 3, -100, padded)[None],
    }


@pytest.mark.parametrize(
    "bounds",
    [
        {"seq_lengths": [2, 0, 3]},
        {"position_ids": [0, 1, 0, 1, 2]},
        {"cu_seq_lens": [0, 2, 5]},
        {"cu_seq_lens_q": [0, 2, 2, 5]},
    ],
)
def test_a_packed_row_is_its_documents(bounds: dict[str, Any]) -> None:
    """D19: TRL's lengths, axolotl's positions, cumulative lengths; a document without tokens is none."""
    samples = RowSamples([{"input_ids": [5, 3, 7, 8, 9], **bounds}, {"input_ids": [4]}], collate)

    assert samples.lengths.tolist() == [2, 3, 1]
    assert [samples[i]["input_ids"].tolist() for i in range(3)] == [[5, 3], [7, 8, 9], [4]]
    assert [samples[i]["labels"].tolist() for i in range(3)] == [[5, -100], [7, 8, 9], [4]]
    assert [samples.name(i) for i in range(3)] == ["row 0, document 0", "row 0, document 1", "row 1"]
    assert (len(samples), samples.num_rows) == (3, 2)


def test_columns_of_a_data_set_are_read_by_length() -> None:
    from datasets import Dataset

    rows = Dataset.from_dict({"input_ids": [[1, 2], [], [4] * 9], "text": ["a", "b", "c"]}).shuffle(seed=1)
    samples = RowSamples(rows, collate)
    by_hand = [n for n in map(len, rows["input_ids"]) if n]
    assert samples.lengths.tolist() == by_hand
    assert [len(samples[i]["input_ids"]) for i in range(2)] == by_hand
    packed = Dataset.from_dict({"input_ids": [[1, 2, 3]], "seq_lengths": [[1, 2]]})
    assert RowSamples(packed, collate).lengths.tolist() == [1, 2]


def test_rows_that_make_no_sense_are_refused() -> None:
    """D19: positions of three axes, or of a document that begins elsewhere."""
    with pytest.raises(DataError, match="position_ids have 2 axes in a row"):
        cut_at_positions(np.zeros((3, 5)))  # type: ignore[arg-type]
    for positions in ([1, 2, 0], [0, 2], [0, 1, 1]):
        with pytest.raises(DataError, match="do not count from 0 within each document"):
            cut_at_positions(positions)
    for bounds in ([0, 4], [1, 5], [0, 4, 3, 5], [0]):
        with pytest.raises(DataError, match="do not divide 5 tokens"):
            cut_at_cu_seq_lens(bounds, 5)
    with pytest.raises(DataError, match="row 0 holds 2 tokens and documents of 3"):
        RowSamples([{"input_ids": [1, 2], "seq_lengths": [3]}], collate)
    with pytest.raises(DataError, match="row 0 has no input_ids; it has: text"):
        RowSamples([{"text": "a"}], collate)
    with pytest.raises(DataError, match="the rows hold no tokens"):
        RowSamples([{"input_ids": []}], collate)


def test_what_a_collator_adds_is_refused() -> None:
    """D48: images would not reach the model, in silence."""
    samples = RowSamples([{"input_ids": [1]}], lambda rows: {**collate(rows), "pixel_values": 1})
    with pytest.raises(
        UnsupportedError, match="the collator gives pixel_values, which would not reach the model"
    ):
        samples[0]


def test_padding_of_the_tokenizer_is_no_part_of_a_sample() -> None:
    """From either side, by rows and by columns; the collator keeps the mask."""
    from datasets import Dataset

    data = {
        "input_ids": [[5, 6, 0, 0], [0, 7, 8, 9], [1, 2, 3, 4]],
        "attention_mask": [[1, 1, 0, 0], [0, 1, 1, 1], [1, 1, 1, 1]],
    }

    def keeping(rows: list[Any]) -> dict[str, Any]:
        return {**rows[0], "labels": rows[0]["input_ids"]}

    columns = Dataset.from_dict(data)
    for rows in (columns, list(columns)):
        samples = RowSamples(rows, keeping)
        assert samples.lengths.tolist() == [2, 3, 4]
        assert [samples[i]["labels"].tolist() for i in range(2)] == [[5, 6], [7, 8, 9]]
    losing = RowSamples(columns, lambda rows: {"input_ids": rows[0]["input_ids"], "labels": [0] * 4})
    with pytest.raises(UnsupportedError, match="row 1 has 3 tokens by its attention_mask, and 4 as it is"):
        losing[1]


def test_a_collator_without_labels_is_refused() -> None:
    samples = RowSamples([{"input_ids": [1, 2]}], lambda rows: {"input_ids": rows[0]["input_ids"]})
    with pytest.raises(UnsupportedError, match="the collator gives no labels"):
        samples[0]


def test_a_packed_row_is_collated_once() -> None:
    collated: list[Any] = []

    def counting(rows: list[Any]) -> dict[str, Any]:
        collated.append(rows)
        return collate(rows)

    samples = RowSamples(
        [{"input_ids": [1, 2, 3, 4], "seq_lengths": [1, 1, 2]}, {"input_ids": [5]}], counting
    )
    assert [samples[i]["input_ids"].tolist() for i in (0, 1, 2, 3, 0)] == [[1], [2], [3, 4], [5], [1]]
    assert len(collated) == 3
