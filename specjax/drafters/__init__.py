"""Drafters: everything about one is in its own file or folder, and in one line here."""

import dataclasses
import inspect
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from specjax.checkpoints.load import load_target
from specjax.drafters import dflash, dspark, eagle3, manifest
from specjax.drafters import draft_lm as draft_lms
from specjax.drafters.draft_lm import draft_lm
from specjax.drafters.early_exit import early_exit
from specjax.drafters.ngram import NGram
from specjax.models.target import Target
from specjax.trees import DynamicTree, Tree
from specjax.types import Drafter, LoadedDrafter

__all__ = ["NGram", "draft_lm", "early_exit", "export", "from_config", "load_drafter"]


def _ngram(argument: str, target: Target, tree: Tree) -> Drafter:
    if argument and not argument.isdecimal():
        raise ValueError(f"ngram:N takes its shortest match, a number, got {argument!r}")
    shortest = int(argument or 1)
    return NGram(_length_of(tree, "ngram"), max_ngram=max(3, shortest), min_ngram=shortest)


def _early_exit(argument: str, target: Target, tree: Tree) -> LoadedDrafter:
    if argument and not argument.isdecimal():
        raise ValueError(f"early_exit:N takes a number of layers, got {argument!r}")
    return early_exit(target, int(argument) if argument else None, tree=tree)


def _draft_lm(argument: str, target: Target, tree: Tree) -> LoadedDrafter:
    if not argument:
        raise ValueError("draft_lm needs a model: draft_lm:FOLDER, draft_lm:FILE.gguf or a hub id")
    return draft_lm(load_target(argument, dtype=target.dtype), target, tree=tree)


def _eagle3(argument: str, target: Target, tree: Tree | DynamicTree) -> LoadedDrafter:
    return eagle3.load(_folder(argument, "eagle3"), target, tree)


def _dflash(argument: str, target: Target, tree: Tree | None) -> LoadedDrafter:
    return dflash.load(_folder(argument, "dflash"), target, _length_of(tree, "dflash"))


def _dspark(argument: str, target: Target, tree: Tree | None) -> LoadedDrafter:
    return dspark.load(_folder(argument, "dspark"), target, _length_of(tree, "dspark"))


def _folder(argument: str, name: str) -> pathlib.Path:
    """Where a trained drafter is."""
    if not argument:
        raise ValueError(f"{name} needs a trained drafter: {name}:FOLDER")
    return pathlib.Path(argument)


def _length_of(tree: Tree | None, name: str) -> int | None:
    """K of a chain, None where none is given."""
    if tree is not None and tree != Tree.chain(tree.depth):
        raise ValueError(f"{name} drafts a chain, no tree")
    return None if tree is None else tree.depth


@dataclasses.dataclass(frozen=True)
class Entry:
    """A drafter of the registry.

    Attributes:
      build: (what follows "name:", the target, what to draft) → drafter.
      usual: K where none is given; None for what the drafter was trained for.
      argument: how `--help` writes what follows the name.
      from_config: builds one to train from the target, a seed, how often the target says each token,
        and the options of its part of a config; None for what needs no training.
      export: (drafter, target, folder) writes a trained one.
      dynamic: it drafts dynamic trees, too.
    """

    build: Callable[..., Drafter | LoadedDrafter]
    usual: int | None
    argument: str
    from_config: Callable[..., LoadedDrafter] | None = None
    export: Callable[..., None] | None = None
    dynamic: bool = False


REGISTRY = {
    "ngram": Entry(_ngram, 8, "[:SHORTEST_MATCH]"),
    "early_exit": Entry(_early_exit, 4, "[:LAYERS]"),
    "draft_lm": Entry(_draft_lm, 4, ":MODEL", draft_lms.from_config, draft_lms.export),
    "eagle3": Entry(_eagle3, 4, ":FOLDER", eagle3.from_config, eagle3.export, dynamic=True),
    "dflash": Entry(_dflash, None, ":FOLDER", dflash.from_config, dflash.export),
    "dspark": Entry(_dspark, None, ":FOLDER", dspark.from_config, dspark.export),
}


def load_drafter(
    spec: str | pathlib.Path,
    target: Target,
    num_draft_tokens: int | None = None,
    *,
    tree: Tree | DynamicTree | None = None,
) -> Drafter | LoadedDrafter | None:
    """The drafter that a text names.

    Args:
      spec: `none`, `ngram` or `ngram:SHORTEST_MATCH`, `early_exit` or `early_exit:LAYERS`,
        `draft_lm:MODEL`, `eagle3:FOLDER`, `dflash:FOLDER`, `dspark:FOLDER`, or the folder of a
        drafter trained here.
      target: what it drafts for.
      num_draft_tokens: K of a chain; by default the drafter's usual one.
      tree: drafted instead of a chain.

    Raises:
      ValueError: there is no such drafter (the message lists those there are), or it does not fit.
    """
    spec = str(spec)
    name, _, argument = spec.partition(":")
    trained = manifest.name_of(pathlib.Path(spec))
    if trained:
        name, argument = trained, spec
    if name == "none":
        return None
    if name not in REGISTRY:
        raise ValueError(f"unknown drafter {spec!r}; known: none, {', '.join(REGISTRY)}")
    entry = REGISTRY[name]
    length = entry.usual if num_draft_tokens is None else num_draft_tokens
    if tree is None and length is not None:
        tree = Tree.chain(length)
    if isinstance(tree, DynamicTree) and not entry.dynamic:
        raise ValueError(f"{name} drafts no dynamic tree")
    return entry.build(argument, target, tree)


def from_config(
    config: Mapping[str, Any], target: Target, seed: int, token_counts: np.ndarray
) -> LoadedDrafter:
    """The drafter to train that a config describes; its key `name` says which.

    Args:
      config: its name and options.
      target: what it drafts for.
      seed: of random weights.
      token_counts: `[V]`, how often the target says each token in the training text.

    Raises:
      ValueError: there is no such drafter, or one of its keys is wrong.
    """
    check_options(config)
    options = dict(config)
    return _trainable(options.pop("name")).from_config(target, seed, token_counts, **options)


def check_options(config: Mapping[str, Any]) -> None:
    """Raises ValueError where a config names no drafter, or an option that the drafter has not."""
    options = dict(config)
    build = _trainable(options.pop("name", None)).from_config
    try:
        inspect.signature(build).bind(None, 0, None, **options)
    except TypeError as error:
        raise ValueError(f"config.drafter: {error}") from None


def _trainable(name: str | None) -> Entry:
    if name not in REGISTRY or not REGISTRY[name].from_config:
        known = ", ".join(key for key, entry in REGISTRY.items() if entry.from_config)
        raise ValueError(f"config.drafter.name {name!r} is unknown; known: {known}")
    return REGISTRY[name]


def export(loaded: LoadedDrafter, target: Target, folder: pathlib.Path) -> None:
    """Writes a trained drafter as a folder that `load_drafter` and other engines read."""
    name = loaded.name.partition(":")[0]
    _trainable(name).export(loaded, target, folder)
    manifest.write(folder, name, target)
