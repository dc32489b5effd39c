"""Randomness with roles: what may be shared, and what must never be reused.

Everything a row draws comes from its request key. *Cycle* noise is keyed by the anchor's position, a
role and a slot, so each cycle has fresh coins even where it stands at positions that an earlier cycle
had drafted and rejected. (Coins keyed by the token's own position would be reused there, which
biases rules that look at several positions at once.) *Token* noise is keyed by a token's absolute
position; plain sampling draws with it. Neither depends on batch mates or padding.

Gumbel noise is drawn in its finer mode: the usual one ends at 16 in float32, so that tokens rarer than
1e-7 would hardly ever be drawn.
"""

from __future__ import annotations

import dataclasses
import enum

import jax


class Role(enum.IntEnum):
    """What a number is drawn for."""

    DRAFT = 0  # the drafter's tokens
    VERDICT = 1  # how many of them are accepted
    RESIDUAL = 2  # the token after them


TOKEN = 2**32 - 1  # no anchor has this position


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Noise:
    """The randomness of one row in one cycle.

    Attributes:
      key: the request key, `fold_in(key of the call, index of the prompt)`; a typed threefry key
        (`rbg` keys give other numbers under vmap).
      position: `[]` int32, of the anchor.
      coupled: draft with the token noise of the drafted positions, as plain sampling would.
    """

    key: jax.Array
    position: jax.Array
    coupled: bool = dataclasses.field(default=False, metadata={"static": True})

    def cycle_key(self, role: Role, slot: jax.typing.ArrayLike = 0) -> jax.Array:
        """A key for this cycle only."""
        key = jax.random.fold_in(self.key, self.position)
        return jax.random.fold_in(jax.random.fold_in(key, role), slot)

    def token_gumbel(self, position: jax.Array, vocab_size: int) -> jax.Array:
        """`[V]` Gumbel noise of the token at an absolute position."""
        key = jax.random.fold_in(jax.random.fold_in(self.key, TOKEN), position)
        return jax.random.gumbel(key, (vocab_size,), mode="high")

    def draft_gumbel(
        self, node: jax.typing.ArrayLike, depth: jax.typing.ArrayLike, vocab_size: int
    ) -> jax.Array:
        """`[V]` Gumbel noise to draw what follows a node (0 is the anchor) at some depth with."""
        if self.coupled:
            return self.token_gumbel(self.position + 1 + depth, vocab_size)
        key = self.cycle_key(Role.DRAFT, node)
        return jax.random.gumbel(key, (vocab_size,), mode="high")

    def uniforms(self, role: Role, count: int) -> jax.Array:
        """`[count]` uniforms in [0, 1) of this cycle."""
        return jax.random.uniform(self.cycle_key(role), (count,))
