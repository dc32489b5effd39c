r"""Four of SmolLM2's own layers as its drafter, trained on text it wrote.

  python -m experiments.distill --config=configs/smollm2_draft_lm.py --workdir=runs/smollm2_draft_lm \
    --config.data.path=responses.jsonl

`responses.jsonl` is written by `experiments.regenerate`. With `:runlocal` behind the config's name it
is the same in few and short steps, less than two minutes on two CPU cores.
"""

from ml_collections import ConfigDict

from configs import common


def get_config(mode: str = "") -> ConfigDict:
    """The config; `mode` is empty or `runlocal`."""
    config = common.get_config()
    common.for_smollm2_on_a_cpu(config)
    config.drafter = {"name": "draft_lm", "num_layers": 4, "num_draft_tokens": 4}
    return common.for_mode(config, mode)
