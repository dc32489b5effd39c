"""Controllers for any drafter: how much of a draft is verified (`specjax.types.Controller`)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from specjax.types import Draft


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Fixed:
    """Verifies the same number of tokens in every cycle.

    Attributes:
      length: `[]` int32.
    """

    length: jax.Array

    def __call__(self, drafts: Draft, running: jax.Array) -> jax.Array:
        """`[B]`, see `specjax.types.Controller`."""
        return jnp.broadcast_to(self.length, drafts.num_valid.shape)
