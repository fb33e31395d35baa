"""Executes plans: starts ranks, moves messages, feeds batches, steps the optimizer (torch)."""
