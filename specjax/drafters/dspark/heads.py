"""DSpark's small heads: what the token before a slot adds to its logits, and how sure the slot is.

With h the trunk's state of a slot and e = W_1[x], x the token before it (DeepSeek-AI 2026, §3):

| kind | bias of the logits | |
|---|---|---|
| `vanilla` | W_2 e | |
| `gated` | W_2 (g ⊙ e) | g = σ(W_g [h ; e] + b) |
| `rnn` | W_2 tanh(o) | [g ; c ; o] = W_j [s ; e ; h] + b, then s ← σ(g) ⊙ s + (1 − σ(g)) ⊙ tanh(c) |

Confidence: σ(w · [h ; e] + b), the chance that the draft is accepted.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models.transformer import project_to_vocabulary

KINDS = ("vanilla", "gated", "rnn")


class MarkovHead(nnx.Module):
    """`embedding` [V, r] is W_1, `head_weight` [V, r] W_2."""

    def __init__(
        self,
        kind: str,
        vocab_size: int,
        hidden_size: int,
        rank: int,
        *,
        rngs: nnx.Rngs,
        dtype: jax.typing.DTypeLike = jnp.float32,
    ):
        def weight(*shape):
            return nnx.Param(0.01 * jax.random.normal(rngs.params(), shape, dtype))

        self.kind = kind
        self.embedding = weight(vocab_size, rank)
        self.head_weight = weight(vocab_size, rank)
        outputs = {"vanilla": 0, "gated": rank, "rnn": 3 * rank}[kind]
        if outputs:
            inputs = hidden_size + rank * (2 if kind == "rnn" else 1)
            self.mix, self.mix_bias = weight(inputs, outputs), nnx.Param(jnp.zeros(outputs, dtype))

    def embed(self, tokens: jax.Array) -> jax.Array:
        """e of tokens `[…]`, `[…, r]`."""
        return self.embedding[...][jnp.clip(tokens, 0, len(self.embedding[...]) - 1)]

    def first_state(self) -> jax.Array:
        """s of a block's first slot, `[r]`."""
        return jnp.zeros(self.embedding[...].shape[1], self.embedding[...].dtype)

    def step(
        self, state: jax.Array, embedded: jax.Array, hidden: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """What W_2 is applied to, `[r]`, and the next state, of one slot `[r]`, `[r]`, `[D]`."""
        if self.kind == "vanilla":
            return embedded, state
        parts = [hidden, embedded] if self.kind == "gated" else [state, embedded, hidden]
        mix = self.mix[...]
        mixed = jnp.concatenate(parts) @ mix + self.mix_bias[...].astype(mix.dtype)
        if self.kind == "gated":
            return jax.nn.sigmoid(mixed) * embedded, state
        gate, candidate, output = jnp.split(mixed, 3)
        gate = jax.nn.sigmoid(gate)
        return jnp.tanh(output), gate * state + (1 - gate) * jnp.tanh(candidate)

    def along(self, tokens: jax.Array, hidden: jax.Array) -> jax.Array:
        """What W_2 is applied to in every slot of a block, `[K, r]`, the tokens `[K]` given.

        Rows are taken in float32: a frequent token's gradient is a long sum, which bfloat16 would end.
        """
        table = self.embedding[...]
        embedded = table.astype(jnp.float32)[jnp.clip(tokens, 0, len(table) - 1)]

        def one(state, xs):
            inner, state = self.step(state, *xs)
            return state, inner

        xs = embedded.astype(table.dtype), hidden
        return jax.lax.scan(one, self.first_state(), xs)[1]

    def bias(self, inner: jax.Array) -> jax.Array:
        """`[…, r]` → float32 `[…, V]`."""
        return project_to_vocabulary(inner, self.head_weight[...])


class ConfidenceHead(nnx.Module):
    """Logits of acceptance of slots `[…, D]`, with `[…, r]` of the tokens before them."""

    def __init__(self, inputs: int, *, rngs: nnx.Rngs, dtype: jax.typing.DTypeLike = jnp.float32):
        self.weight = nnx.Param(0.01 * jax.random.normal(rngs.params(), (inputs, 1), dtype))
        self.weight_bias = nnx.Param(jnp.zeros(1, dtype))

    def __call__(self, *parts: jax.Array) -> jax.Array:
        """`[…]` float32."""
        inputs = jnp.concatenate(parts, axis=-1)
        return (inputs @ self.weight[...] + self.weight_bias[...])[..., 0].astype(jnp.float32)
