"""What reaches the ranks of a step: the same samples whatever N, policy and kind of data, or one sentence."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from flexcp.runtime.order import batch_indices
from tests.distributed.test_engine import LENGTHS, make_engine, make_planner
from tests.distributed.test_lifecycle import said
from tests.harness import run_ranks
from tests.models import ListDataset, reference_step, tiny_model

BATCH, STEPS = 5, 4
POLICIES = ["flexcp", "static", "paper"]


class Images(ListDataset):
    """Samples with more than tokens: a picture for two of three, weights, a caption."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        example = dict(super().__getitem__(index))
        example["weights"] = np.full(int(self.lengths[index]), index, dtype=np.float32)
        example["caption"] = f"no. {index}"
        if index % 3:
            example["image"] = torch.full((index, 2), index / 7, dtype=torch.bfloat16)
        return example


class Records:
    """The same samples as a stream that nobody has counted; it notes what it decodes."""

    def __init__(self, data: ListDataset, samples: int | None = None) -> None:
        self.data = data
        self.samples = samples
        self.decoded: list[int] = []

    def records(self, start: int) -> Iterator[int]:
        end = 10**9 if self.samples is None else self.samples
        yield from range(start, end)

    def decode(self, record: int) -> dict[str, Any]:
        self.decoded.append(record)
        return self.data[record % len(self.data)]


def open_data(kind: str) -> Any:
    data = Images(LENGTHS, unlabelled=())
    return data if kind == "map" else Records(data)


def rows_of(micro: Any) -> list[tuple[int, int, int, int]]:
    """(sample, position, token, target) of every row of a micro-batch; padding left out."""
    where = [(micro.sample_ids[p.index], row) for p in micro.pieces for row in range(p.start, p.stop)]
    ids, targets = micro.inputs["input_ids"][0].tolist(), micro.labels.tolist()
    return [(sample, row, ids[i], targets[i]) for i, (sample, row) in enumerate(where)]


def take_steps(engine: Any, steps: int) -> list[dict[str, Any]]:
    """What this rank is given, without running a model."""
    found = []
    for step in engine:
        micros = list(step)
        found.append(
            {
                "index": step.index,
                "samples": [sample.id for sample in step.plan.samples],
                "degrees": step.plan.degrees,
                "rows": [row for micro in micros for row in rows_of(micro)],
                "extras": [
                    (sample, extra)
                    for micro in micros
                    for sample, extra in zip(micro.sample_ids, micro.extras, strict=True)
                    if extra
                ],
            }
        )
        engine._open_step = None
        engine.next_step += 1
        if len(found) == steps:
            break
    return found


def take_with_policies(world: Any) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Every policy on both kinds of data, on one world."""
    found = {}
    for kind in ("map", "stream"):
        for policy in POLICIES:
            planner = make_planner(world.size, policy, tokens_per_rank=144 // world.size)
            options = {"global_batch": BATCH, "steps": STEPS, "seed": 3}
            with make_engine(tiny_model(), planner, open_data(kind), **options) as engine:
                found[kind, policy] = take_steps(engine, STEPS)
    return found


def expected_rows(samples: list[int]) -> list[tuple[int, int, int, int]]:
    data = Images(LENGTHS, unlabelled=())
    rows = []
    for sample in samples:
        example = data[sample % len(data)]
        targets = [*example["labels"][1:].tolist(), -100]
        rows += list(
            zip([sample] * len(targets), range(len(targets)), example["input_ids"], targets, strict=True)
        )
    return sorted(rows)


@pytest.mark.parametrize("nproc", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_the_order_depends_on_seed_and_step_only(nproc: int) -> None:
    """Same samples per step for any N and policy; every row on one rank, extras untouched where it is."""
    by_rank = run_ranks(take_with_policies, nproc)
    expected = {
        "map": [batch_indices(len(LENGTHS), BATCH, 3, step).tolist() for step in range(STEPS)],
        "stream": [list(range(BATCH * step, BATCH * (step + 1))) for step in range(STEPS)],
    }
    data = Images(LENGTHS, unlabelled=())
    degrees = set()
    for kind, policy in by_rank[0]:
        for step in range(STEPS):
            taken = [found[kind, policy][step] for found in by_rank]
            what = f"{kind}, {policy}, step {step}"
            assert [one["samples"] for one in taken] == [expected[kind][step]] * nproc, what
            assert sorted(row for one in taken for row in one["rows"]) == expected_rows(
                expected[kind][step]
            ), what
            for one in taken:
                assert {sample for sample, _ in one["extras"]} == {row[0] for row in one["rows"]}, what
                for sample, extra in one["extras"]:
                    original = data[sample % len(data)]
                    assert extra.keys() == original.keys() - {"input_ids", "labels"}, what
                    assert extra["caption"] == original["caption"]
                    assert (extra["weights"] == original["weights"]).all()
                    assert extra["weights"].dtype == np.float32
                    assert "image" not in extra or torch.equal(extra["image"], original["image"])
            degrees |= taken[0]["degrees"].keys()
    assert degrees >= {1, nproc}


def read_shares(world: Any) -> dict[str, Any]:
    """A stream of 13 samples: who decodes what; resumed in the middle; evaluated whole."""
    from flexcp.integrations.transformers import enable

    model, data = tiny_model(), Images(LENGTHS, unlabelled=())
    found: dict[str, Any] = {}

    def fresh(stream: Any) -> Any:
        return make_engine(model, make_planner(world.size), stream, global_batch=BATCH)

    with enable(model):
        stream = Records(data, samples=13)
        with fresh(stream) as engine:
            found["unbroken"] = [one["samples"] for one in take_steps(engine, 99)]
            found["decoded"] = stream.decoded
        stream = Records(data, samples=13)
        with fresh(stream) as engine:
            engine.load_state_dict({**engine.state_dict(), "step": 1})
            found["resumed"] = [one["samples"] for one in take_steps(engine, 1)]
            found["again"] = [one["samples"] for one in take_steps(engine, 99)]
            found["decoded after resume"] = sorted(set(stream.decoded))
            found["evaluation"] = engine.evaluate(Records(data, samples=13))
        with fresh(Records(data, samples=0)) as engine:
            found["empty"] = take_steps(engine, 99)
    return found


class Seeing(torch.nn.Module):
    """A language model that adds what an encoder makes of an image, if there is one, to every token."""

    def __init__(self) -> None:
        super().__init__()
        self.language = tiny_model()
        torch.manual_seed(8)
        self.encoder = torch.nn.Linear(2, 32)

    def forward(self, input_ids: Any, images: Sequence[tuple[int, int, Any]], **inputs: Any) -> Any:
        """`images`: (first row, end, image)."""
        embedded = self.language.get_input_embeddings()(input_ids)
        for start, stop, image in images:
            seen = torch.zeros_like(embedded)
            seen[:, start:stop] = self.encoder(image.float()).sum(0)
            embedded = embedded + seen
        return self.language(inputs_embeds=embedded, **inputs).logits


def train_with_images(world: Any, steps: int, own_unit: bool) -> tuple[list[float], list[int]]:
    """FSDP2, the encoder in the root unit or one of its own; by step, the loss and this rank's images."""
    from flexcp.integrations.transformers import blocks_of, enable
    from flexcp.runtime.sharding import shard

    model: Any = Seeing()
    with enable(model.language):
        blocks = blocks_of(model.language) + [model.encoder] * own_unit
        model = shard(model, "fsdp2", blocks=blocks)
        losses, seen = [], []
        with make_engine(
            model, make_planner(world.size), Images(LENGTHS), global_batch=4, steps=steps
        ) as engine:
            for step in engine:
                images = 0
                for micro in step:
                    placed, row = [], 0
                    for piece in micro.pieces:
                        if "image" in micro.extras[piece.index]:
                            placed.append((row, row + piece.rows, micro.extras[piece.index]["image"]))
                        row += piece.rows
                    images += len(placed)
                    step.backward(model(images=placed, **micro.inputs), micro)
                losses.append(step.finish().loss)
                seen.append(images)
    return losses, seen


def train_alone_with_images(steps: int) -> list[float]:
    """One process, sample by sample."""
    model, data = Seeing(), Images(LENGTHS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        sums, count = [], 0
        for index in batch_indices(len(data), 4, 0, step):
            example = data[index]
            ids = torch.as_tensor(example["input_ids"])[None]
            images = [(0, ids.shape[1], example["image"])] if "image" in example else []
            targets = torch.as_tensor(example["labels"])[1:]
            logits = model(ids, images, use_cache=False)[0, :-1]
            sums.append(
                torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
            )
            count += int((targets != -100).sum())
        loss = torch.stack(sums).sum() / count
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def three_ranks(world: Any) -> dict[str, Any]:
    return {
        "shares": read_shares(world),
        "images": train_with_images(world, 20, own_unit=False),
        "images, own unit": train_with_images(world, 20, own_unit=True),
    }


@pytest.fixture(scope="module")
def by_three() -> list[dict[str, Any]]:
    return run_ranks(three_ranks, 3)


@pytest.mark.parametrize("case", ["images", "images, own unit"])
def test_ranks_without_an_image_train_beside_ranks_with_one(
    case: str, by_three: list[dict[str, Any]]
) -> None:
    """D34: 20 steps; the encoder runs on some ranks only, and what it learns is that of one process."""
    losses = [found[case][0] for found in by_three]
    seen = np.array([found[case][1] for found in by_three])

    assert losses[0] == losses[1] == losses[2]
    assert losses[0] == pytest.approx(train_alone_with_images(20), rel=1e-5)
    assert ((seen == 0).any(axis=0) & (seen > 0).any(axis=0)).sum() >= 5


def test_a_stream_is_decoded_once_and_resumed_where_it_was(by_three: list[dict[str, Any]]) -> None:
    """D59: rank r decodes i mod N = r; none twice, none missing, also in a last batch of three."""
    by_rank = [found["shares"] for found in by_three]
    batches = [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 12]]
    model, data = tiny_model(), Images(LENGTHS, unlabelled=())
    loss = reference_step(model, data, range(13))

    for rank, found in enumerate(by_rank):
        assert found["unbroken"] == batches
        assert found["resumed"] == batches[1:2]
        assert found["again"] == batches[2:]
        assert found["decoded"] == [i for batch in batches for i in batch if (i - batch[0]) % 3 == rank]
        assert min(found["decoded after resume"]) >= BATCH
        assert found["evaluation"] == pytest.approx(loss, rel=1e-5)
        assert found["empty"] == []


class TroubledRecords(Records):
    """Every way in which a stream can fail on one rank."""

    def __init__(self, how: str) -> None:
        super().__init__(Images(LENGTHS, unlabelled=()))
        self.how = how

    def name(self, index: int) -> str:
        return f"shard-0/{index}"

    def records(self, start: int) -> Iterator[int]:
        for record in super().records(start):
            if self.how == "records" and dist.get_rank() == 1 and record == 8:
                raise OSError("the disk is gone")
            if self.how == "ends early" and dist.get_rank() == 1 and record >= 6:
                return
            yield record

    def decode(self, record: int) -> dict[str, Any]:
        example = super().decode(record)
        if record == 6 and self.how == "decode":
            raise ValueError("not a picture")
        if record == 6 and self.how == "cannot travel":
            example["image"] = object()
        if record == 6 and self.how == "no tokens":
            example["input_ids"] = []
        if record == 6 and self.how == "labels":
            example["labels"] = example["labels"][1:]
        if record == 6 and self.how == "too long":
            example["input_ids"] = example["labels"] = np.zeros(400, dtype=int)
        return example


def two_ranks(world: Any) -> dict[str, Any]:
    """What several tests look at: two ranks need seconds to come up."""
    killed = {times: kill_the_planner(world, times) for times in (0, 1, 2)}
    late, talks = wait_for_plan_and_data(world), talks_of_threads(world)
    return {"streams": provoke(world), "killed": killed, "late": late, "talks": talks}


@pytest.fixture(scope="module")
def by_rank() -> list[dict[str, Any]]:
    return run_ranks(two_ranks, 2)


def provoke(world: Any) -> dict[str, tuple[list[int], str]]:
    """The steps that ran before, and the sentence."""
    model = tiny_model()
    found = {}
    for how in ("decode", "records", "cannot travel", "no tokens", "labels", "too long", "ends early"):
        steps: list[int] = []

        def run(steps: list[int] = steps, how: str = how) -> None:
            planner = make_planner(world.size, tokens_per_rank=96)
            with make_engine(model, planner, TroubledRecords(how), global_batch=BATCH, steps=3) as engine:
                for step in engine:
                    list(step)
                    engine._open_step = None
                    engine.next_step += 1
                    steps.append(step.index)

        text = said(run)
        found[how] = steps, text
    return found


def test_a_stream_that_one_rank_cannot_read_ends_all_with_one_sentence(by_rank: list[dict[str, Any]]) -> None:
    """Sample, rank and cause; the steps before it run."""
    first, second = (found["streams"] for found in by_rank)

    assert first == second
    for how, cause in {
        "decode": "DataError: rank 1 could not read shard-0/6: ValueError: not a picture (",
        "records": "DataError: rank 1 could not read shard-0/8: OSError: the disk is gone",
        "cannot travel": "DataError: rank 1 could not read shard-0/6: its 'image' is a object, which cannot",
        "no tokens": "DataError: rank 1 could not read shard-0/6: it has no tokens\nLeave such samples out",
        "labels": "DataError: rank 1 could not read shard-0/6: it has 23 tokens and 22 labels\nGive",
        "too long": "SampleTooLongError: sample 6 has 400 tokens; 2 ranks x 96 tokens hold 192\nIt fits on 5",
        "ends early": "DisagreementError: the stream ended on rank 1 and went on on another rank\n",
    }.items():
        steps, text = first[how]
        assert text.startswith(cause), text
        assert steps == [0]


def kill_the_planner(world: Any, times: int) -> tuple[list[int], str, list[str], list[float]]:
    """Train; on rank 0 the planner process is killed `times` times, once a step."""
    from flexcp.integrations.transformers import enable

    model, notices = tiny_model(), []
    done: list[int] = []
    losses: list[float] = []
    with enable(model):
        engine = make_engine(
            model,
            make_planner(world.size, tokens_per_rank=96),
            ListDataset(LENGTHS),
            global_batch=BATCH,
            steps=8,
            on_notice=notices.append,
        )

        def run() -> None:
            with engine:
                for step in engine:
                    for micro in step:
                        step.backward(model(**micro.inputs), micro)
                    losses.append(step.finish().loss)
                    done.append(step.index)
                    if world.rank == 0 and step.index < times:
                        os.kill(engine._feed._planning.process.pid, signal.SIGKILL)

        text = said(run)
    return done, text, notices, losses


def test_a_planner_that_dies_is_replaced_once_and_then_named(by_rank: list[dict[str, Any]]) -> None:
    """Once: the same losses as without, and a notice on rank 0. Twice: all ranks end with one sentence."""
    untouched, once, twice = ([found["killed"][times] for found in by_rank] for times in (0, 1, 2))

    for rank in (0, 1):
        assert untouched[rank][:3] == (list(range(8)), "nothing was raised", [])
        assert once[rank][:2] == untouched[rank][:2]
        assert once[rank][3] == untouched[rank][3]
        assert len(twice[rank][0]) < 8
        assert "was killed by SIGKILL, after it had been started again once" in twice[rank][1]
    assert twice[0][:2] == twice[1][:2]
    assert ["was started again" in text for text in once[0][2]] == [True]
    assert once[1][2] == []


class SlowPlanner:
    """A planner of the user's own that takes its time over the third batch."""

    def __init__(self, planner: Any) -> None:
        self.cluster = planner.cluster
        self._planner = planner
        self._plans = 0

    def __call__(self, samples: Any) -> Any:
        self._plans += 1
        time.sleep(1.5 if self._plans == 3 else 0.0)
        return self._planner(samples)


class SlowData(ListDataset):
    """Its sample 4 takes its time."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(1.5 if index == 4 else 0.0)
        return super().__getitem__(index)


def wait_for_plan_and_data(world: Any) -> dict[str, Any]:
    """Steps take no time, so whatever is slow is waited for."""
    from flexcp.integrations.transformers import enable
    from flexcp.runtime import feed

    feed._LATE_S = 0.4
    model = tiny_model()
    found: dict[str, Any] = {}
    for what in ("plan", "data"):
        notices: list[str] = []
        planner = make_planner(world.size, tokens_per_rank=96)
        reports = []
        engine = make_engine(
            model,
            SlowPlanner(planner) if what == "plan" else planner,
            (SlowData if what == "data" else ListDataset)([150] * 6, unlabelled=()),
            global_batch=2,
            steps=3,
            on_notice=notices.append,
        )
        with enable(model), engine:
            for step in engine:
                for micro in step:
                    step.backward(model(**micro.inputs), micro)
                reports.append(step.finish())
            order = [batch_indices(6, 2, 0, step).tolist() for step in range(3)]
        found[what] = notices, reports
        found["step of sample 4"] = next(step for step, batch in enumerate(order) if 4 in batch)
    return found


def test_a_late_plan_is_waited_for_with_a_notice(by_rank: list[dict[str, Any]]) -> None:
    """The notice is rank 0's and says what is late; the wait is the same number on all ranks."""
    first, second = (found["late"] for found in by_rank)
    slow_step = first["step of sample 4"]

    for what, late in (("plan", 2), ("data", slow_step)):
        notices, reports = first[what]
        said_of_late = [
            text for text in notices if text.startswith(f"step {late} has waited 0.4 s for its {what}")
        ]
        assert len(said_of_late) == 1, notices
        assert second[what][0] == []
        for name in ("exposed_s", "plan_wait_s", "data_wait_s"):
            assert [getattr(r, name) for r in reports] == [getattr(r, name) for r in second[what][1]]
        waits = {"plan": reports[late].plan_wait_s, "data": reports[late].data_wait_s}
        assert waits[what] > 0.4
        assert reports[late].exposed_s >= waits[what]


def talks_of_threads(world: Any) -> set[tuple[str, str, bool]]:
    """While a stream is read: what is called, by which thread, and whether over the group of the feed."""
    talks: set[tuple[str, str, bool]] = set()
    planner, stream = make_planner(world.size, tokens_per_rank=96), open_data("stream")
    calls = {name: getattr(dist, name) for name in ("all_gather", "broadcast", "all_to_all_single")}

    def noted(name: str, *values: Any, group: Any = None) -> Any:
        talks.add((name, threading.current_thread().name, group is engine._feed.group))
        return calls[name](*values, group=group)

    engine = make_engine(tiny_model(), planner, stream, global_batch=BATCH)
    with pytest.MonkeyPatch.context() as patch, engine:
        for name in calls:
            patch.setattr(dist, name, partial(noted, name))
        take_steps(engine, 2)
    return talks


def test_the_background_talks_over_a_group_of_its_own(by_rank: list[dict[str, Any]]) -> None:
    """Else its messages could meet those of the step, which another rank may have come to earlier."""
    for found in by_rank:
        feed = {(name, "flexcp-feed_0", True) for name in ("all_gather", "broadcast", "all_to_all_single")}
        assert found["talks"] == {*feed, ("all_gather", "MainThread", False)}


def devices_of_the_thread(world: Any) -> list[tuple[torch.device, str]]:
    """Devices that threads chose, and which threads."""
    from flexcp.runtime import feed as module
    from flexcp.runtime.transport import Transport

    chosen: list[tuple[torch.device, str]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            module.torch.accelerator,
            "set_device_index",
            lambda device: chosen.append((device, threading.current_thread().name)),
        )
        for device in (torch.device("cpu"), torch.device("cuda", 3)):
            feed = module.Feed(make_planner(1), Transport(), device, print, 30.0)
            feed.submit(lambda: None).result()
            feed.close()
    return chosen


def test_the_background_stays_on_the_device_of_its_rank() -> None:
    """A new thread is on the first device, where data sets that use one would allocate for all ranks."""
    assert run_ranks(devices_of_the_thread, 1) == [[(torch.device("cuda", 3), "flexcp-feed_0")]]
