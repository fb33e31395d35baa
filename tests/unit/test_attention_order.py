"""What no result shows: that messages travel while tiles are computed, and that sums are kept in fp32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tests.reference import ThreadExchange, attend_densely, attend_in_group, random_qkv, run_members, scatter
from torch import Tensor

from flexcp.attention import Message, Pending, group_attention
from flexcp.attention.exchange import BACK, FORTH
from flexcp.attention.kernels import DenseKernel
from flexcp.core.layout import make_layout
from flexcp.core.sample import Sample, samples_from_lengths


class WideKernel(DenseKernel):
    """Exact tiles: fp64 inside, and nothing is rounded on the way out."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        return super().forward(q.double(), k.double(), v.double(), causal, scale)

    def backward(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        tensors = (x.double() for x in (do, q, k, v, out, lse))
        return super().backward(*tensors, causal, scale)


def test_only_the_last_rounding_is_to_bf16() -> None:
    """D39: with exact tiles, merge and gradient lanes return what fp64 rounds to, at any degree.

    dq and dk are left out: they rest on `out`, which is rounded by then.
    """
    samples = samples_from_lengths([300, 133])
    tensors = random_qkv(433, 2, 1, 32, torch.bfloat16)
    want = attend_densely(*tensors, samples)
    for degree in (1, 2, 3, 5, 8):
        got = attend_in_group(*tensors, make_layout(samples, degree, 0), WideKernel())
        for name in ("out", "dv"):
            rounded = getattr(want, name).bfloat16()
            assert (getattr(got, name) == rounded).double().mean() >= 0.999, (degree, name)


class _Logged:
    def __init__(self, pending: Pending, name: str, events: list[str]) -> None:
        self._pending, self._name, self._events = pending, name, events

    def wait(self) -> None:
        self._events.append(f"wait {self._name}")
        self._pending.wait()


class LoggedExchange:
    """Writes down what is posted and waited for; K and V are bf16 here, their gradients fp32."""

    def __init__(self, exchange: ThreadExchange, events: list[str]) -> None:
        self.member, self.degree, self.kind = exchange.member, exchange.degree, exchange.kind
        self.buffers = exchange.buffers
        self._exchange, self._events = exchange, events

    def post(
        self,
        sends: Sequence[tuple[Message, int]],
        receives: Sequence[tuple[Message, int]],
        lane: int = FORTH,
    ) -> Pending:
        name = "kv" if sends[0][0].payload.dtype == torch.bfloat16 else "dkv"
        assert lane == (FORTH if name == "kv" else BACK)
        self._events.append(f"post {name}")
        return _Logged(self._exchange.post(sends, receives, lane), name, self._events)


class LoggedKernel(WideKernel):
    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self._events = events

    def forward(self, *args: Tensor) -> tuple[Tensor, Tensor]:
        self._events.append("tile")
        return super().forward(*args)

    def backward(self, *args: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self._events.append("tile")
        return super().backward(*args)


def test_messages_travel_while_tiles_are_computed() -> None:
    """The next block is asked for before a tile, and a gradient is waited for one tile after it was sent.

    All members post in the same order: between two of them there are no tags to tell messages apart.
    """
    layout = make_layout((Sample(0, 30),), 3, 0)
    shards = [scatter(x, layout) for x in random_qkv(30, dtype=torch.bfloat16)]

    def work(exchange: ThreadExchange) -> tuple[list[str], list[str]]:
        events: list[str] = []
        *inputs, do = (parts[exchange.member].requires_grad_() for parts in shards)
        logged = LoggedExchange(exchange, events)
        out = group_attention(*inputs, layout, logged, kernel=LoggedKernel(events))
        forward = events.copy()
        out.backward(do.detach())
        return forward, events[len(forward) :]

    step = ["post kv", "tile", "wait kv"]
    lane = ["wait dkv", "post dkv"]
    for forward, backward in run_members(3, work):
        assert forward == [*step, *step, "tile"]
        second = ["post kv", "tile", "post dkv", "wait kv"]
        own = ["tile", "tile"]  # what is left of it while the last gradient comes home
        assert backward == [*step, *second, "tile", *lane, *own, "wait dkv"]
