"""Writes tiny random DFlash and DSpark drafters and what `dflash` and `speculators` get from them.

  pip install speculators==0.9.0 transformers==5.19.0      # and torch==2.13.0, for the CPU
  pip install --no-deps dflash==0.1.0
  python tests/golden/make_dflash_golden.py

Every folder is what its package saves (`config.json`, `model.safetensors`), and `expected.npz`.
Below, a target has D features, V tokens, T positions; a block has B slots, slot 0 the anchor.

`dflash`, a drafter in the layout of z-lab, and one block at each of three anchors:

  tokens [T], features [T, 3, D]        the three taps
  target_embedding [V, D], target_head [V, D]
  anchors [3]
  logits [3, B, V]                      the context 0 to a - 1 in one call; slot 0 is not used
  cached_logits [3, B, V]               one cache for the three, which gets the new context only

`dflash_target`, a Qwen3 target with a head of its own, and what `dflash_generate` makes of it with
the drafter in `dflash` at temperature 0. Short rows are padded with -1, and `produced` with 0.

  prompts [P, 9], outputs [P, 33]       prompt and 24 new tokens
  plain_outputs [P, 33]                 the same without drafts
  drafts [P, cycles, B - 1]             fewer than B - 1 where the tokens left are fewer
  produced [P, cycles]                  accepted drafts and one token of the target

`dspark*`, a drafter of `speculators` for each kind of Markov head, and one step of training with
N blocks. Slot k holds position a + k and its logits are for the token of position a + k + 1.

  tokens [T], loss_mask [T], features [T, 3, D], target_embedding [V, D], target_head [V, D]
  target_last_hidden [T, D]             before the target's last norm, as `speculators` takes it
  target_norm [D]                       the weight of that norm
  target_hidden [T, D]                  after it
  anchors [N], anchor_valid [N]         as drawn; the last ones are padding
  block_mask [N, B]                     the loss mask at a + k, and False where a block is padding
  hidden [N, B, D]                      of the trunk, after its last norm
  base_logits, logits [N, B, V]         before and after the Markov head
  confidence_logits [N, B]
  target_logits [N, B, V]               at position a + k
  slot_weights [B]
  ce_loss, tv_loss, kl_div_loss, confidence_loss     unweighted
  loss                                  0.1 ce + 0.9 tv + confidence
  accepted_length, greedy_accepted_length
"""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch
from dflash.model import DFlashDraftModel, _crop_to, _make_cache, dflash_generate
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.losses import dflash_loss_decay
from speculators.models.dflash import core as dflash_core
from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
from speculators.models.dspark import core as dspark_core
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import Qwen3Config, Qwen3ForCausalLM

Arrays = dict[str, np.ndarray]

HERE = pathlib.Path(__file__).parent
SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
}
DRAFT_LAYERS, TARGET_LAYERS = 2, 4
TAPS = [0, 1, 2]  # the outputs of the target's blocks; `speculators` counts one more
MASK = 60
LENGTH = 24
SCALE = 0.2  # of the weights: large enough that every one matters in the logits

DFLASH_BLOCK = 5
DFLASH_ANCHORS = [3, 7, 15]
PROMPTS, PROMPT_LENGTH, NEW_TOKENS = 4, 9, 24
CANDIDATES = 64  # prompts, of which those are kept whose accepted drafts differ the most
LIKELY, DAMPING = 6, 0.2  # the other tokens' logits are small, so that some drafts are accepted

DSPARK_BLOCK = 4
DSPARK_ANCHORS = 16
DSPARK_RANK = 6
DSPARK_GAMMA = 4.0
DSPARK_LOSS = {"ce": 0.1, "tv": 0.9, "kl_div": 0.0}
DSPARK_HEADS = {"dspark": "vanilla", "dspark_gated": "gated", "dspark_rnn": "rnn"}


def normal(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> np.ndarray:
    """Normal numbers of a scale."""
    return (scale * rng.standard_normal(shape)).astype(np.float32)


def randomize(model: torch.nn.Module) -> None:
    """Draws every weight anew, the norms' around one."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=float("norm" in name), std=SCALE)


def make_inputs(rng: np.random.Generator) -> Arrays:
    """A random target's side of the data."""
    vocabulary, width = SHAPE["vocab_size"], SHAPE["hidden_size"]
    return {
        "tokens": rng.integers(0, MASK, LENGTH),
        "features": normal(rng, LENGTH, len(TAPS), width),
        "target_embedding": normal(rng, vocabulary, width, scale=SCALE),
        "target_head": normal(rng, vocabulary, width, scale=SCALE),
    }


def make_dflash(folder: pathlib.Path) -> DFlashDraftModel:
    """A random drafter, saved and loaded again."""
    config = Qwen3Config(
        **SHAPE,
        num_hidden_layers=DRAFT_LAYERS,
        num_target_layers=TARGET_LAYERS,
        block_size=DFLASH_BLOCK,
        dflash_config={"mask_token_id": MASK, "target_layer_ids": TAPS},
    )
    model = DFlashDraftModel(config)
    randomize(model)
    model.save_pretrained(folder)
    return DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()


def draft(
    model: DFlashDraftModel, inputs: Arrays, cache: Any, start: int, anchor: int
) -> np.ndarray:
    """The logits of a block, whose cache gets the context from `start` on."""
    block = torch.full((1, DFLASH_BLOCK), MASK)
    block[0, 0] = int(inputs["tokens"][anchor])
    head = torch.nn.Linear(SHAPE["hidden_size"], SHAPE["vocab_size"], bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.from_numpy(inputs["target_head"]))
        hidden = model(
            target_hidden=torch.from_numpy(inputs["features"][start:anchor]).flatten(1)[None],
            noise_embedding=torch.from_numpy(inputs["target_embedding"])[block],
            position_ids=torch.arange(start, anchor + DFLASH_BLOCK)[None],
            past_key_values=cache,
            use_cache=True,
        )
        _crop_to(cache, anchor)
        return model.compute_logits(hidden, head)[0].numpy()


def dflash_expected(model: DFlashDraftModel, inputs: Arrays) -> Arrays:
    """The logits of the blocks, each with a new cache and all with one."""
    new = [draft(model, inputs, _make_cache(model.config), 0, a) for a in DFLASH_ANCHORS]
    cache = _make_cache(model.config)
    starts = [0, *DFLASH_ANCHORS[:-1]]
    pairs = zip(starts, DFLASH_ANCHORS, strict=True)
    cached = [draft(model, inputs, cache, start, anchor) for start, anchor in pairs]
    return {
        "anchors": np.array(DFLASH_ANCHORS),
        "logits": np.stack(new),
        "cached_logits": np.stack(cached),
    }


def make_target(folder: pathlib.Path) -> Qwen3ForCausalLM:
    """A random target, a few of whose tokens are much more likely than the others."""
    config = Qwen3Config(**SHAPE, num_hidden_layers=TARGET_LAYERS, attn_implementation="eager")
    model = Qwen3ForCausalLM(config)
    randomize(model)
    with torch.no_grad():
        model.lm_head.weight[LIKELY:] *= DAMPING
    model.save_pretrained(folder)
    return Qwen3ForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def generate(
    model: DFlashDraftModel, target: Qwen3ForCausalLM, prompt: np.ndarray
) -> dict[str, list]:
    """One prompt's output, and the drafts and produced tokens of every cycle."""
    calls = []
    hook = target.register_forward_pre_hook(lambda _, args: calls.append(args[0][0]))
    tokens = torch.from_numpy(prompt)[None]
    with mock.patch("dflash.model._cuda_time", lambda: 0.0):  # `return_stats` needs a GPU else
        made = dflash_generate(model, target, tokens, NEW_TOKENS, None, return_stats=True)
    hook.remove()
    return {
        "prompts": prompt.tolist(),
        "outputs": made.output_ids[0].tolist(),
        "drafts": [block[1:].tolist() for block in calls[1:]],  # the first call is the prompt
        "produced": made.acceptance_lengths,
    }


def variety(one: dict[str, list]) -> int:
    """How many different drafts were accepted in one prompt's output."""
    pairs = zip(one["drafts"], one["produced"], strict=True)
    return len({tuple(block[: produced - 1]) for block, produced in pairs})


def padded(rows: list[list], width: int, value: int) -> np.ndarray:
    """The rows, as wide as the widest can be."""
    return np.array([row + [value] * (width - len(row)) for row in rows])


def target_expected(
    model: DFlashDraftModel, target: Qwen3ForCausalLM, rng: np.random.Generator
) -> Arrays:
    """The transcripts of the prompts with the most different drafts."""
    prompts = rng.integers(0, MASK, (CANDIDATES, PROMPT_LENGTH))
    made = [generate(model, target, prompt) for prompt in prompts]
    made = sorted(made, key=variety, reverse=True)[:PROMPTS]
    arrays = {name: np.array([one[name] for one in made]) for name in ("prompts", "outputs")}
    plain = [
        dflash_generate(
            model, target, torch.from_numpy(prompt)[None], NEW_TOKENS, None, block_size=1
        )
        for prompt in arrays["prompts"]
    ]
    cycles = max(len(one["produced"]) for one in made)
    slots = DFLASH_BLOCK - 1
    nothing = [[-1] * slots] * cycles
    drafts = [padded((one["drafts"] + nothing)[:cycles], slots, -1) for one in made]
    return arrays | {
        "plain_outputs": torch.cat(plain).numpy(),
        "drafts": np.stack(drafts),
        "produced": padded([one["produced"] for one in made], cycles, 0),
    }


def make_dspark_inputs(rng: np.random.Generator) -> Arrays:
    """The inputs of a step of training."""
    mask = np.ones(LENGTH, bool)
    mask[:2] = mask[9:12] = False  # two turns of a user
    return make_inputs(rng) | {
        "loss_mask": mask,
        "target_last_hidden": normal(rng, LENGTH, SHAPE["hidden_size"]),
        "target_norm": 1 + normal(rng, SHAPE["hidden_size"], scale=SCALE),
    }


def make_dspark(head_type: str, inputs: Arrays) -> DSparkDraftModel:
    """A random drafter of the whole vocabulary for the target of `inputs`."""
    layer = Qwen3Config(**SHAPE, num_hidden_layers=DRAFT_LAYERS, attn_implementation="eager")
    config = DSparkSpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=SHAPE["vocab_size"],
        block_size=DSPARK_BLOCK,
        aux_hidden_state_layer_ids=[tap + 1 for tap in TAPS],
        mask_token_id=MASK,
        sample_from_anchor=True,
        markov_rank=DSPARK_RANK,
        markov_head_type=head_type,
        enable_confidence_head=True,
        confidence_head_with_markov=True,
        speculators_config=SpeculatorsConfig(
            algorithm="dspark",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=DSPARK_BLOCK)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["Qwen3ForCausalLM"]),
        ),
    )
    model = DSparkDraftModel(config).eval()
    randomize(model)
    with torch.no_grad():
        model.embed_tokens.weight.copy_(torch.from_numpy(inputs["target_embedding"]))
        model.verifier_norm.weight.copy_(torch.from_numpy(inputs["target_norm"]))
        for head in (model.lm_head, model.verifier_lm_head):
            head.weight.copy_(torch.from_numpy(inputs["target_head"]))
    return model


def recorded(function: Callable, calls: list[tuple]) -> Callable:
    """The function, which also keeps its arguments and results."""

    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        calls.append((args, result))
        return result

    return call


def run_dspark(model: DSparkDraftModel, inputs: Arrays) -> dict[str, tuple]:
    """The arguments and results of the parts of one step of training."""
    options, _ = DSparkDraftModel.get_trainer_kwargs(
        loss_fn=json.dumps(DSPARK_LOSS),
        loss_implementation="eager",
        dflash_decay_gamma=DSPARK_GAMMA,
        max_anchors=DSPARK_ANCHORS,
    )
    batch = {
        "input_ids": torch.from_numpy(inputs["tokens"]),
        "hidden_states": torch.from_numpy(inputs["features"]).flatten(1),
        "verifier_last_hidden_states": torch.from_numpy(inputs["target_last_hidden"]),
        "loss_mask": torch.from_numpy(inputs["loss_mask"]),
        "position_ids": torch.arange(LENGTH),
        "document_ids": torch.zeros(LENGTH, dtype=torch.long),
    }
    parts = {
        "select_anchors": dflash_core,
        "_backbone_forward": DSparkDraftModel,
        "compute_metrics": dspark_core,
    }
    calls = {name: [] for name in parts}
    with contextlib.ExitStack() as stack, torch.no_grad():
        for name, owner in parts.items():
            part = recorded(getattr(owner, name), calls[name])
            stack.enter_context(mock.patch.object(owner, name, part))
        model(**{name: tensor[None] for name, tensor in batch.items()}, **options)
    return {name: kept[0] for name, kept in calls.items()}


def dspark_expected(model: DSparkDraftModel, inputs: Arrays) -> Arrays:
    """Everything that a step of training makes on its way to the loss."""
    parts = run_dspark(model, inputs)
    anchors, valid = parts["select_anchors"][1]
    hidden, base_logits = parts["_backbone_forward"][1][:2]
    logits, targets, confidence, block_mask = parts["compute_metrics"][0][:4]
    loss, metrics = parts["compute_metrics"][1]
    slots = torch.arange(float(DSPARK_BLOCK))
    of_blocks = {
        "hidden": hidden,
        "base_logits": base_logits,
        "logits": logits,
        "target_logits": targets,
        "confidence_logits": confidence,
        "block_mask": block_mask,
    }
    of_blocks = {
        name: tensor.reshape(DSPARK_ANCHORS, DSPARK_BLOCK, *tensor.shape[2:])
        for name, tensor in of_blocks.items()
    }
    losses = {
        name: metrics[f"{name}_sum"]
        for name in ("ce_loss", "tv_loss", "kl_div_loss", "confidence_loss")
    }
    lengths = {
        name: metrics[f"{key}_sum"] / metrics[f"{key}_total"]
        for name, key in {"accepted_length": "accept_len", "greedy_accepted_length": "eal"}.items()
    }
    weights = dflash_loss_decay(slots, gamma=DSPARK_GAMMA, sample_from_anchor=True)
    single = {"anchors": anchors, "anchor_valid": valid, "slot_weights": weights, "loss": loss}
    found = of_blocks | losses | lengths | single
    return {name: tensor.numpy() for name, tensor in found.items()}


def write_dflash() -> None:
    """Writes the drafter of `dflash` and its target."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    inputs = make_inputs(rng)
    model = make_dflash(HERE / "dflash")
    target = make_target(HERE / "dflash_target")
    arrays = inputs | dflash_expected(model, inputs)
    np.savez_compressed(HERE / "dflash" / "expected.npz", **arrays)
    arrays = target_expected(model, target, rng)
    np.savez_compressed(HERE / "dflash_target" / "expected.npz", **arrays)


def write_dspark(name: str, head_type: str) -> None:
    """Writes a drafter of `speculators`."""
    torch.manual_seed(0)
    inputs = make_dspark_inputs(np.random.default_rng(0))
    model = make_dspark(head_type, inputs)
    model.save_pretrained(HERE / name)
    (HERE / name / "config.py").unlink()  # a copy of the package's own source
    with torch.no_grad():
        hidden = model.verifier_norm(torch.from_numpy(inputs["target_last_hidden"]))
    arrays = inputs | {"target_hidden": hidden.numpy()} | dspark_expected(model, inputs)
    np.savez_compressed(HERE / name / "expected.npz", **arrays)


def main() -> None:
    """Writes every drafter."""
    write_dflash()
    for name, head_type in DSPARK_HEADS.items():
        write_dspark(name, head_type)


if __name__ == "__main__":
    main()
