"""What would happen: a training run as discrete events, from its plans and a cost model.

Deterministic, and without torch. It decides nothing and measures nothing; it writes what a real run writes.
"""

from flexcp.simulate.conditions import Conditions, Failure
from flexcp.simulate.reduction import Collectives, collectives, reduction_s
from flexcp.simulate.run import SimulatedStep, simulate
from flexcp.simulate.split import RankTime

__all__ = [
    "Collectives",
    "Conditions",
    "Failure",
    "RankTime",
    "SimulatedStep",
    "collectives",
    "reduction_s",
    "simulate",
]
