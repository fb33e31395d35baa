"""How long a pack takes and how much memory it needs: counted FLOPs, named hardware, one formula.

Standard library and numpy only. It predicts; it never measures and never decides.
"""

from flexcp.cost.memory import Memory, Sharding, memory_model, tokens_per_rank
from flexcp.cost.model import CostModel, Link, Load, cost_model
from flexcp.cost.presets import HARDWARE, Hardware, hardware

__all__ = [
    "HARDWARE",
    "CostModel",
    "Hardware",
    "Link",
    "Load",
    "Memory",
    "Sharding",
    "cost_model",
    "hardware",
    "memory_model",
    "tokens_per_rank",
]
