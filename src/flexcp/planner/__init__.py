"""Which samples run together, on how many ranks, on which ranks, and when: samples in, plan out.

Pure functions of values. No tensor, process group, clock or environment enters here.
"""

from flexcp.planner.bounds import lower_bound_s
from flexcp.planner.check import check
from flexcp.planner.make import MODES, POLICIES, Planner, make_plan

__all__ = ["MODES", "POLICIES", "Planner", "check", "lower_bound_s", "make_plan"]
