"""Tables of evaluations."""

from __future__ import annotations

from specjax.evaluation import tables

ROW = {
    "target": "t", "temperature": 0.0, "batch": 1, "prompts": "one.jsonl", "num_prompts": 2,
    "drafter": "a|b", "num_draft_tokens": 2, "tau": 1.5, "tau_interval": [1.25, 1.75],
    "tau_of_prompts": 1.4, "tau_of_prompts_interval": [None, None], "alpha": [0.5, None],
    "survival": [0.5, 0.0], "accepted_share": None, "passes_per_token": 0.667,
    "plain_tokens_per_second": 10.0, "speculative_tokens_per_second": 15.0, "speedup": 1.5,
    "speedup_interval": [None, None], "predicted_speedup": None, "prediction_error": None,
    "draft_ms": None, "pass_ms": None, "overhead_ms": None, "identical": "yes",
    "times_peer_plain": None, "times_peer_speculative": None,
}  # fmt: skip


def test_only_what_was_measured_and_what_differs_has_a_column():
    headings, (line,) = tables.cells([ROW])
    assert "T" not in headings and "transformers plain" not in headings
    told = dict(zip(headings, line, strict=True))
    assert told["τ"] == "1.50 (1.25–1.75)" and told["speed-up"] == "1.50×"
    assert told["α_k"] == "0.50 –" and told["accepted / drafted"] == "–"
    parts = {"draft_ms": 1.0, "pass_ms": 2.0, "overhead_ms": -0.1}
    second = ROW | parts | {"temperature": 1.0, "predicted_speedup": 1.8, "prediction_error": 0.2}
    headings, lines = tables.cells([ROW, second])
    told = dict(zip(headings, lines[1], strict=True))
    assert told["T"] == "1.0" and told["predicted (error)"] == "1.80× (+20 %)"
    assert told["draft + pass + rest, ms"] == "1.0 + 2.0 + -0.1"
    assert lines[0][headings.index("predicted (error)")] == "–"


def test_markdown():
    assert (
        tables.markdown(["a", "b"], [["1", "x|y"]]) == "| a | b |\n| --- | --- |\n| 1 | x\\|y |\n"
    )
