"""Metrics against a recount by hand, from nothing but the transcript of each row."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import specjax
from specjax import StopReason, drafters
from specjax.drafters import NGram
from specjax.evaluation.transcript import Origin, origins

DRAFTERS = {
    "ngram": (lambda tiny: NGram(3), {}),
    "early exit": (lambda tiny: drafters.early_exit(tiny, 2, 4), {"temperature": 1.0}),
}


def cycles(told):
    """Accepted tokens of each cycle, which ends at the first token that was not drafted."""
    counts, accepted = [], 0
    for origin in told:
        if origin is Origin.ACCEPTED:
            accepted += 1
        else:
            counts.append(accepted)
            accepted = 0
    return [*counts, accepted] if accepted else counts


@pytest.mark.parametrize("name", DRAFTERS)
def test_25_runs_with_stop_tokens_everywhere(tiny, name):
    make, sampling = DRAFTERS[name]
    rng = np.random.default_rng(len(name))
    prompts = [rng.integers(0, 12, rng.integers(1, 9)).tolist() for _ in range(25)]
    done = specjax.decode(
        tiny, make(tiny), prompts, max_new_tokens=rng.integers(1, 40, 25).tolist(),
        stop_tokens=[3, 17, 30, 44], key=jax.random.key(len(name)), **sampling,
    )  # fmt: skip
    ends = set(done.stop_reason)
    assert StopReason.EOS in ends and len({len(row) for row in done.tokens}) > 3
    counted = []
    for row in range(25):
        told = origins(done, row)
        assert len(told) == len(done.tokens[row])
        own = cycles(told)
        assert own == done.accepted[row].tolist()
        counted += own
    tokens = sum(len(row) for row in done.tokens)
    assert done.tau == pytest.approx(tokens / len(counted))
    assert done.target_passes == len(counted)
    for k, survived in enumerate(done.survival, start=1):
        assert survived == pytest.approx(sum(n >= k for n in counted) / len(counted))
    # α_k is J_k / J_{k − 1} where every draft was K long; shorter ones were tried less often.
    tried = np.concatenate(done.drafted)
    for k, alpha in enumerate(done.alpha, start=1):
        pairs = list(zip(counted, tried, strict=True))
        reached = [n >= k for n, drafted in pairs if drafted >= k and n >= k - 1]
        assert alpha == pytest.approx(np.mean(reached)) if reached else np.isnan(alpha)
