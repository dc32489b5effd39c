"""What the flags say of drafts: which drafter, how long or what tree, how much of it is verified."""

from __future__ import annotations

import itertools
import operator
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from absl import flags

import specjax
from experiments.launch import MAIN, warn
from specjax.decoding.controllers import (
    ConfidenceThreshold,
    Fixed,
    Heuristic,
    Optimal,
    PrefixScheduler,
    Threshold,
)
from specjax.drafters import REGISTRY, manifest
from specjax.evaluation.benchmark import cycle_seconds
from specjax.models.target import Target
from specjax.models.tokenizer import template_hash
from specjax.trees import DynamicTree, Tree
from specjax.types import Controller, Drafter, Drafts, LoadedDrafter, drafter_and_params
from specjax.verification import RULES, greedy

SPECS = (
    ", ".join(["none", *(name + entry.argument for name, entry in REGISTRY.items())])
    + ", or the folder of a drafter trained here; @K or @TREE behind it says what this one drafts"
)
CONTROLLERS = (
    "fixed:LENGTH", "heuristic", "threshold:Q", "optimal", "confidence:THRESHOLD", "scheduler",
)  # fmt: skip
CONTROLLED_SPECS = f"{SPECS}, and +CONTROLLER how much of it is verified: {', '.join(CONTROLLERS)}"


NUM_DRAFT_TOKENS = "K, drafted tokens a cycle. Default: the drafter's usual one."


def define_num_draft_tokens() -> flags.FlagHolder:
    """`--num_draft_tokens`."""
    return flags.DEFINE_integer("num_draft_tokens", None, NUM_DRAFT_TOKENS, module_name=MAIN)


def define_tree() -> flags.FlagHolder:
    """`--tree`."""
    text = (
        "Draft a tree: children of each node on level 1, 2, …, like 4,2,1; or, with eagle3, one that "
        "follows the draft: dynamic,TOTAL_TOKENS,DEPTH,TOP_K. Default: a chain."
    )
    return flags.DEFINE_list("tree", [], text, module_name=MAIN)


def parts(spec: str) -> tuple[str, str | None, str | None]:
    """`NAME[@DRAFT][+CONTROLLER]`: what drafts, what is drafted, what decides how much is verified.

    A `+` in a name that no `@` follows is part of it, unless what stands behind it is a controller.
    """
    name, marked, rest = spec.partition("@")
    if marked:
        draft, plus, controller = rest.partition("+")
        return name, draft, controller if plus else None
    before, plus, word = spec.rpartition("+")
    if plus and word.partition(":")[0] in [known.partition(":")[0] for known in CONTROLLERS]:
        return before, None, word
    return spec, None, None


def folder_of(spec: str) -> pathlib.Path | None:
    """The folder that `--drafter` names, if it names one."""
    name = parts(spec)[0]
    folders = (pathlib.Path(part) for part in (name, name.partition(":")[2]) if part)
    return next((folder for folder in folders if folder.is_dir()), None)


def with_lengths(specs: Sequence[str], lengths: Sequence[int]) -> list[str]:
    """Specs with every K of several behind those that do not say what they draft."""
    if len(lengths) < 2:
        return list(specs)
    told = []
    for spec in specs:
        name, own, controller = parts(spec)
        behind = "" if controller is None else f"+{controller}"
        told += [spec] if own else [f"{name}@{k}{behind}" for k in lengths]
    return told


def load_drafter(
    spec: str,
    target: Target,
    num_draft_tokens: int | None,
    words: list[str],
    *,
    controlled: bool = False,
) -> Drafter | LoadedDrafter | None:
    """The drafter that `--drafter`, `--num_draft_tokens` and `--tree` name.

    `SPEC@K` and `SPEC@TREE` say there what the other flags say for all drafters.

    Args:
      spec: `--drafter`.
      target: what it drafts for.
      num_draft_tokens, words: `--num_draft_tokens` and `--tree`.
      controlled: the program has controllers, and asks `load_controller` for them.
    """
    name, own, controller = parts(spec)
    if controller is not None and not controlled:
        raise ValueError(
            f"--drafter={spec}: whole drafts are verified here; leave +{controller} out"
        )
    if own is not None and not (own == "" and controller):
        num_draft_tokens = int(own) if own.isdecimal() else None
        words = [] if own.isdecimal() else own.split(",")
    if words and num_draft_tokens is not None:
        raise ValueError("give either --num_draft_tokens or --tree")
    dynamic = words[:1] == ["dynamic"]
    numbers = words[dynamic:]
    if not all(word.strip().isdecimal() for word in numbers) or (dynamic and len(numbers) != 3):
        raise ValueError(
            "--tree takes numbers of children like 4,2,1, or dynamic,TOTAL_TOKENS,DEPTH,TOP_K, got "
            f"{','.join(words)!r}"
        )
    numbers = [int(word) for word in numbers]
    nodes = numbers[0] if dynamic else sum(itertools.accumulate(numbers, operator.mul))
    nodes = nodes or num_draft_tokens or 0
    if nodes >= target.config.context_length:
        raise ValueError(
            f"a draft of {nodes} tokens does not fit the target's context of "
            f"{target.config.context_length}"
        )
    tree = None
    if numbers:
        tree = DynamicTree(*numbers) if dynamic else Tree.of_widths(numbers)
    _warn_of_template(name, target)
    return specjax.load_drafter(name, target, num_draft_tokens, tree=tree)


def _warn_of_template(name: str, target: Target) -> None:
    """Where a drafter learnt from prompts that were rendered otherwise than they will be now."""
    folder = folder_of(name)
    learnt = manifest.read(folder).get("template_hash") if folder else None
    if learnt and target.tokenizer and learnt != template_hash(target.tokenizer):
        warn(
            f"{name} was trained with another chat template, or with other --template_options, and "
            "drafts worse for it"
        )


def load_controller(
    spec: str,
    target: Target,
    loaded: Drafter | LoadedDrafter | None,
    batch: int,
    max_len: int,
    rule: str,
    sampling: Mapping[str, Any],
) -> Controller | None:
    """The controller that `--drafter` names; a scheduler's costs are measured here and now.

    Args:
      spec: `--drafter`.
      target, loaded, batch, max_len, rule: what is decoded.
      sampling: `temperature`, `top_k`, `top_p` and `min_p`.

    Raises:
      ValueError: there is no such controller, or the drafter has no confidence for it.
    """
    _, _, word = parts(spec)
    if word is None:
        return None
    name, _, argument = word.partition(":")
    drafter, params = drafter_and_params(loaded)
    if drafter is None:
        raise ValueError(f"--drafter={spec}: there is no draft for {word} to judge")
    if name == "optimal" and drafter.draft_depth < drafter.num_draft_tokens:
        raise ValueError(f"--drafter={spec}: optimal judges chains, no trees")
    sampled = sampling["temperature"] and RULES[rule].drafts is Drafts.SAMPLED
    if name == "threshold" and not sampled:
        raise ValueError(
            f"--drafter={spec}: threshold needs a temperature above 0 and a rule for sampled drafts"
        )
    if name in ("confidence", "scheduler") and not drafter.confident:
        raise ValueError(f"--drafter={spec}: {name} needs a drafter with a confidence head")
    if name == "fixed" and argument.isdecimal():
        return Fixed(jnp.int32(argument))
    if word == "heuristic":
        return Heuristic(jnp.int32(4))
    if name in ("confidence", "threshold"):
        kind = ConfidenceThreshold if name == "confidence" else Threshold
        return kind(jnp.float32(_probability(word)))
    if word in ("scheduler", "optimal"):
        law = RULES[rule] if sampling["temperature"] else greedy
        filters = {key: sampling[key] for key in ("temperature", "top_k", "top_p", "min_p")}
        seconds = cycle_seconds(
            target, drafter, params, law, batch=batch, max_len=max_len, **filters
        )
        return (PrefixScheduler if word == "scheduler" else Optimal).of(seconds)
    known = ", ".join(CONTROLLERS)
    raise ValueError(f"--drafter={spec}: unknown controller {word!r}; known: {known}")


def _probability(word: str) -> float:
    """What stands behind the colon."""
    name, _, text = word.partition(":")
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise ValueError(f"{name} takes a number from 0 to 1, got {text!r}")
    return value
