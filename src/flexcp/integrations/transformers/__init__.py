"""Hugging Face transformers: models of text and images whose attention goes through the public registry.

Nothing is patched. `with enable(model): …`, or `enable(model)` and `disable(model)`, selects FlexCP's
attention by name and restores the model's own. `flexible(SFTTrainer)` is a trainer that does it by itself.
"""

from flexcp.integrations.transformers.config import shape_of
from flexcp.integrations.transformers.hooks import Enabled, blocks_of, disable, enable, is_enabled
from flexcp.integrations.transformers.trainer import Groups, flexible

__all__ = [
    "Enabled",
    "Groups",
    "blocks_of",
    "disable",
    "enable",
    "flexible",
    "is_enabled",
    "shape_of",
]
