"""Starting ranks and ending them: what comes back, who is blamed, and how soon."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flexcp.attention import Message
from flexcp.core.errors import (
    ConfigError,
    DataError,
    RankFailedError,
    SampleTooLongError,
)
from flexcp.runtime import launch as launch_module
from flexcp.runtime.collectives import on_first_rank, peers_in_reach, ranks_of_a_node
from flexcp.runtime.launch import launch, under_torchrun
from flexcp.runtime.rank_process import RankProcess
from flexcp.runtime.rendezvous import store_of_this_start
from flexcp.runtime.transport import Transport


def square(world: Any, power: int) -> dict[str, Any]:
    total = torch.tensor(world.rank)
    dist.all_reduce(total)
    return {"rank": world.rank, "tensor": torch.full((3,), float(world.rank) ** power), "sum": int(total)}


def on_machines_of_two_sizes(world: Any) -> int:
    """Rank 0 has one of 3 ranks, rank 1 one of 2."""
    return ranks_of_a_node(3 - world.rank)


def test_all_ranks_count_those_of_the_largest_machine() -> None:
    assert launch(on_machines_of_two_sizes, 2, deadline_s=60) == [3, 3]


def test_what_each_rank_returned_comes_back_in_order() -> None:
    results = launch(square, 3, (2,), deadline_s=60)

    assert [result["rank"] for result in results] == [0, 1, 2]
    assert [result["sum"] for result in results] == [3, 3, 3]
    assert torch.equal(results[2]["tensor"], torch.full((3,), 4.0))
    assert not dist.is_initialized()
    assert not under_torchrun()


@pytest.mark.parametrize("nproc", [100_000, 0, -1])
def test_a_number_of_ranks_that_makes_no_sense_is_refused(nproc: int) -> None:
    """A typing error must not fill the memory with interpreters, nor pass for a run that is done."""
    with pytest.raises(ConfigError, match=f"^{nproc} ranks on one machine of .*\nStart 1 to "):
        launch(square, nproc)


def divide_by_zero(world: Any) -> None:
    print("about to divide")
    if world.rank == 1:
        1 // 0  # noqa: B018
    dist.barrier()


def test_a_rank_that_raises_is_named_with_its_trace(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError) as caught:
        launch(divide_by_zero, 2, deadline_s=60, log_dir=tmp_path)
    text = str(caught.value)

    assert text.startswith("rank 1 on ")
    assert "ZeroDivisionError" in text
    assert "in divide_by_zero" in text
    assert text.endswith(f"Its output is in {tmp_path}.")
    assert "about to divide" in (tmp_path / "rank-1.log").read_text()
    assert "ZeroDivisionError" in (tmp_path / "rank-1.log").read_text()


def run_out_of_memory(world: Any) -> None:
    raise MemoryError("no room for 8 bytes")


def test_a_rank_without_memory_is_told_what_to_change() -> None:
    with pytest.raises(
        RankFailedError, match=r"rank 0 on .* ran out of memory: MemoryError: no room"
    ) as caught:
        launch(run_out_of_memory, 1, deadline_s=60)

    assert caught.value.remedy.startswith("Lower parallel.tokens_per_rank")


def raise_ours(world: Any) -> None:
    raise SampleTooLongError(3, 100, 10, world.size)


def test_an_error_of_ours_comes_through_as_itself() -> None:
    with pytest.raises(
        SampleTooLongError, match="sample 3 has 100 tokens; 2 ranks x 10 tokens hold 20"
    ) as caught:
        launch(raise_ours, 2, deadline_s=60)

    assert caught.value.ranks_needed == 10
    assert caught.value.remedy.startswith("It fits on 10 ranks")


def lose_the_last_rank(world: Any) -> None:
    """Ranks 0 and 1 are left waiting: one with a raw collective, one in a ring."""
    exchange = Transport().exchange(range(world.size))
    if world.rank == 2:
        raise ConfigError("the root of it all", "Mend it.")
    if world.rank == 1:
        exchange.post([], [(Message.zeros((1,), torch.float32, torch.device("cpu")), 2)]).wait()
    dist.all_reduce(torch.zeros(1))


def test_the_root_cause_wins_over_lost_peers(tmp_path: Path) -> None:
    """Ranks 0 and 1 fail as well, because rank 2 is gone; it is rank 2 that is heard."""
    with pytest.raises(ConfigError, match="the root of it all"):
        launch(lose_the_last_rank, 3, deadline_s=60, timeout_s=20, log_dir=tmp_path)

    assert "Connection closed by peer" in (tmp_path / "rank-0.log").read_text()
    assert "an exchange among ranks [0, 1, 2] failed" in (tmp_path / "rank-1.log").read_text()


def lose_a_peer_in_silence(world: Any) -> None:
    """Rank 1 leaves with exit code 0 and without a word."""
    if world.rank == 1:
        os._exit(0)
    with peers_in_reach("the gradient reduction"):
        dist.all_reduce(torch.zeros(1))


def test_a_rank_that_leaves_with_exit_code_0_is_missed() -> None:
    with pytest.raises(RankFailedError, match=r"rank 1 on .* exited with code 0") as caught:
        launch(lose_a_peer_in_silence, 2, deadline_s=60)

    assert caught.value.remedy == "Its output is above."


def return_early_on_one(world: Any) -> None:
    if world.rank == 0:
        with peers_in_reach("the gradient reduction"):
            dist.all_reduce(torch.zeros(1))


def test_a_rank_that_returns_before_the_others_is_named() -> None:
    """Nothing failed in it, so only the launcher knows that it is why the others did."""
    with pytest.raises(
        RankFailedError, match=r"^ranks \[1\] had returned while others .*; rank 0: "
    ) as caught:
        launch(return_early_on_one, 2, deadline_s=60)

    assert "a break or return that only some" in caught.value.remedy


def sleep_on_one(world: Any) -> str:
    if world.rank == 1:
        time.sleep(600)
    return "done"


def test_a_deadline_ends_a_rank_that_sleeps_and_names_it() -> None:
    started_s = time.monotonic()
    with pytest.raises(RankFailedError, match=r"ranks \[1\] had not finished after 20 s and were ended"):
        launch(sleep_on_one, 2, deadline_s=20)

    assert time.monotonic() - started_s < 40


def die(world: Any, how: str) -> None:
    if world.rank == world.size - 1:
        os._exit(3) if how == "exit" else os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


@pytest.mark.parametrize(
    ("how", "nproc", "words"),
    [("exit", 1, "rank 0 on .* exited with code 3"), ("kill", 2, "rank 1 on .* was killed by SIGKILL")],
)
def test_a_rank_that_dies_silently_is_named(how: str, nproc: int, words: str) -> None:
    """And the others are ended at once, though they would sleep for long."""
    started_s = time.monotonic()
    with pytest.raises(RankFailedError, match=f"^{words}\n.*Its output is above.$"):
        launch(die, nproc, (how,), deadline_s=60)

    assert time.monotonic() - started_s < 40


def interrupt_oneself(world: Any) -> str:
    os.kill(os.getpid(), signal.SIGINT)
    return "deaf"


def test_an_interrupt_is_the_launchers_alone() -> None:
    """Ctrl-C reaches every process of a terminal; a rank that heard it would print a trace of its own."""
    assert launch(interrupt_oneself, 2, deadline_s=60) == ["deaf", "deaf"]


def test_an_interrupt_while_ranks_start_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that has just been started would wait for the others, and the launcher's exit for it."""
    start = RankProcess.start

    def start_and_interrupt(rank: RankProcess) -> None:
        start(rank)
        raise KeyboardInterrupt

    monkeypatch.setattr(RankProcess, "start", start_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        launch(interrupt_oneself, 2)

    assert multiprocessing.active_children() == []


def test_ranks_share_a_device_only_when_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """One device, two local ranks."""
    chosen: list[int] = []
    for name, answer in {
        "is_available": True,
        "current_accelerator": torch.device("cuda"),
        "device_count": 1,
    }.items():
        monkeypatch.setattr(torch.accelerator, name, lambda answer=answer: answer)
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)

    assert launch_module._device(1, share_devices=True) == torch.device("cuda", 0)
    assert launch_module._device(0, share_devices=False) == torch.device("cuda", 0)
    assert chosen == [0, 0]
    with pytest.raises(ConfigError, match="local rank 1 has no device of its own; this machine has 1"):
        launch_module._device(1, share_devices=False)


@pytest.mark.parametrize(
    ("kind", "share", "backend", "bound", "device"),
    [
        ("cuda", False, "nccl", "cuda:0", "cuda:0"),
        ("cuda", True, "gloo", None, "cuda:0"),
        ("xpu", False, "xccl", None, "xpu:0"),  # no gloo group can be made beside one bound to such a device
        ("mps", False, "gloo", None, "cpu"),  # ranks of a Mac cannot talk on its GPU
    ],
)
def test_the_backend_is_that_of_the_device(
    kind: str,
    share: bool,
    backend: str,
    bound: str | None,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """NCCL alone is told its device, and connects at once."""
    asked: list[Any] = []
    for name, answer in {
        "is_available": True,
        "current_accelerator": torch.device(kind),
        "device_count": 1,
    }.items():
        monkeypatch.setattr(torch.accelerator, name, lambda answer=answer: answer)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    monkeypatch.setattr(dist, "init_process_group", lambda name, **options: asked.append((name, options)))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)

    with launch_module.joined_world(rendezvous=tmp_path / "store", share_devices=share) as world:
        [(name, options)] = asked
    assert (name, str(world.device)) == (backend, device)
    assert (options["device_id"] and str(options["device_id"])) == bound


def first_rank_work(world: Any) -> list[str]:
    said = [str(on_first_rank(lambda: f"from rank {world.rank}", "a test"))]
    cases = [DataError("no sample", "Look."), ValueError("odd"), DataError("é" * 5000, "Ü" * 5000)]
    for error in cases:
        try:
            on_first_rank(lambda error=error: _throw(error), "a test")
            said.append("nothing was raised")
        except Exception as caught:
            said.append(f"{type(caught).__name__}: {caught}"[:60])
    return said


def _throw(error: Exception) -> None:
    raise error


def test_all_ranks_hear_what_stopped_the_first() -> None:
    """Work on rank 0 alone: its result stays there, its error reaches all, however long its text."""
    first, second = launch(first_rank_work, 2, deadline_s=60)

    assert (first[0], second[0]) == ("from rank 0", "None")
    assert (first[1], second[1]) == ("DataError: no sample\nLook.", "DataError: no sample\nLook.")
    assert (first[2], second[2]) == ("RunError: ValueError: odd", "RunError: ValueError: odd")
    assert first[3].startswith("DataError: ééé")
    assert second[3].startswith("DataError: ééé")


def start_ranks(store: dist.Store, size: int) -> list[dist.Store]:
    """What all ranks of one start, as threads, agree on."""
    with ThreadPoolExecutor(size) as pool:
        ranks = [pool.submit(store_of_this_start, store, rank, size, 20.0) for rank in range(size)]
        return [rank.result() for rank in ranks]


def test_a_start_does_not_read_what_an_earlier_one_left() -> None:
    """torchrun keeps its store over restarts: three ranks, two of them again, and the three once more."""
    shared = dist.HashStore()
    starts = []
    for size in (3, 2, 3):
        stores = start_ranks(shared, size)
        assert not stores[-1].check(["address"])
        stores[0].set("address", str(size))
        assert [store.get("address") for store in stores] == [str(size).encode()] * size
        starts.append(stores[0])

    assert [store.get("address") for store in starts] == [b"3", b"2", b"3"]


def test_a_rank_that_comes_first_waits_for_rank_0_of_its_own_start() -> None:
    """What rank 0 of an earlier start has said is still there."""
    shared = dist.HashStore()
    start_ranks(shared, 2)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(store_of_this_start, shared, 1, 2, 20.0)
        time.sleep(0.3)
        assert not first.done()
        store_of_this_start(shared, 0, 2, 20.0).set("address", "here")
        assert first.result().get("address") == b"here"


def test_a_start_that_a_rank_never_comes_to_ends_with_a_sentence() -> None:
    with pytest.raises(RankFailedError, match="not all ranks came to the start"):
        store_of_this_start(dist.HashStore(), 0, 2, timeout_s=0.2)
    with pytest.raises(RankFailedError, match="not all ranks came to the start"):
        store_of_this_start(dist.HashStore(), 1, 2, timeout_s=0.2)
