r"""EAGLE-3 for Llama 3.1 8B by its authors' recipe (Li et al. 2025), on a pod.

  python -m experiments.distill --distributed --config=configs/llama31_8b_eagle3.py \
    --workdir=gs://BUCKET/llama31_8b_eagle3 --config.data.path=responses.jsonl

Their data are 532,000 prompts of ShareGPT and UltraChat, answered by the target. One layer, 32,000
tokens, 7 steps of training-time test; AdamW at 5e-5. Their figures, at temperature 0 with a tree of
60 tokens: τ 6.13 (MT-Bench), 6.74 (HumanEval), 6.23 (GSM8K). Not run here. With `:runlocal` SmolLM2
stands in.
"""

from ml_collections import ConfigDict

from configs import common


def get_config(mode: str = "") -> ConfigDict:
    """The config; `mode` is empty or `runlocal`."""
    config = common.get_config()
    config.target = "meta-llama/Llama-3.1-8B-Instruct"
    config.drafter = {
        "name": "eagle3", "draft_vocab_size": 32000, "ttt_steps": 7, "num_draft_tokens": 7,
    }  # fmt: skip
    config.data.batch_size = 16
    config.mesh.fsdp = 8
    config.total_steps = 800_000
    config.optimizer.learning_rate = 5e-5
    config.optimizer.warmup_steps = 12_000
    config.optimizer.schedule = "wsd"  # down to 0 in a line
    config.optimizer.clip = 0.5
    config.alpha_every = config.save_every = 2000
    if mode == "runlocal":
        config.target = "smollm2"
        config.drafter.draft_vocab_size = 4000
        config.mesh.fsdp = 1
        config.optimizer.schedule = "cosine"
    return common.for_mode(config, mode)
