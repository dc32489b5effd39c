"""One training step and one evaluation step: pure functions of state and batch."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax.distillation.features import Batch, traces
from specjax.losses import Losses
from specjax.models.sharding import param_shardings
from specjax.types import PyTree, Terms, Trace, Trainable


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What training changes.

    Attributes:
      step: `[]` int32, updates done or skipped.
      params: float32 masters.
      opt_state: of the optimizer.
      average: exponential moving average of the params; None where there is none.
      key: from which every step folds its own.
    """

    step: jax.Array
    params: PyTree
    opt_state: PyTree
    average: PyTree | None
    key: jax.Array

    @property
    def best_params(self) -> PyTree:
        """The average where there is one: what is evaluated and exported."""
        return self.params if self.average is None else self.average


def compute_params(params: PyTree, dtype: jax.typing.DTypeLike) -> PyTree:
    """Master params in the type of the computation; norm scales stay float32."""
    return jax.tree.map(lambda x: x.astype(dtype) if x.ndim > 1 else x, params)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The static part of a step.

    Attributes:
      graphdef: of the target.
      drafter: what is trained.
      optimizer: from `optimizers.make_optimizer`.
      losses: (name, coefficient) of each loss.
      dtype: in which the drafter computes.
      average_decay: of the moving average; 0 for none.
      remat: compute inner states and logits again in the backward pass.
    """

    graphdef: Any
    drafter: Trainable
    optimizer: optax.GradientTransformation
    losses: tuple[tuple[str, float], ...]
    dtype: Any
    average_decay: float = 0.0
    remat: bool = True

    @property
    def terms(self) -> list[tuple[str, float]]:
        """(name, coefficient) of each term that is minimised."""
        return list(self.drafter.terms_of(dict(self.losses)).items())

    def traces(self, target_params: PyTree, batch: Batch) -> Trace:
        """What the target made of a batch."""
        return traces(self.graphdef, target_params, self.drafter.taps, batch)

    def row_terms(
        self, params: PyTree, target_params: PyTree, batch: Batch, keys: jax.Array
    ) -> Terms:
        """The objective's terms, summed over the rows of a batch `[B, T]`; each row has its key."""
        losses = Losses(tuple(name for name, _ in self.losses), self.remat)
        params = compute_params(params, self.dtype)
        one = functools.partial(self.drafter.objective, params, target_params, losses=losses)
        trace = self.traces(target_params, batch)
        if len(keys) == 1:  # conditions stay conditions
            return one(*jax.tree.map(lambda x: x[0], (trace, keys)))
        return jax.tree.map(lambda x: x.sum(0), jax.vmap(one)(trace, keys))


def new_state(recipe: Recipe, params: PyTree, seed: int, mesh: Mesh) -> TrainState:
    """The state of step 0, every array where the mesh wants it from the beginning."""

    def build(params: PyTree) -> TrainState:
        params = jax.tree.map(lambda x: x.astype(jnp.float32), params)
        average = jax.tree.map(jnp.copy, params) if recipe.average_decay else None
        opt_state = recipe.optimizer.init(params)
        return TrainState(jnp.int32(0), params, opt_state, average, jax.random.key(seed))

    shardings = state_shardings(recipe, jax.eval_shape(build, params), mesh)
    params = jax.device_put(params, param_shardings(params, mesh))
    return jax.jit(build, out_shardings=shardings)(params)


def state_shardings(recipe: Recipe, state: TrainState, mesh: Mesh) -> TrainState:
    """Where each array of a state lies: moments with their params, the rest everywhere."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    params = param_shardings(state.params, mesh)

    def masked(x: Any) -> bool:  # Muon keeps nothing of what Adam updates, and the other way round
        return isinstance(x, optax.MaskedNode)

    opt_state = optax.tree.map_params(
        recipe.optimizer, lambda x, sharding: x if masked(x) else sharding, state.opt_state, params,
        transform_non_params=lambda _: everywhere, is_leaf=masked,
    )  # fmt: skip
    average = None if state.average is None else params
    return TrainState(everywhere, params, opt_state, average, everywhere)


@functools.partial(jax.jit, static_argnames=("recipe",), donate_argnames=("state",))
def train_step(
    recipe: Recipe, state: TrainState, target_params: PyTree, batch: Batch
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One update from a batch of A micro-batches, `[A, B, T]`.

    Every sum of a term is divided by its weight over the whole batch, on all devices and in all
    micro-batches: how the batch is cut changes nothing. Where loss or gradient is not finite the state
    keeps its params.

    Returns:
      The state, and metrics: `loss`, every term's mean, `grad_norm`, `param_norm`.
    """
    shape = batch["tokens"].shape[:2]
    keys = jax.random.split(jax.random.fold_in(state.key, state.step), shape)  # by row, uncut

    def weights(micro: Batch, keys: jax.Array) -> dict[str, jax.Array]:
        terms = recipe.row_terms(state.params, target_params, micro, keys)
        return {name: weight for name, (_, weight) in terms.items()}

    # Weights depend on the text alone, so that XLA leaves the networks out of this.
    totals = jax.tree.map(lambda x: jnp.maximum(x.sum(0), 1e-9), jax.vmap(weights)(batch, keys))

    def share(params: PyTree, micro: Batch, keys: jax.Array) -> tuple[jax.Array, dict]:
        terms = recipe.row_terms(params, target_params, micro, keys)
        means = {name: value / totals[name] for name, (value, _) in terms.items()}
        return sum(factor * means[name] for name, factor in recipe.terms), means

    def accumulate(carry: tuple, xs: tuple) -> tuple[tuple, None]:
        (loss, means), gradient = jax.value_and_grad(share, has_aux=True)(state.params, *xs)
        return jax.tree.map(jnp.add, carry, (loss, means, gradient)), None

    shapes = jax.eval_shape(share, state.params, jax.tree.map(lambda x: x[0], batch), keys[0])
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (*shapes, state.params))
    (loss, means, gradient), _ = jax.lax.scan(accumulate, zeros, (batch, keys))

    norm = optax.tree.norm(gradient)
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    updates, opt_state = recipe.optimizer.update(gradient, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    average = state.average
    if average is not None:
        average = optax.incremental_update(params, average, 1 - recipe.average_decay)
    new = TrainState(state.step, params, opt_state, average, state.key)
    new = jax.tree.map(lambda x, old: jnp.where(finite, x, old), new, state)
    new = dataclasses.replace(new, step=state.step + 1)
    metrics = {"loss": loss, **means, "grad_norm": norm, "param_norm": optax.tree.norm(params)}
    return new, metrics


@functools.partial(jax.jit, static_argnames=("recipe",))
def evaluation_step(
    recipe: Recipe, params: PyTree, target_params: PyTree, batch: Batch, key: jax.Array
) -> Terms:
    """The terms of a batch `[B, T]`, summed over its rows."""
    keys = jax.random.split(key, batch["tokens"].shape[0])
    return recipe.row_terms(params, target_params, batch, keys)


@functools.partial(jax.jit, static_argnames=("recipe",))
def agreement_step(
    recipe: Recipe, params: PyTree, target_params: PyTree, batch: Batch
) -> tuple[jax.Array, jax.Array]:
    """`Trainable.agreement` of a batch, `[B, T, K]`, and what is supervised, `[B, T]` bool."""
    trace = recipe.traces(target_params, batch)
    params = compute_params(params, recipe.dtype)
    one = functools.partial(recipe.drafter.agreement, params, target_params)
    return jax.vmap(one)(trace), trace.weights > 0
