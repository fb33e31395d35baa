"""Nodes lost under torchrun: the agents that are left meet anew, and the run goes on with fewer ranks."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_training import is_running, losses, write_toml

WAIT_S = 240.0  # for what takes seconds on a machine of one's own
STEPS = 40


@contextmanager
def nodes(count: int, least: int, kind: str, program: Sequence[str], folder: Path) -> Iterator[Any]:
    """Agents of torchrun, one rank each, as if each had a machine of its own; none outlives the block.

    They meet in a file on the disk that all share, or in a store that the first of them holds.
    """
    port = free_port()
    patience = "join_timeout=200,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=6"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    meet = [f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-conf={patience}"]
    if kind == "file":
        meet = [f"--rdzv-endpoint={folder / 'meet'}", f"--rdzv-conf=store_type=file,{patience}"]
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={least}:{count}"]
    command += ["--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=run", *meet]
    agents = []
    try:
        for index in range(count):
            with (folder / f"agent-{index}.log").open("w") as log:
                process = subprocess.Popen(
                    [*command, "--local-addr=127.0.0.1", *program],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                )
            agents.append(process)
            if kind == "tcp":
                wait_until_open(port)
        yield agents
    finally:
        for agent in agents:
            lose(agent)


def workers_of(agent: subprocess.Popen[Any]) -> list[int]:
    """Process ids of its ranks."""
    try:
        text = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text()
    except OSError:
        return []
    return [int(pid) for pid in text.split() if is_running(int(pid))]


def lose(agent: subprocess.Popen[Any]) -> None:
    """A machine that fails takes agent and ranks with it; nobody says a word."""
    workers = workers_of(agent)
    agent.kill()
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    agent.wait()


def rank_of(pid: int) -> int:
    """What torchrun told this process in its environment."""
    pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next(int(pair[5:]) for pair in pairs if pair.startswith(b"RANK="))


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def wait_until_open(port: int) -> None:
    """The first agent holds the store, so it must be the first to look for it."""
    end_s = time.monotonic() + WAIT_S
    while True:
        with socket.socket() as sock:
            if sock.connect_ex(("127.0.0.1", port)) == 0:
                return
        assert time.monotonic() < end_s, "nobody opened the store"
        time.sleep(0.1)


def wait_for(steps: int, agents: Sequence[subprocess.Popen[Any]], folder: Path) -> None:
    """Until so many steps are done."""
    end_s = time.monotonic() + WAIT_S
    metrics = folder / "run" / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count('"step":') >= steps):
        ended = [index for index, agent in enumerate(agents) if agent.poll() is not None]
        assert not ended, (folder / f"agent-{ended[0]}.log").read_text()[-4000:]
        assert time.monotonic() < end_s, (folder / "agent-0.log").read_text()[-4000:]
        time.sleep(0.2)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["file", pytest.param("tcp", marks=pytest.mark.slow)])
def test_torchrun_goes_on_with_one_rank_fewer(tmp_path: Path, kind: str) -> None:
    """One of three nodes is killed; the other two continue from the newest checkpoint to the last step.

    The lost node is that of rank 0 where the store is a file.
    """
    config = write_toml(
        tmp_path,
        run__steps=STEPS,
        run__checkpoint_every=2,
        parallel__tokens_per_rank=700,
        data__max_tokens=1_200,
        data__eval_samples=0,
    )
    program = ["-m", "flexcp", "train", str(config), "--quiet", "--elastic"]
    with nodes(3, 2, kind, program, tmp_path) as agents:
        wait_for(4, agents, tmp_path)
        ranks = {rank_of(workers_of(agent)[0]): agent for agent in agents}
        rank_of_first = next(rank for rank, agent in ranks.items() if agent is agents[0])
        # Where the first agent holds the store, neither it nor that of rank 0 can be lost.
        lost = 0 if kind == "file" else max(set(ranks) - {0, rank_of_first})
        lose(ranks.pop(lost))
        for agent in ranks.values():
            agent.wait(timeout=WAIT_S)

    text = "\n".join(path.read_text() for path in sorted(tmp_path.glob("agent-*.log")))
    assert [agent.returncode for agent in ranks.values()] == [0, 0], text
    assert sorted(losses(tmp_path / "run")) == list(range(STEPS))
    attempts = sorted((tmp_path / "run" / "trace").iterdir())
    assert [len(list(path.glob("rank-*"))) for path in attempts] == [3, 2]
    assert attempts[1].name > "from-step-00000000"
    assert "lost another rank during" in text or "an exchange among ranks" in text
