"""What the configs share. Every key that a run reads is here; a config changes some."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Defaults."""
    return ConfigDict(
        {
            "target": "",  # as --target of the other programs
            "drafter": {},  # name, and arguments of its `from_config`
            "init_from": "",  # a work directory whose best weights are the first ones
            "seed": 0,
            "total_steps": 1000,
            "accumulate": 1,  # micro-batches a step
            "remat": True,  # recompute in the backward pass; False is faster where memory allows
            "loss": {  # coefficients of specjax.losses
                "forward_kl": 1.0,
                "reverse_kl": 0.0,
                "jensen_shannon": 0.0,
                "total_variation": 0.0,
                "lk_hybrid": 0.0,
                "cross_entropy": 0.0,
            },
            "average_decay": 0.0,  # of a moving average of the weights; 0 for none
            "data": {
                "path": "",  # JSON lines: ids, or texts, of prompts and the target's answers
                "template_options": {},  # of the chat template, like enable_thinking
                "sequence_length": 2048,  # longer examples are left out; a row holds several short ones
                "batch_size": 8,  # rows a step, over all hosts
                "held_out": 0.05,  # share of the prompts
                "held_out_rows": 32,  # of them, evaluated on
            },
            "features": {
                "path": "",  # folder of cached target features; empty computes them in every step
                "dtype": "bfloat16",
                "taps": (),  # to be cached beside the drafter's own, for other drafters
            },
            "optimizer": {
                "name": "adamw",  # or muon, for matrices between embedding and head
                "learning_rate": 1e-4,  # at its peak
                "schedule": "cosine",  # down to 0, wsd (warm up, stay, fall) or constant
                "warmup_steps": 50,
                "decay_steps": 0,  # of schedule wsd; 0 for all behind the warm-up
                "clip": 1.0,  # global norm of the gradient; 0 for no limit
                "weight_decay": 0.0,
                "b1": 0.9,
                "b2": 0.95,
            },
            # Devices along each axis; -1 for the rest.
            "mesh": {"data": -1, "fsdp": 1, "tensor": 1},
            "log_every": 10,  # steps
            "alpha_every": 100,  # evaluate on the held-out rows; the best weights are kept
            "save_every": 100,  # what a run goes on from
            "tau_every": 0,  # decode prompts with the drafter; 0 for never but at the end
            "tau_prompts": 8,  # of the held-out ones
            "tensorboard": False,  # event files beside metrics.jsonl (extra `tensorboard`)
        }
    )


def for_smollm2_on_a_cpu(config: ConfigDict) -> None:
    """Twenty minutes of training on two cores: a row at a time, and nothing computed twice."""
    config.target = "smollm2"
    config.data.sequence_length = 512
    config.data.batch_size = 4
    config.accumulate = 4
    config.remat = False
    config.data.held_out_rows = 8
    config.total_steps = 230
    config.optimizer.learning_rate = 1e-3
    config.optimizer.warmup_steps = 20
    config.alpha_every = config.save_every = 50


def from_scratch(config: ConfigDict) -> None:
    """The same time in many small steps, for drafters that begin at random."""
    config.data.batch_size = config.accumulate = 1
    config.total_steps = 700
    config.optimizer.warmup_steps = 40
    config.log_every = 25
    config.alpha_every = config.save_every = 100


def dspark_loss(config: ConfigDict) -> None:
    """0.1 cross-entropy and 0.9 of the L1 distance, which is two total variations (DSpark, 2026)."""
    config.loss.forward_kl = 0.0
    config.loss.cross_entropy = 0.1
    config.loss.total_variation = 1.8


def for_mode(config: ConfigDict, mode: str) -> ConfigDict:
    """The config itself, or for `runlocal` one that two CPU cores finish in two minutes.

    Raises:
      ValueError: another word, which must not start a full run.
    """
    if mode == "runlocal":
        config.total_steps = 12
        config.data.sequence_length = 256
        config.data.batch_size = 4
        config.accumulate = min(config.accumulate, 4)
        config.data.held_out_rows = 4
        config.optimizer.warmup_steps = 4
        config.log_every = 4
        config.alpha_every = 6
        config.save_every = 6
        config.tau_prompts = 2
    elif mode:
        raise ValueError(f"unknown word {mode!r} behind the config: only :runlocal is known")
    return config
