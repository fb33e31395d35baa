"""Flexible context parallelism."""
