r"""DFlash for Qwen3 8B by its authors' recipe (Chen et al. 2026), on a pod.

  python -m experiments.distill --distributed --config=configs/qwen3_8b_dflash.py \
    --workdir=gs://BUCKET/qwen3_8b_dflash --config.data.path=responses.jsonl

About 800,000 prompts of Nemotron Post-Training V2 and CodeAlpaca, answered by the target without
thinking, 6 epochs; five layers, blocks of 16, cross-entropy with γ = 7. Their figures at temperature 0:
τ 6.54 (GSM8K), 6.50 (HumanEval), 4.24 (MT-Bench).
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
        "name": "dflash", "mask_token": 151669, "num_layers": 5, "block_size": 16, "num_taps": 5,
        "num_anchors": 512, "decay": 7.0, "strict_anchors": True,
    }  # fmt: skip
    config.data.template_options = {"enable_thinking": False}
    config.data.sequence_length = 3072
    config.data.batch_size = 32
    config.accumulate = 1
    config.mesh.fsdp = 8
    config.total_steps = 150000
    config.optimizer.learning_rate = 6e-4
    config.optimizer.warmup_steps = 6000
    config.loss.forward_kl = 0.0
    config.loss.cross_entropy = 1.0
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
