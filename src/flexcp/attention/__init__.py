"""Ring attention on one pack: the maths and the order of messages, not the transport that carries them."""

from flexcp.attention.exchange import Exchange, Pending
from flexcp.attention.kernels import Kernel, kernel_for
from flexcp.attention.ring import ring_attention
from flexcp.attention.route import Traffic, ring_traffic_bytes

__all__ = ["Exchange", "Kernel", "Pending", "Traffic", "kernel_for", "ring_attention", "ring_traffic_bytes"]
