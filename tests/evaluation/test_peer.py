"""`transformers` in its process: same weights, same text."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

import specjax
from specjax import drafters
from specjax.checkpoints.load import load_target
from specjax.drafters import NGram
from specjax.evaluation.peer import WORKER, transformers_peer
from specjax.evaluation.runner import evaluate

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
PROMPTS = [np.array([5, 9, 2, 5, 9]), np.array([7, 3]), np.array([11, 12, 13, 11, 12])]


@pytest.mark.slow
def test_peer_gives_the_same_text(tmp_path):
    pytest.importorskip("torch", reason="the extra `parity` is not installed")
    target = load_target(GOLDEN / "llama_tied", dtype=np.float32)
    names = {"ngram": NGram(3), "draft_lm": drafters.draft_lm(target, target, 2)}
    names["early_exit"] = drafters.early_exit(target, 2, 2)
    with transformers_peer(target, assistant=target) as peer:
        alone = evaluate(target, names, PROMPTS, peer=peer, max_new_tokens=24, max_len=64)
        together = evaluate(target, names, PROMPTS, batch=2, peer=peer, max_new_tokens=24)
    for results, name in [(r, n) for r in (alone, together) for n in names]:
        plain = [row.tolist() for run in results[name].plain for row in run.tokens]
        for runs in (results[name].peer_plain, results[name].peer_speculative):
            rows = [row.tolist() for run in runs for row in run.tokens]
            assert rows == plain if runs else results is together or name == "early_exit"
    assert alone["draft_lm"].times_peer_speculative > 0
    assert alone["early_exit"].times_peer_speculative is None


def test_a_process_that_cannot_start_is_named(tiny, monkeypatch, tmp_path):
    worker = tmp_path / "worker.py"
    worker.write_text("raise SystemExit(1)")
    assert WORKER.exists()
    monkeypatch.setattr("specjax.evaluation.peer.WORKER", worker)
    with pytest.raises(ValueError, match="the extra `parity` installed"), transformers_peer(tiny):
        pass


@pytest.mark.slow
def test_batches_pool_to_the_same_text(tiny):
    names = {"ngram": NGram(3)}
    options = {"max_new_tokens": 16, "max_len": 32}
    single = evaluate(tiny, names, PROMPTS, **options)["ngram"]
    pairs = evaluate(tiny, names, PROMPTS, batch=2, **options)["ngram"]
    assert [len(run.tokens) for run in pairs.plain] == [2, 1]
    assert single.tau == pairs.tau
    assert specjax.metrics.tau(np.concatenate(pairs.plain[0].committed)) == 1


def test_sampled_text_is_not_compared(tiny):
    with pytest.raises(ValueError, match="at temperature 0 only"):
        evaluate(tiny, {}, PROMPTS, peer=object(), temperature=1.0)
