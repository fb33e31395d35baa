"""What each rank of a group feeds its model: every row once, its own position, its own target."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexcp.core.cluster import Cluster
from flexcp.core.errors import DataError
from flexcp.core.plan import Plan, Task
from flexcp.core.sample import Sample
from flexcp.runtime.batches import (
    MicroBatch,
    count_tokens,
    load_examples,
    make_micro_batch,
    planned_sample,
    rank_samples,
)

RANKS = 8


class FakeTransport:
    """A transport without a world: it only knows which rank it is."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def exchange(self, ranks: tuple[int, ...], kind: str) -> tuple[tuple[int, ...], str]:
        return ranks, kind


class Documents:
    """Token j of sample i is 1000 i + j, so every row tells where it belongs; notes what is read."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.read.append(index)
        return {"input_ids": 1000 * index + np.arange(self.lengths[index])}


def make_plan(
    lengths: list[int], *tasks: tuple[tuple[int, ...], tuple[int, ...]], whole_below: int = 0
) -> Plan:
    """Tasks given as (samples, ranks), each in a wave of its own."""
    made = tuple(Task(pack, ranks, wave, wave, wave + 1.0) for wave, (pack, ranks) in enumerate(tasks))
    samples = tuple(Sample(i, tokens) for i, tokens in enumerate(lengths))
    return Plan("test", "free-running", Cluster(RANKS, 10**6), whole_below, samples, made, 1.0)


def micro_batches(plan: Plan, task: Task, dataset: Any) -> list[MicroBatch]:
    """The share of every member of the group, in ring order."""
    return [
        make_micro_batch(plan, task, load_examples(dataset, plan, rank), FakeTransport(rank))  # type: ignore[arg-type]
        for rank in task.ranks
    ]


def rows_of(micro: MicroBatch) -> list[tuple[int, int, int]]:
    """(token, position, target) of every row; padding left out."""
    ids, positions = micro.inputs["input_ids"][0].tolist(), micro.inputs["position_ids"][0].tolist()
    kept = len(ids) - micro.inputs["flexcp"].padding_rows
    return list(zip(ids, positions, micro.labels.tolist(), strict=True))[:kept]


def expected_rows(lengths: list[int], pack: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """The same rows of a pack that nobody cut."""
    return [
        (1000 * i + j, j, 1000 * i + j + 1 if j + 1 < lengths[i] else -100)
        for i in pack
        for j in range(lengths[i])
    ]


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_targets_are_the_next_token_of_the_same_document(degree: int) -> None:
    """D15: labels are shifted before the cut, also in documents of one token."""
    lengths = [1, 3, 5, 2]
    plan = make_plan(lengths, ((0, 1, 2, 3), tuple(range(degree))))
    micros = micro_batches(plan, plan.tasks[0], Documents(lengths))

    for micro in micros:
        for token, _, target in rows_of(micro):
            document, offset = divmod(token, 1000)
            assert target == (-100 if offset + 1 == lengths[document] else token + 1)
    assert sum(micro.supervised_tokens for micro in micros) == 0 + 2 + 4 + 1


def test_positions_restart_with_every_document() -> None:
    """D16: cu_seqlens [0, 4, 8] on two ranks."""
    lengths = [4, 4]
    plan = make_plan(lengths, ((0, 1), (5, 2)))
    first, second = micro_batches(plan, plan.tasks[0], Documents(lengths))

    assert first.inputs["position_ids"].tolist() == [[0, 3, 0, 3]]
    assert first.inputs["input_ids"].tolist() == [[0, 3, 1000, 1003]]
    assert first.labels.tolist() == [1, -100, 1001, -100]
    assert second.inputs["position_ids"].tolist() == [[1, 2, 1, 2]]
    assert second.inputs["input_ids"].tolist() == [[1, 2, 1001, 1002]]
    assert second.labels.tolist() == [2, 3, 1002, 1003]


def test_positions_follow_the_degree_of_each_micro_batch() -> None:
    """D17: degrees 3, 1 and 5 in a row; no group size of before or after leaks in."""
    lengths = [17, 4, 11, 30, 9]
    tasks = (((0, 1), (2, 0, 1)), ((2,), (0,)), ((3, 4), (4, 0, 3, 1, 2)))
    plan = make_plan(lengths, *tasks)
    dataset = Documents(lengths)
    for task, degree in zip(plan.tasks, (3, 1, 5), strict=True):
        micros = micro_batches(plan, task, dataset)
        assert [micro.inputs["flexcp"].layout.degree for micro in micros] == [degree] * degree
        assert all(micro.inputs["flexcp"].exchange == (task.ranks, task.exchange) for micro in micros)
        assert all(micro.sample_ids == task.samples for micro in micros)
        rows = [row for micro in micros for row in rows_of(micro)]
        assert sorted(rows) == expected_rows(lengths, task.samples)


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    ranks=st.permutations(range(RANKS)),
    degree=st.integers(1, RANKS),
    whole_below=st.sampled_from([0, 2, 16, 100]),
)
def test_every_row_lies_on_exactly_one_rank(
    lengths: list[int], ranks: list[int], degree: int, whole_below: int
) -> None:
    """Whatever the pack, the degree, the ring order and what stays whole."""
    pack = tuple(range(len(lengths)))
    plan = make_plan(lengths, (pack, tuple(ranks[:degree])), whole_below=whole_below)
    micros = micro_batches(plan, plan.tasks[0], Documents(lengths))
    rows = [row for micro in micros for row in rows_of(micro)]

    assert sorted(rows) == expected_rows(lengths, pack)
    for micro in micros:
        assert micro.supervised_tokens == int((micro.labels != -100).sum())
        assert micro.inputs["input_ids"].shape == micro.inputs["position_ids"].shape == (1, len(micro.labels))
        assert micro.inputs["input_ids"].dtype == micro.labels.dtype == torch.int64


def test_a_member_without_rows_gets_one_row_of_padding() -> None:
    """D24: a pack of two tokens on four ranks."""
    plan = make_plan([2], ((0,), (0, 1, 2, 3)))
    micros = micro_batches(plan, plan.tasks[0], Documents([2]))
    padded = [micro for micro in micros if micro.inputs["flexcp"].padding_rows]

    assert len(padded) == 2
    for micro in padded:
        assert micro.inputs["flexcp"].padding_rows == 1
        assert micro.inputs["input_ids"].tolist() == micro.inputs["position_ids"].tolist() == [[0]]
        assert micro.labels.tolist() == [-100]
        assert micro.supervised_tokens == 0
    assert sorted(row for micro in micros for row in rows_of(micro)) == [(0, 0, 1), (1, 1, -100)]


def test_a_rank_reads_only_what_it_holds() -> None:
    """No rank decodes a sample of which it has no row; one that it needs twice is read once."""
    lengths = [9, 40, 3, 30, 8]
    plan = make_plan(lengths, ((0, 1), (1, 0)), ((2,), (2,)), ((3,), (0,)), ((4,), (3, 1)), whole_below=10)
    held = {rank: rank_samples(plan, rank) for rank in range(5)}

    assert held[2] == {2}
    assert held[4] == set()
    assert {1, 3} <= held[0]
    assert 3 not in held[1]
    assert 1 in held[1]
    assert (0 in held[0]) != (0 in held[1])  # below 10 tokens: whole, on one of the two
    assert (4 in held[1]) != (4 in held[3])
    for rank, positions in held.items():
        dataset = Documents(lengths)
        examples = load_examples(dataset, plan, rank)
        assert examples.keys() == positions
        assert sorted(dataset.read) == sorted(positions)


def test_a_sample_of_another_length_is_refused() -> None:
    """The plan cannot hold for data that changed; position in the batch and name are two things."""
    dataset = Documents([5, 6, 7])
    samples = (Sample(2, 7), Sample(1, 9))
    plan = Plan("test", "lockstep", Cluster(1, 99), 0, samples, (Task((0, 1), (0,), 0, 0.0, 1.0),), 1.0)
    with pytest.raises(DataError) as caught:
        load_examples(dataset, plan, 0)

    assert str(caught.value) == (
        "sample 1 has 6 tokens, its length was 9\n"
        "The data changed after its lengths were taken; rebuild the length index."
    )


def test_labels_of_the_data_set_decide_what_is_a_target() -> None:
    """D15: a prompt that is not learned; its first learned token is the target of the row before it."""
    ids, labels = list(range(10, 20)), [-100] * 4 + list(range(14, 20))
    dataset = [{"input_ids": ids, "labels": labels}]
    plan = make_plan([10], ((0,), (0, 1)))
    micros = micro_batches(plan, plan.tasks[0], dataset)
    by_position = {position: target for micro in micros for _, position, target in rows_of(micro)}

    assert by_position == dict(enumerate([-100, -100, -100, 14, 15, 16, 17, 18, 19, -100]))
    assert sum(micro.supervised_tokens for micro in micros) == 6


def test_what_else_a_sample_holds_goes_along_untouched() -> None:
    """To the ranks that hold rows of it and to no other, with the rows said; the same objects, not copies."""
    image, weights = torch.ones(2, 3), np.arange(40)
    examples = [
        {"input_ids": np.arange(3), "caption": "short"},
        {"input_ids": np.arange(40), "labels": np.arange(40), "image": image, "weights": weights},
        {"input_ids": np.arange(5)},
    ]
    plan = make_plan([3, 40, 5], ((1, 0, 2), (4, 2)), whole_below=10)
    micros = micro_batches(plan, plan.tasks[0], examples)

    for micro in micros:
        assert micro.sample_ids == (1, 0, 2)
        held = {piece.index for piece in micro.pieces}
        assert micro.extras[0]["image"] is image
        assert micro.extras[0]["weights"] is weights
        assert micro.extras[1] == ({"caption": "short"} if 1 in held else {})
        assert micro.extras[2] == {}
        assert sum(piece.rows for piece in micro.pieces) == len(micro.labels)
        cut = np.concatenate([weights[p.start : p.stop] for p in micro.pieces if p.index == 0])
        assert cut.tolist() == micro.inputs["position_ids"][0, : len(cut)].tolist()
    assert sum(1 in {piece.index for piece in micro.pieces} for micro in micros) == 1


def test_only_tokens_and_labels_move_to_the_device() -> None:
    """The context of attention and the extras stay what they are."""
    plan = make_plan([4], ((0,), (0,)))
    micro = micro_batches(plan, plan.tasks[0], [{"input_ids": [1, 2, 3, 4], "image": torch.ones(2)}])[0]
    there = micro.to(torch.device("meta"))

    assert micro.to(torch.device("cpu")) is micro
    assert {there.inputs[key].device.type for key in ("input_ids", "position_ids")} == {"meta"}
    assert there.labels.device.type == "meta"
    assert there.inputs["flexcp"] is micro.inputs["flexcp"]
    assert there.extras is micro.extras
    assert micro.labels.device.type == "cpu"


@pytest.mark.parametrize("said", [Sample(1, 8), Sample(0, 7)])
def test_a_data_set_that_contradicts_its_lengths_is_refused(said: Sample) -> None:
    """Its `sample(1)` is of another length, or another sample."""
    dataset: Any = Documents([7, 7])
    dataset.sample = lambda index: said
    with pytest.raises(DataError) as caught:
        planned_sample(dataset, 1)

    assert caught.value.cause == (
        f"the data set's sample(1) is sample {said.id} of {said.tokens} tokens; by its lengths it has 7"
    )


@pytest.mark.gpu
def test_tensors_are_pinned_for_an_accelerator() -> None:
    plan = make_plan([4], ((0,), (0,)))
    examples = load_examples(Documents([4]), plan, 0)
    micro = make_micro_batch(plan, plan.tasks[0], examples, FakeTransport(0), pinned=True)  # type: ignore[arg-type]

    assert micro.labels.is_pinned()
    assert micro.inputs["input_ids"].is_pinned()


class Unreadable(Documents):
    """Its sample 1 cannot be read."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 1:
            raise ValueError("not text")
        return super().__getitem__(index)


def test_a_sample_that_cannot_be_read_is_named_with_rank_and_cause() -> None:
    plan = make_plan([4, 4], ((0, 1), (3,)))
    with pytest.raises(DataError) as caught:
        load_examples(Unreadable([4, 4]), plan, 3)

    cause = caught.value.cause
    assert cause.startswith("rank 3 could not read sample 1: ValueError: not text (")
    assert "test_batches.py, line " in cause
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("labels", [6, 8])
def test_labels_of_another_length_are_refused_by_name(labels: int) -> None:
    """A user who shifts them drops one; every target would be of the wrong row."""

    class Shifted(Documents):
        def __getitem__(self, index: int) -> dict[str, Any]:
            return {**super().__getitem__(index), "labels": np.zeros(labels, dtype=np.int64)}

        def name(self, index: int) -> str:
            return "a.txt"

    with pytest.raises(
        DataError, match=f"could not read a.txt: it has 7 tokens and {labels} labels"
    ) as caught:
        load_examples(Shifted([7]), make_plan([7], ((0,), (0,))), rank=0)
    assert "unshifted: FlexCP shifts them" in caught.value.remedy


@pytest.mark.parametrize(
    ("example", "words"),
    [
        ({"input_ids": [1.5, 2.5]}, r"its input_ids are float64 of shape \[2\]"),
        ({"input_ids": [[1], [2]]}, r"its input_ids are int64 of shape \[2, 1\]"),
        ({"input_ids": ["a", "b"]}, r"its input_ids are <U1 of shape \[2\]"),
        ({"input_ids": [1, -1]}, "its input_ids hold -1"),
        ({"input_ids": [1, 2], "labels": [0.5, 1.5]}, r"its labels are float64 of shape \[2\]"),
        ({"input_ids": [1, 2], "labels": [-5, -100]}, "its labels hold -5"),
        ({"input_ids": [1, 2], "labels": [-100]}, "it has 2 tokens and 1 labels"),
    ],
)
def test_tokens_and_labels_are_whole_numbers(example: dict[str, Any], words: str) -> None:
    """Anything else would be rounded, or end in a kernel of the accelerator."""
    with pytest.raises(DataError, match=words):
        count_tokens(example)
    assert count_tokens({"input_ids": torch.tensor([3, 0]), "labels": np.array([-100, 2])}) == 2
    assert count_tokens({"input_ids": []}) == 0
