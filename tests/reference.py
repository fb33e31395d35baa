"""What attention is tested against: dense fp64 softmax over a pack, and a group of threads in one process.

Nothing here uses the tiles, the merge or the ring; only `Layout` is shared with the code under test.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from flexcp.attention import Buffers, Message, group_attention
from flexcp.attention.kernels import Kernel
from flexcp.core.layout import Layout
from flexcp.core.plan import ExchangeKind
from flexcp.core.sample import Sample

DEADLINE_S = 60.0
T = TypeVar("T")


def dense_mask(samples: Sequence[Sample], window: int | None = None) -> Tensor:
    """Who attends to whom in a whole pack, [T, T] of bool, from the definition of a Sample alone.

    A window hides from a row what lies `window` rows and more before it, in a span or not.
    """
    total = sum(sample.tokens for sample in samples)
    mask = torch.zeros(total, total, dtype=torch.bool)
    first = 0
    for sample in samples:
        block = mask[first : first + sample.tokens, first : first + sample.tokens]
        block |= torch.ones_like(block).tril()
        for a, b in sample.spans:
            block[a:b, a:b] = True
        if window is not None:
            block &= torch.ones_like(block).triu(1 - window)
        first += sample.tokens
    return mask


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    samples: Sequence[Sample],
    scale: float | None = None,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output [T, Hq, D] and log-sum-exp [T, Hq] of a whole pack in fp64, differentiable.

    Sinks are written as one more column of the scores.
    """
    q, k, v = q.double(), k.double(), v.double()
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~dense_mask(samples, window), float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, len(q), 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : len(q)]
    out = torch.einsum("hqk,khd->qhd", weights, v)
    return out, torch.logsumexp(scores, dim=-1).T


def rows_of(layout: Layout, member: int) -> Tensor:
    """Rows of the pack (samples end to end) that `member` holds, in local order."""
    firsts = [0]
    for sample in layout.samples:
        firsts.append(firsts[-1] + sample.tokens)
    ranges = [
        torch.arange(firsts[p.index] + p.start, firsts[p.index] + p.stop) for p in layout.pieces(member)
    ]
    return torch.cat([torch.arange(0), *ranges])


def scatter(x: Tensor, layout: Layout) -> list[Tensor]:
    """What every member holds of a full tensor [T, ...]."""
    return [x[rows_of(layout, member)] for member in range(layout.degree)]


def gather(parts: Sequence[Tensor], layout: Layout) -> Tensor:
    """The full tensor again."""
    rows = torch.cat([rows_of(layout, member) for member in range(layout.degree)])
    whole = parts[0].new_empty(len(rows), *parts[0].shape[1:])
    whole[rows] = torch.cat(list(parts))
    return whole


@dataclass
class _Slot:
    """The k-th message of a lane from one member to another."""

    message: Message | None = None
    filled: threading.Event = field(default_factory=threading.Event)
    taken: threading.Event = field(default_factory=threading.Event)


class ThreadGroup:
    """Members that are threads; a send ends only when it is received, and nothing waits for ever."""

    def __init__(self, degree: int) -> None:
        self.degree = degree
        self.failed = threading.Event()
        self._lock = threading.Lock()
        self._slots: dict[tuple[int, int, int, int], _Slot] = {}

    def slot(self, source: int, target: int, lane: int, count: int) -> _Slot:
        with self._lock:
            return self._slots.setdefault((source, target, lane, count), _Slot())

    def wait(self, event: threading.Event) -> None:
        waited_s = 0.0
        while not event.wait(0.05):
            waited_s += 0.05
            if self.failed.is_set() or waited_s > DEADLINE_S:
                raise TimeoutError("a message did not come, or another member failed")


class ThreadExchange:
    """One member of a ThreadGroup: keeps the rules of `Exchange`, and checks that the ring keeps them.

    Attributes:
        sent_bytes: bytes posted so far.
        in_flight: messages posted and not waited for.
        most_messages: of one post.
    """

    def __init__(self, group: ThreadGroup, member: int, kind: ExchangeKind = "ring") -> None:
        self.member = member
        self.degree = group.degree
        self.kind: ExchangeKind = kind
        self.buffers = Buffers()
        self.most_messages = 0
        self.sent_bytes = 0
        self.in_flight = 0
        self._group = group
        self._sent: Counter[tuple[int, int]] = Counter()
        self._received: Counter[tuple[int, int]] = Counter()

    def post(
        self,
        sends: Sequence[tuple[Message, int]],
        receives: Sequence[tuple[Message, int]],
        lane: int = 0,
    ) -> _ThreadPending:
        assert sends or receives
        self.most_messages = max(self.most_messages, len(sends) + len(receives))
        outgoing, incoming = [], []
        for message, target in sends:
            assert message.whole.is_contiguous()
            assert message.payload.numel()
            assert target != self.member
            slot = self._group.slot(self.member, target, lane, self._sent[lane, target])
            self._sent[lane, target] += 1
            self.sent_bytes += message.payload_bytes
            slot.message = message
            slot.filled.set()
            outgoing.append((message, message.payload.clone(), slot))
        for message, source in receives:
            assert message.whole.is_contiguous()
            assert message.payload.numel()
            slot = self._group.slot(source, self.member, lane, self._received[lane, source])
            incoming.append((message, slot))
            self._received[lane, source] += 1
            message.payload.fill_(float("nan"))  # whoever reads too early shall notice
        self.in_flight += 1
        return _ThreadPending(self, self._group, outgoing, incoming)


class _ThreadPending:
    def __init__(
        self,
        exchange: ThreadExchange,
        group: ThreadGroup,
        outgoing: list[tuple[Message, Tensor, _Slot]],
        incoming: list[tuple[Message, _Slot]],
    ) -> None:
        self._exchange, self._group, self._outgoing, self._incoming = exchange, group, outgoing, incoming

    def wait(self) -> None:
        for message, slot in self._incoming:
            self._group.wait(slot.filled)
            assert slot.message is not None
            assert slot.message.payload.shape == message.payload.shape
            assert slot.message.payload.dtype == message.payload.dtype
            message.payload.copy_(slot.message.payload)
            slot.taken.set()
        for message, posted, slot in self._outgoing:
            self._group.wait(slot.taken)
            assert torch.equal(message.payload, posted), "a buffer changed while it was being sent"
        self._exchange.in_flight -= 1


def run_members(degree: int, work: Callable[[ThreadExchange], T], kind: ExchangeKind = "ring") -> list[T]:
    """Run `work` once per member, each in a thread of its own; the first failure is raised."""
    group = ThreadGroup(degree)
    results: dict[int, T] = {}
    failures: list[Exception] = []

    def member(index: int) -> None:
        torch.set_num_threads(1)
        exchange = ThreadExchange(group, index, kind)
        try:
            results[index] = work(exchange)
            assert exchange.in_flight == 0
        except Exception as failure:
            failures.append(failure)
            group.failed.set()

    threads = [threading.Thread(target=member, args=(index,), daemon=True) for index in range(degree)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [results[index] for index in range(degree)]


@dataclass(frozen=True)
class Attended:
    """Full tensors gathered from all members, and what each of them sent."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    forward_bytes: tuple[int, ...] = ()
    backward_bytes: tuple[int, ...] = ()

    def errors(self, expected: Attended) -> dict[str, float]:
        """Largest difference over the largest value expected, per tensor."""
        pairs = {name: (getattr(self, name), getattr(expected, name)) for name in ("out", "dq", "dk", "dv")}
        return {name: relative_error(got, want) for name, (got, want) in pairs.items()}


def relative_error(got: Tensor, want: Tensor) -> float:
    """Largest difference over the largest value expected; NaN stays NaN, and no bound lets it pass."""
    return float((got.double() - want).abs().max() / want.abs().max())


def relative_norm_error(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm expected: steady where the largest of many is luck."""
    return float((got.double() - want).norm() / want.norm())


def attend_densely(q: Tensor, k: Tensor, v: Tensor, do: Tensor, samples: Sequence[Sample]) -> Attended:
    """The reference, in fp64 from the very values given."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out, _ = dense_attention(*leaves, samples)
    return Attended(out.detach(), *torch.autograd.grad(out, leaves, do.double()))


def attend_in_group(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    layout: Layout,
    kernel: Kernel | None = None,
    kind: ExchangeKind = "ring",
    stored: Callable[[Tensor], Tensor] = torch.clone,
) -> Attended:
    """Scatter, run every member forward and backward by one exchange, gather.

    `stored` gives a shard of its own memory, in the layout that a model would hand over.
    """
    shards = [scatter(x, layout) for x in (q, k, v, do)]

    def work(exchange: ThreadExchange) -> tuple[Tensor, ...]:
        *inputs, grad = (parts[exchange.member] for parts in shards)
        leaves = [stored(x).requires_grad_() for x in inputs]
        out = group_attention(*leaves, layout, exchange, kernel=kernel)
        forward = exchange.sent_bytes
        grads = torch.autograd.grad(out, leaves, stored(grad))
        sent = torch.tensor([forward, exchange.sent_bytes - forward])
        return (out.detach(), *grads, sent)

    *tensors, sent = zip(*run_members(layout.degree, work, kind), strict=True)
    bytes_sent = torch.stack(sent).T.tolist()
    return Attended(*(gather(parts, layout) for parts in tensors), *(tuple(row) for row in bytes_sent))


def random_qkv(
    rows: int,
    heads: int = 2,
    kv_heads: int = 2,
    width: int = 8,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normal q [rows, heads, width], k and v [rows, kv_heads, width], and an output gradient like q."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(rows, n, width) for n in (heads, kv_heads, kv_heads, heads)]
    q, k, v, do = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return q, k, v, do
