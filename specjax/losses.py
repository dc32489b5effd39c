"""Divergences between a target's and a drafter's distribution, from logits, one value a token.

All take the target's and the drafter's logits `[…, V]` of any float type, compute in float32 in log
space and return `[…]` float32. p is the target's distribution, q the drafter's; gradients go to the
drafter's logits only. A token that both exclude (−inf) counts nowhere. Reduction and masks are the
caller's.

With z the drafter's logits the gradients are (see DistillSpec, Zhou et al. 2023):

| loss | value | ∂/∂z |
|---|---|---|
| `forward_kl` | Σ p log(p / q) | q − p |
| `reverse_kl` | Σ q log(q / p) | q · (log(q / p) − KL(q‖p)) |
| `total_variation` | 1 − Σ min(p, q) | −q · (1[q < p] − Σ q 1[q < p]) |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import optax

EXCLUDED = -1e30  # in place of −inf, whose differences are NaN; its exponential is 0


def _log_softmax(logits: jax.Array) -> jax.Array:
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    return jnp.maximum(jax.nn.log_softmax(wide), EXCLUDED)


def _kl(log_p: jax.Array, log_q: jax.Array) -> jax.Array:
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)


def _with_gradient(rule: Callable[..., tuple[jax.Array, jax.Array]]) -> Callable[..., jax.Array]:
    """A loss of logits from a rule (log p, log q, options) → (value, gradient by draft logits).

    Autodiff would keep and walk several arrays of the vocabulary's size a token; this keeps one.
    """

    def loss(target_logits: jax.Array, draft_logits: jax.Array, **options: float) -> jax.Array:
        @jax.custom_vjp
        def value(target_logits: jax.Array, draft_logits: jax.Array) -> jax.Array:
            return forward(target_logits, draft_logits)[0]

        def forward(
            target_logits: jax.Array, draft_logits: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            logs = _log_softmax(target_logits), _log_softmax(draft_logits)
            told, gradient = rule(*logs, **options)
            return told, gradient.astype(draft_logits.dtype)

        def backward(gradient: jax.Array, cotangent: jax.Array) -> tuple[None, jax.Array]:
            return None, (cotangent[..., None] * gradient).astype(gradient.dtype)

        value.defvjp(forward, backward)
        return value(target_logits, draft_logits)

    loss.__name__, loss.__doc__ = rule.__name__, rule.__doc__
    return loss


@_with_gradient
def forward_kl(log_p: jax.Array, log_q: jax.Array) -> tuple[jax.Array, jax.Array]:
    """KL(p‖q) = Σ p log(p / q). Its gradient never vanishes while q ≠ p."""
    return _kl(log_p, log_q), jnp.exp(log_q) - jnp.exp(log_p)


@_with_gradient
def reverse_kl(log_p: jax.Array, log_q: jax.Array) -> tuple[jax.Array, jax.Array]:
    """KL(q‖p) = Σ q log(q / p)."""
    value = _kl(log_q, log_p)
    return value, jnp.exp(log_q) * (log_q - log_p - value[..., None])


@_with_gradient
def jensen_shannon(
    log_p: jax.Array, log_q: jax.Array, beta: float = 0.5
) -> tuple[jax.Array, jax.Array]:
    """JSD(β) = β KL(p‖m) + (1 − β) KL(q‖m), m = β p + (1 − β) q, 0 < β < 1 (Agarwal et al. 2024)."""
    log_m = jnp.logaddexp(log_p + jnp.log(beta), log_q + jnp.log1p(-beta))
    from_q = _kl(log_q, log_m)
    gradient = (1 - beta) * jnp.exp(log_q) * (log_q - log_m - from_q[..., None])
    return beta * _kl(log_p, log_m) + (1 - beta) * from_q, gradient


def _overlap(log_p: jax.Array, log_q: jax.Array) -> tuple[jax.Array, jax.Array]:
    """α = Σ min(p, q), and its gradient."""
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    below = jnp.where(q < p, q, 0)
    return jnp.minimum(p, q).sum(-1), below - q * below.sum(-1, keepdims=True)


@_with_gradient
def total_variation(log_p: jax.Array, log_q: jax.Array) -> tuple[jax.Array, jax.Array]:
    """1 − α: half of Σ |p − q|. α = Σ min(p, q) is the probability that a draft is accepted.

    Its gradient vanishes where q is tiny: it improves a drafter that is near, and moves none from afar.
    """
    alpha, gradient = _overlap(log_p, log_q)
    return 1 - alpha, -gradient


@_with_gradient
def lk_hybrid(log_p: jax.Array, log_q: jax.Array, eta: float = 3.0) -> tuple[jax.Array, jax.Array]:
    """λ KL(p‖q) + (1 − λ) TV(p, q), λ = exp(−η α) (LK losses, 2026): from far to near.

    λ is taken at each token, with no gradient through it.
    """
    alpha, gradient = _overlap(log_p, log_q)
    share = jnp.exp(-eta * alpha)
    value = share * _kl(log_p, log_q) + (1 - share) * (1 - alpha)
    share = share[..., None]
    return value, share * (jnp.exp(log_q) - jnp.exp(log_p)) - (1 - share) * gradient


def cross_entropy(tokens: jax.Array, draft_logits: jax.Array) -> jax.Array:
    """−log q of the tokens that were said, `[…]` int32."""
    wide = draft_logits.astype(jnp.promote_types(draft_logits.dtype, jnp.float32))
    return optax.losses.softmax_cross_entropy_with_integer_labels(wide, tokens)


DIVERGENCES: Mapping[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jensen_shannon": jensen_shannon,
    "total_variation": total_variation,
    "lk_hybrid": lk_hybrid,
}
LOSSES = (*DIVERGENCES, "cross_entropy")


@dataclasses.dataclass(frozen=True)
class Losses:
    """What an objective computes, and how.

    Attributes:
      names: of `LOSSES`.
      remat: logits and the drafter's inner states are computed again in the backward pass, not kept.
    """

    names: tuple[str, ...]
    remat: bool = True

    def __post_init__(self):
        for name in self.names:
            if name not in LOSSES:
                raise ValueError(f"unknown loss {name!r}; known: {', '.join(LOSSES)}")


def acceptance(
    target_logits: jax.Array, draft_logits: jax.Array, log_mass: jax.typing.ArrayLike = 0.0
) -> jax.Array:
    """α = Σ min(p, q), the probability that a draft is accepted; without a gradient.

    Args:
      target_logits, draft_logits: of the tokens that can be drafted.
      log_mass: `[…]`, log of the target's probability of them all.
    """
    log_p = _log_softmax(target_logits) + jnp.expand_dims(log_mass, -1)
    return jax.lax.stop_gradient(_overlap(log_p, _log_softmax(draft_logits))[0])


def token_losses(
    names: tuple[str, ...],
    tokens: jax.Array,
    target_logits: jax.Array,
    draft_logits: jax.Array,
    log_mass: jax.typing.ArrayLike = 0.0,
) -> dict[str, jax.Array]:
    """The named losses and `alpha` (see `acceptance`), `[…]` each."""
    values = {"alpha": acceptance(target_logits, draft_logits, log_mass)}
    for name in names:
        if name == "cross_entropy":
            values[name] = cross_entropy(tokens, draft_logits)
        else:
            values[name] = DIVERGENCES[name](target_logits, draft_logits)
    return values


def weighted_sums(
    one: Callable[..., dict[str, jax.Array]],
    weights: jax.Array,
    *arrays: jax.Array,
    chunk: int = 128,
    remat: bool = True,
) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Sums losses over tokens, a chunk of them at a time.

    Logits of all tokens at once, `[T, V]`, would be the largest arrays of a training step, and exist
    for the target, the drafter and their gradients. Here those of one chunk do; the backward pass
    computes them again. Tokens that count nowhere come last, and chunks of nothing else are skipped
    (but not under `vmap`, which knows no condition).

    Args:
      one: slices of `arrays` → {name: value of each token, and of each column of the weights}.
      weights: `[T]`, or `[T, K]` where a token has K losses.
      arrays: `[T, …]` each.
      chunk: tokens at a time.
      remat: False keeps all logits for the backward pass instead: faster, where there is room.

    Returns:
      {name: (Σ weight · value, Σ weight)}, `[]` or `[K]` each.
    """
    length = weights.shape[0]
    size = min(chunk, length)
    counts = (weights > 0).reshape(length, -1).any(-1)
    counted_first = jnp.argsort(~counts, stable=True)

    def fold(x: jax.Array) -> jax.Array:
        padding = [(0, -length % size)] + [(0, 0)] * (x.ndim - 1)
        return jnp.pad(x[counted_first], padding).reshape(-1, size, *x.shape[1:])

    def sums(weights: jax.Array, *slices: jax.Array) -> dict[str, jax.Array]:
        # What does not count may be anything, and must not reach the gradient: NaN · 0 is NaN.
        counts = (weights > 0).reshape(size, -1).any(-1)
        slices = (jnp.where(jnp.expand_dims(counts, range(1, x.ndim)), x, 0) for x in slices)
        return {
            name: jnp.where(weights > 0, weights * value, 0).sum(0)
            for name, value in one(*slices).items()
        }

    def nothing(*xs: jax.Array) -> dict[str, jax.Array]:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(sums, *xs))

    def step(xs: tuple[jax.Array, ...]) -> dict[str, jax.Array]:
        return jax.lax.cond((xs[0] > 0).any(), sums, nothing, *xs)

    folded = jax.lax.map(
        jax.checkpoint(step) if remat else step, tuple(map(fold, (weights, *arrays)))
    )
    return {name: (value.sum(0), weights.sum(0)) for name, value in folded.items()}
