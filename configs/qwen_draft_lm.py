r"""Qwen2.5-Coder 0.5B as drafter of Qwen2.5-Coder 1.5B, trained on text that the 1.5B wrote.

  python -m experiments.distill --config=configs/qwen_draft_lm.py --workdir=runs/qwen_draft_lm \
    --config.data.path=responses.jsonl

`--config=configs/qwen_draft_lm.py:runlocal` trains SmolLM2's layers instead, since two CPU cores
cannot hold two Qwens and an optimizer.
"""

from ml_collections import ConfigDict

from configs import common


def get_config(mode: str = "") -> ConfigDict:
    """The config; `mode` is empty or `runlocal`."""
    config = common.get_config()
    config.target = "Qwen/Qwen2.5-Coder-1.5B-Instruct"
    config.drafter = {
        "name": "draft_lm", "model": "Qwen/Qwen2.5-Coder-0.5B-Instruct", "num_draft_tokens": 4,
    }  # fmt: skip
    config.data.batch_size = 32
    config.total_steps = 2000
    config.optimizer.learning_rate = 2e-5
    config.optimizer.warmup_steps = 100
    if mode == "runlocal":
        config.target = "smollm2"
        config.drafter = {"name": "draft_lm", "num_layers": 2, "num_draft_tokens": 4}
    return common.for_mode(config, mode)
