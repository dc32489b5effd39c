"""DSpark (DeepSeek-AI 2026): DFlash's trunk, a walk over its slots, and confidence in them.

`heads` are the two small ones, `drafter` how it drafts and learns, `create` makes one to train,
`checkpoint` reads and writes its files, `calibration` makes its confidence true; what spends it is
`specjax.decoding.controllers.PrefixScheduler`.
"""

from specjax.drafters.dspark.checkpoint import export, load
from specjax.drafters.dspark.create import from_config
from specjax.drafters.dspark.drafter import DSpark

__all__ = ["DSpark", "export", "from_config", "load"]
