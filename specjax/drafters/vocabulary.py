"""A subset of the target's tokens: those that a drafter can say, or that a loss compares."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class DraftVocabulary:
    """Token i of the subset is the target's token `ids[i]`.

    What EAGLE-3 cannot say has q = 0, which loses no exactness.

    Attributes:
      ids: ascending ids of the target (EAGLE-3's `d2t`, without its offsets).
      target_size: V of the target.

    Raises:
      ValueError: an id is outside the target's vocabulary, or they do not ascend.
    """

    ids: tuple[int, ...]
    target_size: int

    def __post_init__(self):
        ids = np.asarray(self.ids)
        outside = ids[(ids < 0) | (ids >= self.target_size)]
        if outside.size:
            raise ValueError(
                f"draft vocabulary: token {outside[0]} is outside the target's {self.target_size}"
            )
        wrong = np.flatnonzero(np.diff(ids) <= 0)
        if wrong.size:
            at = wrong[0]
            raise ValueError(
                f"draft vocabulary: ids must ascend, got {self.ids[at]} before {self.ids[at + 1]}"
            )

    def __len__(self) -> int:
        return len(self.ids)

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:  # of thousands of ids, asked for in every call of a jitted function
        return hash((self.ids, self.target_size))

    @classmethod
    def of_counts(cls, counts: np.ndarray, size: int, option: str) -> DraftVocabulary:
        """The most frequent tokens (EAGLE-3, Li et al. 2025), the lower id among equals.

        Args:
          counts: `[V]`, how often the target says each token.
          size: how many to keep.
          option: that asks for it, for the message.
        """
        if not 1 <= size <= len(counts):
            raise ValueError(f"{option} must be 1…{len(counts)}, got {size}")
        kept = np.sort(np.argsort(-np.asarray(counts), kind="stable")[:size])
        return cls(tuple(kept.tolist()), len(counts))

    @functools.cached_property
    def array(self) -> np.ndarray:
        """`[V_d]` int32."""
        return np.asarray(self.ids, np.int32)

    def tokens(self, index: jax.Array) -> jax.Array:
        """Draft tokens `[…]` as the target's."""
        return jnp.asarray(self.array)[index]

    def spread(self, logits: jax.Array) -> jax.Array:
        """Logits `[…, V_d]` as `[…, V]`, −inf for what cannot be drafted."""
        full = jnp.full((*logits.shape[:-1], self.target_size), -jnp.inf, logits.dtype)
        return full.at[..., self.array].set(logits)

    def restrict(self, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The target's logits `[…, V]` of what can be drafted, `[…, V_d]`, and the log of its mass."""
        kept = logits[..., self.array]
        return kept, jax.nn.logsumexp(kept, axis=-1) - jax.nn.logsumexp(logits, axis=-1)

    def locate(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The target's tokens `[…]` as draft tokens, and whether they are any."""
        ids = jnp.asarray(self.array)
        index = jnp.clip(jnp.searchsorted(ids, tokens), 0, len(self) - 1)
        return index, ids[index] == tokens
