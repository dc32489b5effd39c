r"""EAGLE-3 for SmolLM2, trained on text it wrote.

  python -m experiments.distill --config=configs/smollm2_eagle3.py --workdir=runs/smollm2_eagle3 \
    --config.data.path=responses.jsonl

700 steps took 18 minutes on two CPU cores: α 0.29, 0.26, 0.24, 0.22, 0.21 at the five steps of
training-time test, and on 8 held-out prompts τ 1.63 at temperature 1
(docs/results/smollm2_eagle3_metrics.jsonl).
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
        "name": "eagle3", "taps": (), "draft_vocab_size": 8000, "ttt_steps": 5,
        "num_draft_tokens": 7,
    }  # fmt: skip
    return common.for_mode(config, mode)
