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
    config.target = "smollm2"
    config.drafter = {"name": "draft_lm", "num_layers": 4, "num_draft_tokens": 4}
    config.data.sequence_length = 512
    config.data.batch_size = config.accumulate = (
        4  # a row at a time, nothing computed twice: a CPU's
    )
    config.remat = False
    config.total_steps = 600
    config.optimizer.learning_rate = 1e-3
    return common.for_mode(config, mode)
