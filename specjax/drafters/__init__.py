"""Drafters: everything about one is in its own file or folder, and in one line here."""

import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from specjax.checkpoints import huggingface
from specjax.checkpoints.load import load_target
from specjax.drafters import draft_lm as draft_lms
from specjax.drafters.draft_lm import draft_lm
from specjax.drafters.early_exit import early_exit
from specjax.drafters.ngram import NGram
from specjax.models.target import Target
from specjax.trees import Tree
from specjax.types import Drafter, LoadedDrafter

__all__ = ["NGram", "draft_lm", "early_exit", "export", "from_config", "load_drafter"]

IDENTITY = "specjax.json"  # in the folder of a trained drafter, says what it is


def _ngram(argument: str, target: Target, tree: Tree) -> Drafter:
    if argument and not argument.isdecimal():
        raise ValueError(f"ngram:N takes its shortest match, a number, got {argument!r}")
    if tree != Tree.chain(tree.depth):
        raise ValueError("ngram drafts a chain, no tree")
    shortest = int(argument or 1)
    return NGram(tree.depth, max_ngram=max(3, shortest), min_ngram=shortest)


def _early_exit(argument: str, target: Target, tree: Tree) -> LoadedDrafter:
    if argument and not argument.isdecimal():
        raise ValueError(f"early_exit:N takes a number of layers, got {argument!r}")
    return early_exit(target, int(argument) if argument else None, tree=tree)


def _draft_lm(argument: str, target: Target, tree: Tree) -> LoadedDrafter:
    if not argument:
        raise ValueError("draft_lm needs a model: draft_lm:FOLDER, draft_lm:FILE.gguf or a hub id")
    return draft_lm(load_target(argument, dtype=target.dtype), target, tree=tree)


# name → its builder from (what follows "name:", the target, what to draft), and its usual K.
REGISTRY: dict[str, tuple[Callable[..., Drafter | LoadedDrafter], int]] = {
    "ngram": (_ngram, 8),
    "early_exit": (_early_exit, 4),
    "draft_lm": (_draft_lm, 4),
}


def load_drafter(
    spec: str,
    target: Target,
    num_draft_tokens: int | None = None,
    *,
    tree: Tree | None = None,
) -> Drafter | LoadedDrafter | None:
    """The drafter that a text names.

    Args:
      spec: `none`, `ngram` or `ngram:SHORTEST_MATCH`, `early_exit` or `early_exit:LAYERS`,
        `draft_lm:MODEL`, or the folder of a trained drafter.
      target: what it drafts for.
      num_draft_tokens: K of a chain; by default the drafter's usual one.
      tree: drafted instead of a chain.

    Raises:
      ValueError: there is no such drafter (the message lists those there are), or it does not fit.
    """
    name, _, argument = spec.partition(":")
    if (pathlib.Path(spec) / IDENTITY).exists():
        name, argument = huggingface.read_json(pathlib.Path(spec) / IDENTITY)["drafter"], spec
    if name == "none":
        return None
    if name not in REGISTRY:
        raise ValueError(f"unknown drafter {spec!r}; known: none, {', '.join(REGISTRY)}")
    build, usual = REGISTRY[name]
    if tree is None:
        tree = Tree.chain(usual if num_draft_tokens is None else num_draft_tokens)
    return build(argument, target, tree)


# name → how it is built for training from its part of a config, the target and a seed; and its export.
TRAINABLE: dict[str, tuple[Callable[..., LoadedDrafter], Callable[..., None]]] = {
    "draft_lm": (draft_lms.from_config, draft_lms.export),
}


def from_config(config: Mapping[str, Any], target: Target, seed: int) -> LoadedDrafter:
    """The drafter to train that a config describes; its key `name` says which.

    Raises:
      ValueError: there is no such drafter, or one of its keys is wrong.
    """
    options = dict(config)
    name = options.pop("name", None)
    if name not in TRAINABLE:
        raise ValueError(f"config.drafter.name {name!r} is unknown; known: {', '.join(TRAINABLE)}")
    try:
        return TRAINABLE[name][0](target, seed, **options)
    except TypeError as error:
        raise ValueError(f"config.drafter: {error}") from None


def export(loaded: LoadedDrafter, target: Target, folder: pathlib.Path) -> None:
    """Writes a trained drafter as a folder that `load_drafter` and other engines read."""
    name = loaded.name.partition(":")[0]
    TRAINABLE[name][1](loaded, target, folder)
    (folder / IDENTITY).write_text(json.dumps({"drafter": name}) + "\n", encoding="utf-8")
