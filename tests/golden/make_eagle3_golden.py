"""Writes tiny random EAGLE-3 drafters and their unrolled logits and losses, with `speculators`.

  pip install speculators==0.9.0 transformers==5.19.0      # and torch==2.13.0, for the CPU
  python tests/golden/make_eagle3_golden.py

Each folder is what `speculators` saves (`config.json`, `model.safetensors`), and `expected.npz`.
What goes in, of a target with D features, V tokens and T positions:

  tokens [T], loss_mask [T]
  features [T, 3, D]                    the three taps
  target_last_hidden [T, D]             before the target's last norm, as `speculators` takes it
  target_norm [D]                       the weight of that norm
  target_hidden [T, D]                  after it
  target_embedding [V, D], target_head [V, D]

What comes out, for n steps and a drafter's vocabulary of K tokens. The drafter's tokens, masks and
target states are one ahead of its features, so there are T - 1 indices. At step s, index i holds
the features of position i and the token i + 1 + s at RoPE position i + 1 + s, and its logits are
for token i + 2 + s. The last s indices of a step read padding, and the losses leave them out.

  target_logits [T - 1, K]              of positions 1 to T - 1, the drafter's vocabulary only
  logits [n, T - 1, K]
  hidden [n, T - 1, D]                  before the last norm: what the next step starts from
  losses [n]                            unweighted KL(target || draft), a mean over the mask
  step_weights [n], weighted_losses [n], loss
"""

from __future__ import annotations

import pathlib

import numpy as np
import torch
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.losses import exp_loss_decay
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig, shift_batch
from speculators.proposals.greedy import GreedyTokenProposalConfig
from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution
from transformers import CONFIG_MAPPING

HERE = pathlib.Path(__file__).parent
SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,  # the default of both families
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
}
DRAFT_VOCABULARY = 24
TAPS = [1, 2, 3]  # of a target of four blocks: the inputs of blocks 1, 2 and 3, counted from 0
LENGTH = 24
STEPS = 5
DECAY = 0.8
SCALE = 0.2  # of the weights: large enough that every one matters in the logits
MODELS = {"eagle3": "llama", "eagle3_qwen3": "qwen3"}


def make_inputs(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """A random target's side of the training data."""
    vocabulary, width = SHAPE["vocab_size"], SHAPE["hidden_size"]

    def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (scale * rng.standard_normal(shape)).astype(np.float32)

    mask = np.ones(LENGTH, bool)
    mask[:2] = mask[9:12] = False  # two turns of a user
    return {
        "tokens": rng.integers(0, vocabulary, LENGTH),
        "loss_mask": mask,
        "features": normal(LENGTH, len(TAPS), width),
        "target_last_hidden": normal(LENGTH, width),
        "target_norm": 1 + normal(width, scale=SCALE),
        "target_embedding": normal(vocabulary, width, scale=SCALE),
        "target_head": normal(vocabulary, width, scale=SCALE),
    }


def make_drafter(
    model_type: str, inputs: dict[str, np.ndarray], rng: np.random.Generator
) -> Eagle3DraftModel:
    """A random drafter for the target of `inputs`."""
    layer = CONFIG_MAPPING[model_type](**SHAPE, attn_implementation="eager")
    verifier = VerifierConfig(name_or_path="tiny-random-target", architectures=["LlamaForCausalLM"])
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=DRAFT_VOCABULARY,
        eagle_aux_hidden_state_layer_ids=TAPS,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=STEPS)],
            default_proposal_method="greedy",
            verifier=verifier,
        ),
    )
    model = Eagle3DraftModel(config).eval()
    chosen = rng.choice(SHAPE["vocab_size"], DRAFT_VOCABULARY, replace=False)
    d2t, t2d = build_vocab_mappings_from_distribution(
        {int(token): 1 for token in chosen}, DRAFT_VOCABULARY, SHAPE["vocab_size"]
    )
    model.load_vocab_mappings(t2d, d2t)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=float("norm" in name), std=SCALE)
        model.embed_tokens.weight.copy_(torch.from_numpy(inputs["target_embedding"]))
        model.verifier_norm.weight.copy_(torch.from_numpy(inputs["target_norm"]))
        model.verifier_lm_head.weight.copy_(torch.from_numpy(inputs["target_head"])[t2d])
    return model


def make_batch(inputs: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """The arguments of a training step, shifted and batched as `speculators` does."""
    batch = {
        "input_ids": torch.from_numpy(inputs["tokens"]),
        "hidden_states": torch.from_numpy(inputs["features"]).flatten(1),
        "verifier_last_hidden_states": torch.from_numpy(inputs["target_last_hidden"]),
        "loss_mask": torch.from_numpy(inputs["loss_mask"]),
        "position_ids": torch.arange(LENGTH),
        "lengths": torch.tensor([LENGTH]),
    }
    batch = shift_batch(batch)
    del batch["lengths"]
    batch["document_ids"] = torch.zeros(LENGTH - 1, dtype=torch.long)
    return {name: tensor.unsqueeze(0) for name, tensor in batch.items()}


def run(
    model: Eagle3DraftModel, batch: dict[str, torch.Tensor], decay: float
) -> tuple[dict[str, np.ndarray], torch.Tensor, dict[str, torch.Tensor]]:
    """What the model's parts returned, the loss and the metrics of one training step."""
    options, _ = Eagle3DraftModel.get_trainer_kwargs(
        loss_fn="kl_div", loss_implementation="eager", ttt_steps=STEPS, ttt_step_loss_decay=decay
    )
    parts = {
        "target_logits": model.verifier_lm_head,
        "hidden": model.layers[-1],
        "logits": model.lm_head,
    }
    outputs = {name: [] for name in parts}
    hooks = [
        part.register_forward_hook(lambda _, __, out, kept=outputs[name]: kept.append(out[0]))
        for name, part in parts.items()
    ]
    with torch.no_grad():
        _, loss, metrics = model(**batch, **options)
    for hook in hooks:
        hook.remove()
    return {name: torch.stack(out).numpy() for name, out in outputs.items()}, loss, metrics


def expected(model: Eagle3DraftModel, batch: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Logits and losses of a drafter, with every step's weight one and with the decay."""
    outputs, _, plain = run(model, batch, decay=1.0)
    _, loss, weighted = run(model, batch, decay=DECAY)

    def of_steps(metrics: dict[str, torch.Tensor]) -> np.ndarray:
        return np.stack([metrics[f"loss_{step}_sum"].numpy() for step in range(STEPS)])

    return outputs | {
        "target_logits": outputs["target_logits"][0],
        "losses": of_steps(plain),
        "step_weights": exp_loss_decay(torch.arange(float(STEPS)), gamma=DECAY).numpy(),
        "weighted_losses": of_steps(weighted),
        "loss": loss.numpy(),
    }


def main() -> None:
    """Writes every drafter."""
    for name, model_type in MODELS.items():
        torch.manual_seed(0)
        rng = np.random.default_rng(0)
        inputs = make_inputs(rng)
        model = make_drafter(model_type, inputs, rng)
        model.save_pretrained(HERE / name)
        (HERE / name / "config.py").unlink()  # a copy of the package's own source
        with torch.no_grad():
            hidden = model.verifier_norm(torch.from_numpy(inputs["target_last_hidden"]))
        arrays = inputs | {"target_hidden": hidden.numpy()} | expected(model, make_batch(inputs))
        np.savez_compressed(HERE / name / "expected.npz", **arrays)


if __name__ == "__main__":
    main()
