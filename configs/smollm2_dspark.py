r"""DSpark for SmolLM2, trained on text it wrote.

  python -m experiments.distill --config=configs/smollm2_dspark.py --workdir=runs/smollm2_dspark \
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
    config.drafter = {
        "name": "dspark", "mask_token": 4, "num_layers": 2, "block_size": 7, "taps": (),
        "num_taps": 5, "num_anchors": 48, "decay": 4.0, "markov_rank": 64,
    }  # fmt: skip
    # 0.9 of the L1 distance, which is two total variations.
    config.loss.forward_kl = 0.0
    config.loss.cross_entropy = 0.1
    config.loss.total_variation = 1.8
    # From scratch: many small steps.
    config.data.batch_size = config.accumulate = 1
    config.total_steps = 700
    config.optimizer.warmup_steps = 40
    config.log_every = 25
    config.alpha_every = config.save_every = 100
    return common.for_mode(config, mode)
