"""An emulated accelerator: work and messages take the cost model's time by sleeping, the rest is real.

One layer of heads of width 1 stands for all layers of a model: it is called, cut and sent as a real layer is,
and its messages really travel, `layers x head_dim` times smaller than those it stands for. What sleeps is the
arithmetic of a tile (by its pairs), the linear work (by its rows) and the links (by the bytes stood for).
"""

from __future__ import annotations

import time

import torch
from torch import nn

from flexcp.attention import group_attention
from flexcp.cost.flops import ATTENTION_BACKWARD, MATMUL_BACKWARD

_BLOCKED_S = 1e-3  # a message that takes longer was waited for


class Device:
    """The clock of one emulated accelerator: a queue of work that the host waits for by sleeping.

    Attributes:
        late_s: how much later than asked the host woke up; made up for by the sleeps that follow, so that the
            operating system's timer is not measured. What the host itself takes is never made up for.
    """

    def __init__(self):
        self.late_s = 0.0
        self._until_s = 0.0

    @property
    def now_s(self):
        """The time that it would be had every sleep ended in time."""
        return time.perf_counter() - self.late_s

    def run(self, seconds):
        """Queue work."""
        self._until_s = max(self._until_s, self.now_s) + seconds

    def sync(self):
        """Wait for the work."""
        self.reach(self._until_s)

    def reach(self, time_s):
        """Sleep until then."""
        if time_s > self.now_s:
            time.sleep(max(0.0, time_s - time.perf_counter()))
            self.late_s = max(0.0, time.perf_counter() - time_s)

    def block(self, wait):
        """Wait for another rank; lateness that fell into the wait is forgotten, not made up for."""
        begun_s = time.perf_counter()
        wait()
        if time.perf_counter() - begun_s > _BLOCKED_S:
            self.late_s = 0.0


class Links:
    """A real exchange whose messages arrive no sooner than the emulated links would let them.

    The bytes of all messages of a rank follow each other; both directions at once.
    """

    def __init__(self, exchange, ranks, machine):
        self.member, self.degree = exchange.member, exchange.degree
        self.kind, self.buffers = exchange.kind, exchange.buffers
        self._exchange, self._ranks, self._machine = exchange, ranks, machine

    def post(self, sends, receives, lane=0):
        """See `attention.exchange.Exchange.post`."""
        machine, device = self._machine, self._machine.device
        device.sync()
        pending = self._exchange.post(sends, receives, lane)
        due_s = max(machine.link_free_s, device.now_s)
        due_s += max(self._seconds(sends), self._seconds(receives))
        machine.link_free_s = due_s
        return Arriving(pending, due_s + self._latency_s(sends + receives), device)

    def _seconds(self, messages):
        return sum(self._stood_for(message) / self._link(peer).bytes_per_s for message, peer in messages)

    def _stood_for(self, message):
        return message.payload_bytes * self._machine.scale

    def _latency_s(self, messages):
        latencies = [self._link(peer).latency_s for _, peer in messages]
        return self._machine.cost.layers * max(latencies, default=0.0)

    def _link(self, member):
        mine, other = (self._ranks[m] // self._machine.ranks_per_node for m in (self.member, member))
        return self._machine.cost.intra if mine == other else self._machine.cost.inter


class Arriving:
    """Messages under way, on the wire and on the emulated link."""

    def __init__(self, pending, due_s, device):
        self._pending, self._due_s, self._device = pending, due_s, device

    def wait(self):
        """Until both have brought them."""
        self._device.sync()
        self._device.block(self._pending.wait)
        self._device.reach(self._due_s)


class Machine:
    """What one rank is: its device, its links, and the kernel that sleeps.

    Args:
        cost: a cost model of two passes (no recomputation).
        shape: the model stood for.
        ranks_per_node: ranks that share the fast links.
    """

    def __init__(self, cost, shape, ranks_per_node):
        self.cost, self.ranks_per_node = cost, ranks_per_node
        self.scale = shape.layers * shape.head_dim
        self.device = Device()
        self.link_free_s = 0.0

    def forward(self, q, k, v, causal, scale):
        """See `attention.kernels.Kernel`: takes the time of the tile, computes nothing."""
        self._attend(q, k, causal, 1 / (1 + ATTENTION_BACKWARD))
        return torch.zeros_like(q), torch.zeros(q.shape[:2])

    def backward(self, do, q, k, v, out, lse, causal, scale):
        """Likewise."""
        self._attend(q, k, causal, ATTENTION_BACKWARD / (1 + ATTENTION_BACKWARD))
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)

    def _attend(self, q, k, causal, share):
        rows, keys = q.shape[0], k.shape[0]
        pairs = rows * (rows + 1) / 2 if causal else rows * keys
        # With heads dealt out a rank computes some heads of all rows.
        self.device.run(self.cost.pair_s * pairs * share * q.shape[1] / self.cost.heads)

    def rest_s(self, layout, exchange):
        """Seconds of one rank's share of a task beside attention and messages, by the cost model."""
        cost, degree, kind = self.cost, layout.degree, exchange.kind
        travels = any(layout.cut_rows(member) for member in range(degree))
        steps = {"ring": degree - 1, "gather": degree > 1, "all-to-all": 0}[kind]
        blocks = {"ring": degree, "gather": 1 + (degree > 1), "all-to-all": 1}[kind]
        cut_samples = len({piece.index for piece in layout.cut[exchange.member]})
        return (
            cost.token_s * layout.rows(exchange.member)
            + cost.sample_s * (len(layout.whole[exchange.member]) + blocks * cut_samples)
            + cost.pack_s
            + cost.ring_step_s * steps * travels
        )


class StandIn(nn.Module):
    """A model of one layer that takes the time of all of them."""

    def __init__(self, machine):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1024))
        self._machine = machine

    def forward(self, input_ids, position_ids, flexcp, ranks):
        """The sum of the losses, which is 0; `ranks` are those of the task."""
        cost, layout = self._machine.cost, flexcp.layout
        exchange = Links(flexcp.exchange, ranks, self._machine)
        rest_s = self._machine.rest_s(layout, exchange)
        x = _Rest.apply(self.weight.mean(), self._machine.device, rest_s)
        rows = layout.rows(exchange.member)
        q = x.bfloat16().expand(rows, cost.heads, 1)
        k = x.bfloat16().expand(rows, cost.kv_heads, 1)
        out = group_attention(q, k, k, layout, exchange, kernel=self._machine)
        flexcp.calls += 1
        return out.float().sum()


class _Rest(torch.autograd.Function):
    """Linear work: before attention in the forward pass, after it in the backward pass."""

    @staticmethod
    def forward(ctx, x, device, seconds):
        ctx.device, ctx.seconds = device, seconds
        device.run(seconds / (1 + MATMUL_BACKWARD))
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.device.run(ctx.seconds * MATMUL_BACKWARD / (1 + MATMUL_BACKWARD))
        ctx.device.sync()
        return grad, None, None
