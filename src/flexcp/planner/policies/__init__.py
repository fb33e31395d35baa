"""The ways to plan a global batch, each a function from a problem to packs in waves."""
