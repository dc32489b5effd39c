"""References and stand-ins that several tests use."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.drafters import NGram
from specjax.models.cache import KVCache
from specjax.models.transformer import Transformer, causal_mask
from specjax.types import Draft

PROMPTS = [
    [5, 9, 2, 5, 9],
    [7],
    [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3, 8, 3, 2, 7],
    [11, 12],
    [20, 21, 22, 20, 21, 22, 20, 21],
]


@functools.partial(jax.jit, static_argnames="graphdef")
def _logits(graphdef, params, tokens):
    model = nnx.merge(graphdef, params)
    cache = KVCache.zeros(model.config, 1, jnp.float32)
    positions = jnp.arange(tokens.shape[0])
    out = model(tokens, positions, cache, jnp.int32(0), causal_mask(tokens.shape[0]))
    return model.head(out.hidden)


def all_logits(target, tokens):
    """Logits `[T, V]` after each token from one pass without a cache: the reference for all."""
    return np.asarray(_logits(target.graphdef, target.params, jnp.asarray(tokens, jnp.int32)))


def reference_text(target, prompt, count, size=128):
    """Greedy continuation, recomputing everything for each token."""
    tokens = list(prompt)
    for _ in range(count):
        padded = np.zeros(size, np.int32)
        padded[: len(tokens)] = tokens
        tokens.append(int(np.argmax(all_logits(target, padded)[len(tokens) - 1])))
    return tokens[len(prompt) :]


@dataclasses.dataclass(frozen=True)
class Oracle(NGram):
    """Drafts from known texts, with the draft at `wrong_at` spoilt; invalid slots are absurd.

    `texts` are whole sequences, prompt included; the one whose first token the row has is used.
    """

    texts: tuple[tuple[int, ...], ...] = ()
    wrong_at: int = 99
    valid: int = 99

    def propose(self, params, target_params, state, context, noise):
        k = self.num_draft_tokens
        size = max(context.tokens.shape[0] + k, max(map(len, self.texts)))
        padded = np.zeros((len(self.texts), size), np.int32)
        for row, text in zip(padded, self.texts, strict=True):
            row[: len(text)] = text
        row = jnp.argmax(jnp.asarray(padded[:, 0]) == context.tokens[0])
        slots = jnp.arange(k)
        tokens = jnp.asarray(padded)[row, context.length + slots]
        tokens = jnp.where(slots == self.wrong_at, (tokens + 1) % 61, tokens)
        absurd = jnp.where(slots % 2 == 0, 2**31 - 1, -(2**31))
        tokens = jnp.where(slots < self.valid, tokens, absurd)
        return Draft(tokens, None, jnp.int32(min(k, self.valid))), state


def oracle(texts, **options):
    whole = tuple(tuple(p) + tuple(t) for p, t in zip(PROMPTS, texts, strict=True))
    return Oracle(texts=whole, **options)


def lookup(tokens, drafter):
    """Prompt lookup in plain Python; a copy that reaches the end goes on with itself."""
    for n in range(drafter.max_ngram, drafter.min_ngram - 1, -1):
        for end in range(len(tokens) - 2, n - 2, -1):
            if tokens[end - n + 1 : end + 1] == tokens[len(tokens) - n :]:
                text = list(tokens)
                for k in range(drafter.num_draft_tokens):
                    text.append(text[end + 1 + k])
                return text[len(tokens) :]
    return []


def count_draft_passes(monkeypatch):
    """Two lists: one entry a pass that `early_exit` takes, and one a pass of any network traced.

    What is compiled already is not counted: take sizes that nobody else has.
    """
    taken, traced, call = [], [], Transformer.__call__

    def counted(self, tokens, *rest, **options):
        traced.append(tokens.shape)
        if options.get("depth") is not None:
            jax.debug.callback(lambda: taken.append(1))
        return call(self, tokens, *rest, **options)

    monkeypatch.setattr(Transformer, "__call__", counted)
    return taken, traced
