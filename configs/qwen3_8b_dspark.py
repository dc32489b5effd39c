r"""DSpark for Qwen3 8B by its authors' recipe (DeepSeek-AI 2026), on a pod.

  python -m experiments.distill --distributed --config=configs/qwen3_8b_dspark.py \
    --workdir=gs://BUCKET/qwen3_8b_dspark --config.data.path=responses.jsonl

1.3 million prompts of Open-PerfectBlend, answered by the target without thinking, 10 epochs of
batches of 512; five layers, blocks of 7. Their figures at temperature 1: τ 6.17 (GSM8K), 5.52
(HumanEval), 3.72 (MT-Bench).
A batch here is of packed rows, each of several texts where those are short: lower `total_steps` by as
much for as many epochs. Not run here. With `:runlocal` SmolLM2 stands in.
"""

from ml_collections import ConfigDict

from configs import common


def get_config(mode: str = "") -> ConfigDict:
    """The config; `mode` is empty or `runlocal`."""
    config = common.get_config()
    config.target = "Qwen/Qwen3-8B"
    config.drafter = {
        "name": "dspark", "mask_token": 151669, "num_layers": 5, "block_size": 7, "num_taps": 5,
        "num_anchors": 512, "decay": 4.0, "strict_anchors": True, "markov_rank": 256,
    }  # fmt: skip
    config.data.template_options = {"enable_thinking": False}
    config.data.sequence_length = 4096
    config.data.batch_size = 512
    config.accumulate = 8
    config.mesh.fsdp = 8
    config.total_steps = 25000
    config.optimizer.learning_rate = 6e-4
    config.optimizer.warmup_steps = 1000
    common.dspark_loss(config)
    config.alpha_every = config.save_every = 1000
    if mode == "runlocal":
        config.target = "smollm2"
        config.drafter.mask_token = 4
        config.drafter.num_layers = 2
        config.drafter.num_anchors = 16
        config.accumulate = 1
        config.mesh.fsdp = 1
        config.data.template_options = {}
    return common.for_mode(config, mode)
