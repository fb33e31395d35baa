"""Hugging Face transformers: text models whose attention goes through the public registry.

Nothing is patched. `with enable(model): …` selects FlexCP's attention by name, and leaving restores the
model's own.
"""

from flexcp.integrations.transformers.config import shape_of
from flexcp.integrations.transformers.hooks import blocks_of, enable

__all__ = ["blocks_of", "enable", "shape_of"]
