r"""DSpark for SmolLM2, trained on text it wrote.

  python -m experiments.distill --config=configs/smollm2_dspark.py --workdir=runs/smollm2_dspark \
    --config.data.path=responses.jsonl

700 steps took 18 minutes on two CPU cores: α of the five drafts 0.24, 0.17, 0.16, 0.14, 0.14, and on
held-out prompts τ 1.32 at temperature 0, 1.28 at 1 (docs/results/smollm2_dspark_metrics.jsonl).
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
        "name": "dspark", "mask_token": 4, "num_layers": 2, "block_size": 5, "taps": (),
        "num_taps": 5, "num_anchors": 256, "decay": 4.0, "markov_rank": 64,
        "loss_vocab_size": 8000,
    }  # fmt: skip
    common.dspark_loss(config)
    return common.for_mode(config, mode)
