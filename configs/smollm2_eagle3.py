r"""EAGLE-3 for SmolLM2, trained on text it wrote.

  python -m experiments.distill --config=configs/smollm2_eagle3.py --workdir=runs/smollm2_eagle3 \
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
    config.drafter = {
        "name": "eagle3", "draft_vocab_size": 8000, "unroll": 5, "num_draft_tokens": 7,
    }  # fmt: skip
    config.data.sequence_length = 512
    # A row at a time, and nothing computed twice: a CPU's.
    config.data.batch_size = 4
    config.accumulate = 4
    config.remat = False
    config.data.held_out_rows = 8
    config.total_steps = 230
    config.optimizer.learning_rate = 2e-3
    config.optimizer.warmup_steps = 20
    config.alpha_every = config.save_every = 50
    return common.for_mode(config, mode)
