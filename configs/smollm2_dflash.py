r"""DFlash for SmolLM2, trained on text it wrote.

  python -m experiments.distill --config=configs/smollm2_dflash.py --workdir=runs/smollm2_dflash \
    --config.data.path=responses.jsonl

700 steps took 17 minutes on two CPU cores: α of the five drafts 0.22, 0.13, 0.10, 0.09, 0.09, and on
held-out prompts τ 1.34 at temperature 0, 1.26 at 1 (docs/results/smollm2_dflash_metrics.jsonl).
`responses.jsonl` is written by `experiments.regenerate`. With `:runlocal` behind the config's name it
is the same in few and short steps, less than two minutes on two CPU cores.
"""

from ml_collections import ConfigDict

from configs import common


def get_config(mode: str = "") -> ConfigDict:
    """The config; `mode` is empty or `runlocal`."""
    config = common.get_config()
    common.for_smollm2_on_a_cpu(config)
    common.from_scratch(config)
    config.drafter = {
        "name": "dflash", "mask_token": 4, "num_layers": 2, "block_size": 6, "taps": (),
        "num_taps": 5, "num_anchors": 256, "random_anchors": True, "decay": 4.0,
        "loss_vocab_size": 8000,
    }  # fmt: skip
    return common.for_mode(config, mode)
