r"""EAGLE-3 for Qwen3 8B as DSpark's authors trained it (2026, their baseline), on a pod.

  python -m experiments.distill --distributed --config=configs/qwen3_8b_eagle3.py \
    --workdir=gs://BUCKET/qwen3_8b_eagle3 --config.data.path=responses.jsonl

Five taps, the target's head and whole vocabulary, normed queries and keys, 7 steps of training-time
test; 1.3 million prompts of Open-PerfectBlend, answered by the target without thinking, 10 epochs of
batches of 512. Their figures at temperature 1, a chain of 7: τ 5.30 (GSM8K), 4.33 (HumanEval), 2.66
(MT-Bench). Not run here. With `:runlocal` SmolLM2 stands in.
"""

from ml_collections import ConfigDict

from configs import common


def get_config(mode: str = "") -> ConfigDict:
    """The config; `mode` is empty or `runlocal`."""
    config = common.get_config()
    config.target = "Qwen/Qwen3-8B"
    config.drafter = {
        "name": "eagle3", "taps": (1, 9, 17, 25, 33), "own_head": False, "qk_norm": True,
        "ttt_steps": 7, "num_draft_tokens": 7,
    }  # fmt: skip
    config.data.template_options = {"enable_thinking": False}
    config.data.sequence_length = 4096
    config.data.batch_size = 512
    config.accumulate = 8
    config.mesh.fsdp = 8
    config.total_steps = 25_000
    config.optimizer.learning_rate = 6e-4
    config.optimizer.warmup_steps = 1000
    config.alpha_every = config.save_every = 500
    if mode == "runlocal":
        config.target = "smollm2"
        config.drafter.taps = (1, 8, 14, 20, 26)
        config.accumulate = 1
        config.mesh.fsdp = 1
        config.data.template_options = {}
    return common.for_mode(config, mode)
