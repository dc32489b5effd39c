"""Drafters: everything about one is in its own file or folder, and in one line here."""

from collections.abc import Callable

from specjax.checkpoints.load import load_target
from specjax.drafters.draft_lm import draft_lm
from specjax.drafters.early_exit import early_exit
from specjax.drafters.ngram import NGram
from specjax.models.target import Target
from specjax.types import Drafter, LoadedDrafter

__all__ = ["NGram", "draft_lm", "early_exit", "load_drafter"]


def _ngram(argument: str, target: Target, num_draft_tokens: int) -> Drafter:
    if argument and not argument.isdigit():
        raise ValueError(f"ngram:N takes its shortest match, a number, got {argument!r}")
    return NGram(num_draft_tokens, min_ngram=int(argument or 1))


def _early_exit(argument: str, target: Target, num_draft_tokens: int) -> LoadedDrafter:
    if argument and not argument.isdigit():
        raise ValueError(f"early_exit:N takes a number of layers, got {argument!r}")
    return early_exit(target, int(argument) if argument else None, num_draft_tokens)


def _draft_lm(argument: str, target: Target, num_draft_tokens: int) -> LoadedDrafter:
    if not argument:
        raise ValueError("draft_lm needs a model: draft_lm:FOLDER, draft_lm:FILE.gguf or a hub id")
    return draft_lm(load_target(argument, dtype=target.dtype), target, num_draft_tokens)


# name → its builder from (what follows "name:", the target, K), and its usual K.
REGISTRY: dict[str, tuple[Callable[..., Drafter | LoadedDrafter], int]] = {
    "ngram": (_ngram, 8),
    "early_exit": (_early_exit, 4),
    "draft_lm": (_draft_lm, 4),
}


def load_drafter(
    spec: str, target: Target, num_draft_tokens: int | None = None
) -> Drafter | LoadedDrafter | None:
    """The drafter that a text names.

    Args:
      spec: `none`, `ngram` or `ngram:SHORTEST_MATCH`, `early_exit` or `early_exit:LAYERS`,
        `draft_lm:MODEL`.
      target: what it drafts for.
      num_draft_tokens: K; by default the drafter's usual one.

    Raises:
      ValueError: there is no such drafter (the message lists those there are), or it does not fit.
    """
    name, _, argument = spec.partition(":")
    if name == "none":
        return None
    if name not in REGISTRY:
        raise ValueError(f"unknown drafter {spec!r}; known: none, {', '.join(REGISTRY)}")
    build, usual = REGISTRY[name]
    return build(argument, target, usual if num_draft_tokens is None else num_draft_tokens)
