"""Attention on one pack: the maths and the order of messages, not the transport that carries them."""

from flexcp.attention.exchange import Buffers, Exchange, Message, Pending
from flexcp.attention.group import group_attention
from flexcp.attention.kernels import Kernel, kernel_for
from flexcp.attention.route import Traffic, ring_traffic_bytes

__all__ = [
    "Buffers",
    "Exchange",
    "Kernel",
    "Message",
    "Pending",
    "Traffic",
    "group_attention",
    "kernel_for",
    "ring_traffic_bytes",
]
