"""DSpark as a drafter: DFlash's trunk, whose slots hear what the one before them said."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from specjax.drafters.dflash.drafter import DFlash
from specjax.drafters.dspark.heads import KINDS, ConfidenceHead, MarkovHead
from specjax.losses import Losses
from specjax.models.transformer import logits_of
from specjax.noise import Noise
from specjax.sampling import Sampling, argmax, log_probs, sample
from specjax.types import Draft, PyTree


@dataclasses.dataclass(frozen=True)
class DSpark(DFlash):
    """Drafts a block in one pass, then walks it (DSpark, DeepSeek-AI 2026).

    ```
    committed   t0 t1 t2 t3               anchor t3 at position 3
    trunk       [t3 mask mask]            at 3 4 5: slot k gives the token of position 3 + k + 1
    walk        d4 from slot 0 and t3;  d5 from slot 1 and d4;  d6 from slot 2 and d5
    ```

    Each token is drawn from a law that depends on the one before it, and the draft carries exactly
    that law.

    Attributes:
      markov_rank: r.
      markov_head: `vanilla`, `gated` or `rnn`.
      confidence: also learn how likely each draft is accepted; its coefficient in the objective, 0
        for no such head.
      confidence_with_markov: the head sees the token before, too.
      detach_confidence: it does not move the trunk.
      confidence_temperatures: of the slots' logits of confidence, fitted by `calibration`; the last
        is that of all further slots, none is 1.
    """

    markov_rank: int = 256
    markov_head: str = "vanilla"
    confidence: float = 1.0
    confidence_with_markov: bool = True
    detach_confidence: bool = False
    confidence_temperatures: tuple[float, ...] = ()

    first_slot = 0  # the anchor's slot predicts, too
    prefix_only = True

    def __post_init__(self):
        super().__post_init__()
        if self.markov_head not in KINDS:
            raise ValueError(f"unknown Markov head {self.markov_head!r}; known: {', '.join(KINDS)}")

    @property
    def confident(self) -> bool:
        """Whether there is a confidence head."""
        return bool(self.confidence)

    def markov(self, params: PyTree) -> MarkovHead:
        """The head of the token before."""
        return nnx.merge(markov_graphdef(self), params["markov"])

    def _choose(
        self,
        params: PyTree,
        target_params: PyTree,
        hidden: jax.Array,
        anchor: jax.Array,
        sampling: Sampling | None,
        noise: Noise | None,
    ) -> Draft:
        """Slot after slot, each with the token before it."""
        head, base = self.markov(params), logits_of(target_params, hidden)

        def step(carry: tuple[jax.Array, jax.Array], xs: tuple) -> tuple[tuple, tuple]:
            token, state = carry
            slot, hidden, logits = xs
            inner, state = head.step(state, head.embed(token), hidden)
            logits = logits + head.bias(inner)
            finite = jnp.isfinite(logits.max())
            if noise is None:
                token, log_q = argmax(logits), None
            else:
                law = log_probs(logits, sampling)
                token = sample(law, noise.draft_gumbel(slot, slot, logits.shape[-1]))
                log_q = None if noise.coupled else law
            return (token, state), (token, log_q, finite)

        slots = jnp.arange(len(hidden))
        first = anchor.astype(jnp.int32), head.first_state()
        _, (tokens, log_q, finite) = jax.lax.scan(step, first, (slots, hidden, base))
        told = None
        if self.confident:
            before = jnp.append(anchor, tokens[:-1])
            sure = self.confidence_logits(params, before, hidden)
            told = jax.nn.sigmoid(sure / self._temperatures(len(slots)))
        valid = jnp.cumprod(finite.astype(jnp.int32)).sum()
        return Draft(tokens, log_q, valid, confidence=told)

    def _temperatures(self, slots: int) -> jax.Array:
        """`[slots]`, of the logits of confidence."""
        known = self.confidence_temperatures or (1.0,)
        return jnp.asarray([known[min(slot, len(known) - 1)] for slot in range(slots)], jnp.float32)

    def terms_of(self, losses: Mapping[str, float]) -> dict[str, float]:
        """A loss is one term; confidence is one more."""
        return dict(losses) | ({"confidence": self.confidence} if self.confidence else {})

    def _values(
        self,
        params: PyTree,
        target_params: PyTree,
        losses: Losses,
        before: jax.Array,
        tokens: jax.Array,
        target_hidden: jax.Array,
        hidden: jax.Array,
    ) -> dict[str, jax.Array]:
        """The losses of the corrected logits, and of the confidence in them (§3.4)."""
        arrays = before, tokens, target_hidden, hidden
        values = super()._values(params, target_params, losses, *arrays)
        if self.confidence:
            wanted = values["alpha"]  # has no gradient
            sure = self.confidence_logits(params, before, hidden)
            values["confidence"] = optax.losses.sigmoid_binary_cross_entropy(sure, wanted)
        return values

    def confidence_logits(self, params: PyTree, before: jax.Array, hidden: jax.Array) -> jax.Array:
        """Logits of acceptance of slots `[…, D]` behind tokens `[…]`."""
        parts = [hidden]
        if self.confidence_with_markov:
            parts.append(self.markov(params).embed(before))
        if self.detach_confidence:
            parts = jax.lax.stop_gradient(parts)
        return nnx.merge(confidence_graphdef(self), params["confidence"])(*parts)

    def _heads(self, params: PyTree, target_params: PyTree) -> tuple[PyTree, PyTree]:
        params, target_params = super()._heads(params, target_params)
        if self.loss_vocabulary:
            rows = params["markov"]["head_weight"][self.loss_vocabulary.array]
            params = params | {"markov": params["markov"] | {"head_weight": rows}}
        return params, target_params

    def _logits(
        self, params: PyTree, target_params: PyTree, before: jax.Array, hidden: jax.Array
    ) -> jax.Array:
        head = self.markov(params)
        inner = jax.vmap(head.along)(before, hidden)
        base = super()._logits(params, target_params, before, hidden)
        return base + head.bias(inner.reshape(len(base), -1))


def new_markov(drafter: DSpark, rngs: nnx.Rngs) -> MarkovHead:
    """A drafter's Markov head, at random."""
    config = drafter.config
    return MarkovHead(
        drafter.markov_head, config.vocab_size, config.hidden_size, drafter.markov_rank,
        rngs=rngs, dtype=drafter.dtype,
    )  # fmt: skip


def new_confidence(drafter: DSpark, rngs: nnx.Rngs) -> ConfidenceHead:
    """A drafter's confidence head, at random."""
    seen = drafter.markov_rank if drafter.confidence_with_markov else 0
    return ConfidenceHead(drafter.config.hidden_size + seen, rngs=rngs, dtype=drafter.dtype)


@functools.cache
def markov_graphdef(drafter: DSpark) -> Any:
    """The static half of the Markov head."""
    return nnx.graphdef(nnx.eval_shape(lambda: new_markov(drafter, nnx.Rngs(0))))


@functools.cache
def confidence_graphdef(drafter: DSpark) -> Any:
    """The static half of the confidence head."""
    return nnx.graphdef(nnx.eval_shape(lambda: new_confidence(drafter, nnx.Rngs(0))))
