"""Prompt lookup: the text after the last occurrence of the current n-gram is the draft.

Saxena, "Prompt Lookup Decoding" (2023). No network and no training: it pays where the answer
repeats its prompt or itself, as in summaries, edits and code.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from specjax.drafters.stateless import Stateless
from specjax.noise import Noise
from specjax.types import Context, Draft, PyTree


@dataclasses.dataclass(frozen=True)
class NGram(Stateless):
    """Drafts what followed the longest, then latest, match of the text's last tokens.

    Attributes:
      num_draft_tokens: K.
      max_ngram: longest suffix that is looked up.
      min_ngram: shortest match that is drafted from. With 1 more cycles have a draft; with 2 fewer
        drafts are wrong, which pays where verifying K + 1 tokens costs much more than one.
    """

    num_draft_tokens: int = 8
    max_ngram: int = 3
    min_ngram: int = 1
    taps: tuple[int, ...] = ()

    def __post_init__(self):
        if self.num_draft_tokens < 1:
            raise ValueError(f"num_draft_tokens must be at least 1, got {self.num_draft_tokens}")
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ValueError(
                f"expected 1 ≤ min_ngram ≤ max_ngram, got {self.min_ngram} and {self.max_ngram}"
            )

    @property
    def draft_depth(self) -> int:
        """The most that can be accepted."""
        return self.num_draft_tokens

    def propose(
        self,
        params: PyTree,
        target_params: PyTree,
        state: PyTree,
        context: Context,
        noise: Noise | None,
    ) -> tuple[Draft, PyTree]:
        """All K tokens are valid, or none where no match is long enough.

        ```
        tokens   a b c d … a b c │        suffix "a b c", longest match ends at the first c
                         ▲ copied from here on; past the anchor the copy goes on with itself
        ```

        For every end position e before the anchor, `matched[e]` counts how many tokens before and
        at e equal the last ones of the text. Only strictly earlier ends are candidates, so there is
        always at least one token to copy. A copy that reaches the anchor repeats with the period
        anchor − e, as in LZ77: a loop of any period is drafted K tokens far.
        """
        tokens, anchor = context.tokens, context.length - 1
        ends = jnp.arange(tokens.shape[0])
        matched = jnp.zeros_like(ends)
        equal_so_far = ends < anchor
        for back in range(self.max_ngram):
            before = jnp.roll(tokens, back)  # before[e] = tokens[e − back]
            equal_so_far &= (ends >= back) & (before == tokens[anchor - back])
            matched = matched + equal_so_far
        end = jnp.argmax(matched * tokens.shape[0] + ends)
        period = jnp.maximum(anchor - end, 1)
        copied = tokens[end + 1 + jnp.arange(self.num_draft_tokens) % period]
        num_valid = jnp.where(matched[end] >= self.min_ngram, self.num_draft_tokens, 0)
        return Draft(tokens=copied, log_q=None, num_valid=num_valid), state
