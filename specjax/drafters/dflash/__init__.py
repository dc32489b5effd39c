"""DFlash (Chen et al. 2026): a whole block in one pass, over the target's features.

`network` is the trunk, `drafter` what it keeps, drafts and learns, `create` makes one to train
(`looking_back` its first weights), `checkpoint` reads and writes its files.
"""

from specjax.drafters.dflash.checkpoint import export, load
from specjax.drafters.dflash.create import from_config
from specjax.drafters.dflash.drafter import DFlash

__all__ = ["DFlash", "export", "from_config", "load"]
