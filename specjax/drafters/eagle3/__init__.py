"""EAGLE-3 (Li et al. 2025): an autoregressive drafter of the target's features.

`network` is the layer, `drafter` what it keeps, drafts and learns, `create` makes one to train,
`checkpoint` reads and writes its files.
"""

from specjax.drafters.eagle3.checkpoint import export, load
from specjax.drafters.eagle3.create import from_config
from specjax.drafters.eagle3.drafter import Eagle3

__all__ = ["Eagle3", "export", "from_config", "load"]
