"""A loaded target: architecture, weights and tokenizer in one object."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.models.config import ModelConfig
from specjax.models.transformer import Transformer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclasses.dataclass(frozen=True, eq=False)
class Target:
    """The model whose text is to be kept exactly.

    Attributes:
      name: where it came from, for messages and results.
      config: its architecture.
      params: nested dict of arrays, passed to jitted functions as an argument.
      tokenizer: with its chat template, if there is one; None where only token ids are used.
      stop_tokens: ids that end a row (end of sequence, end of turn).
      known_hash: what `target_hash` says, where it was asked before the params were split over hosts.
    """

    name: str
    config: ModelConfig
    params: Any
    tokenizer: PreTrainedTokenizerFast | None = None
    stop_tokens: tuple[int, ...] = ()
    known_hash: str = ""

    @property
    def dtype(self) -> jnp.dtype:
        """Type of the weights (norm scales are float32), in which the model computes."""
        return self.params["embedding"].dtype

    @functools.cached_property
    def graphdef(self) -> Any:
        """The static half of `nnx.split`: `nnx.merge(graphdef, params)` is the Transformer."""
        return nnx.graphdef(nnx.eval_shape(lambda: Transformer(self.config, rngs=nnx.Rngs(0))))


def random_target(
    config: ModelConfig, seed: int = 0, *, dtype: jax.typing.DTypeLike = jnp.float32, **fields
) -> Target:
    """A target with random weights, for tests and for measuring shapes without a checkpoint.

    `fields` are passed to `Target` (tokenizer, stop_tokens).
    """
    state = nnx.state(Transformer(config, rngs=nnx.Rngs(seed), dtype=dtype))
    return Target("random", config, nnx.to_pure_dict(state), **fields)


def target_hash(target: Target) -> str:
    """Short hash of a target's architecture and of the first numbers of every weight.

    Numbers are compared in bfloat16: the same checkpoint in float32 is the same target.
    """
    return target.known_hash or weights_hash(repr(target.config), target.params)


def weights_hash(described: str, params: Any) -> str:
    """Short hash of what is said of a network and of the first numbers of every weight, in bfloat16."""
    digest = hashlib.sha256(described.encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        first = np.asarray(leaf.reshape(-1)[:256].astype(jnp.bfloat16))
        digest.update(jax.tree_util.keystr(path).encode() + first.tobytes())
    return digest.hexdigest()[:16]
