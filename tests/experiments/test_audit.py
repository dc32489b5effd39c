"""`experiments.audit` as a user runs it."""

from __future__ import annotations

import json

import pytest

from specjax.verification import RULES, faults


@pytest.fixture(scope="module")
def audited(run, tmp_path_factory):
    path = tmp_path_factory.mktemp("audit") / "figures.json"
    done = run("audit", f"--json={path}")
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout, json.loads(path.read_text())


@pytest.mark.slow
def test_every_rule_is_lossless(audited):
    text, figures = audited
    assert {row["rule"] for row in figures["rules"] + figures["identity"]} == set(RULES)
    for row in figures["rules"]:
        assert row["total_variation"] <= 1e-12 and row["rule"] in text
    for row in figures["identity"]:
        assert row["same"] == row["of"] > 0
    gain = {(row["rule"], row["drafts"]): row for row in figures["rules"]}
    for row in (gain["block", "chain, sampled"], gain["tree_traversal", "tree, sampled"]):
        assert row["gain_percent"] > 1 and row["smallest_gain"] > -1e-12


@pytest.mark.slow
def test_every_planted_fault_is_betrayed(audited):
    text, figures = audited
    assert [row["fault"] for row in figures["faults"]] == [fault.what for fault in faults.FAULTS]
    for row in figures["faults"]:
        assert row["fault"] in text and (row["test"] or row["total_variation"] > 1e-5)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("no_such_module:law", "no module:name that can be imported: No module named"),
        ("math", "no module:name that can be imported"),
        ("math:nothing", "has no attribute 'nothing'"),
        ("math:pi", "is float, expected a Rule or a function (draft, target) → Law"),
        ("math:sqrt", "math:sqrt is no law (draft, target) → Law for chain, sampled"),
    ],
)
def test_what_is_no_rule_is_one_line(run, rule, message):
    done = run("audit", f"--rule={rule}")
    assert done.returncode == 1 and done.stdout == ""
    assert message in done.stderr and done.stderr.count("\n") == 1
