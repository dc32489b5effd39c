"""The target's own first layers as drafter, without any training.

Self-speculative decoding (Zhang et al. 2023; LayerSkip, Elhoushi et al. 2024): the first E blocks,
then the final norm and the head. They read the target's cache rows, which are the same in both uses;
verification recomputes the drafted tokens through all layers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx

from specjax.drafters import autoregressive
from specjax.drafters.stateless import Stateless
from specjax.models.config import ModelConfig
from specjax.models.target import Target
from specjax.models.transformer import Scratch
from specjax.noise import Noise
from specjax.trees import Tree
from specjax.types import Context, Draft, LoadedDrafter, PyTree


@dataclasses.dataclass(frozen=True)
class EarlyExit(autoregressive.TreeDrafter, Stateless):
    """Drafts with the target's first `exit_layer` blocks on the target's cache.

    Attributes:
      graphdef, config, dtype: of the target.
      exit_layer: E, blocks that are run.
      tree: what is drafted; a chain is one, too.
    """

    graphdef: Any
    config: ModelConfig
    dtype: jnp.dtype
    exit_layer: int
    tree: Tree
    taps: tuple[int, ...] = ()

    def __post_init__(self):
        if not 1 <= self.exit_layer < self.config.num_layers:
            raise ValueError(
                f"early_exit: exit layer must be 1…{self.config.num_layers - 1}, got "
                f"{self.exit_layer}"
            )

    def propose(
        self,
        params: PyTree,
        target_params: PyTree,
        state: PyTree,
        context: Context,
        noise: Noise | None,
    ) -> tuple[Draft, PyTree]:
        """Tokens of the processed distributions after block E."""
        model = nnx.merge(self.graphdef, target_params)
        start = context.length - 1

        def forward(tokens, positions, scratch, mask, parents):
            out = model(
                tokens, positions, context.target_cache, start, mask,
                scratch=scratch, depth=self.exit_layer,
            )  # fmt: skip
            return model.head(out.hidden), scratch.after(out.rows, positions)

        shallow = dataclasses.replace(
            self.config,
            num_layers=self.exit_layer,
            sliding_layers=self.config.sliding_layers[: self.exit_layer],
        )
        size = autoregressive.scratch_size(self.tree, 1)
        masked_slots = jnp.zeros(size, bool)

        def first_pass(scratch):
            own = jnp.zeros(1, jnp.int32)
            mask = autoregressive.chain_mask(own, masked_slots)
            anchor = context.tokens[start][None]
            logits, scratch = forward(anchor, start[None], scratch, mask, own - 1)
            return logits[0], scratch

        draft, _ = autoregressive.draft(
            first_pass, Scratch.empty(shallow, size, self.dtype), forward, start, self.tree, context,
            noise, first=1, vocab_size=self.config.vocab_size, masked_slots=masked_slots,
        )  # fmt: skip
        return draft, state


def early_exit(
    target: Target,
    exit_layer: int | None = None,
    num_draft_tokens: int = 4,
    tree: Tree | None = None,
) -> LoadedDrafter:
    """The target's first `exit_layer` blocks (by default half of them) as its drafter.

    It drafts a chain of `num_draft_tokens`, or a tree.
    """
    if exit_layer is None:
        exit_layer = target.config.num_layers // 2
    tree = tree or Tree.chain(num_draft_tokens)
    autoregressive.check_widths(tree, target.config.vocab_size)
    drafter = EarlyExit(target.graphdef, target.config, jnp.dtype(target.dtype), exit_layer, tree)
    return LoadedDrafter(drafter, (), f"early_exit:{exit_layer}")
