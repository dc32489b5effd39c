r"""Proves the verification rules lossless on small models, and shows that faults would be found.

  python -m experiments.audit
  python -m experiments.audit --rule=my_rules:lenient

Every rule is enumerated exactly, in float64, on all drafts it accepts: chains and trees, sampled and
deterministic. Then planted faults are listed with what betrays them. `--rule` audits a rule of your
own: `module:name` of a law (`specjax.verification.law.LawOf`) or of a `Rule` made of one.
"""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any

import numpy as np
from absl import flags
from rich.console import Console
from rich.table import Table

from experiments import launch
from specjax.trees import Tree
from specjax.types import Rule
from specjax.verification import RULES, cases, coupling, faults
from specjax.verification.law import LawOf, law_of_rule

_RULE = flags.DEFINE_string("rule", None, "module:name of a rule or law to audit.")
_JSON = launch.define_json()

LOSSLESS = 1e-12
KEYS = 1000
DRAFTS = {
    "chain, sampled": (cases.CHAINS, True),
    "chain, point masses": (cases.CHAINS, False),
    "tree, sampled": (cases.TREES, True),
    "tree, deterministic": (cases.TREES, False),
}
CONSOLE = Console(width=None if sys.stdout.isatty() else 110)


def main() -> None:
    """Audits, prints as it goes, writes."""
    launch.check_writable(_JSON.value)
    rules = {_RULE.value: load_rule(_RULE.value)} if _RULE.value else RULES
    rows, identical, planted = [], [], []
    for name, rule in rules.items():
        law_of = law_of_rule(rule) if isinstance(rule, Rule) else rule
        if law_of is None:
            identical += identity(name, rule)
        else:
            rows += audit(name, law_of)
    if rows:
        show_rules(rows)
    for row in identical:
        CONSOLE.print(f"{row['rule']}, {row['drafts']}: {row['same']} of {row['of']} texts are plain "
                      f"sampling's, accepted {row['accepted']:.3f}")  # fmt: skip
    if not _RULE.value:
        planted = [
            {"fault": fault.what, "total_variation": fault.total_variation(), "test": fault.test}
            for fault in faults.FAULTS
        ]
        show_faults(planted)
    figures = {"rules": rows, "identity": identical, "faults": planted, **launch.machine()}
    launch.write_json(_JSON.value, figures)
    conclude(figures)


def load_rule(spec: str) -> Rule | LawOf:
    """What `--rule` names.

    Raises:
      ValueError: it cannot be imported, or is no rule.
    """
    module, _, name = spec.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"--rule={spec} is no module:name that can be imported: {error}") from None
    if not isinstance(found, Rule) and (isinstance(found, type) or not callable(found)):
        raise ValueError(
            f"--rule={spec} is {type(found).__name__}, expected a Rule or a function "
            "(draft, target) → Law"
        )
    return found


@functools.cache
def beside(drafts: str) -> dict[tuple[str, cases.Shape], float]:
    """E[accepted] of what a rule is compared with, by case and shape."""
    shapes, sampled = DRAFTS[drafts]
    if shapes is cases.TREES:
        return cases.audit(law_of_rule(RULES["tree_without_replacement"]), shapes).accepted
    return cases.audit(law_of_rule(RULES["token"]), shapes, sampled=sampled).accepted


def audit(name: str, law_of: LawOf) -> list[dict[str, Any]]:
    """A row for each kind of draft that the rule accepts.

    Raises:
      ValueError: it accepts none, or is no law.
    """
    rows, refusals = [], []
    for drafts, (shapes, sampled) in DRAFTS.items():
        try:
            result = cases.audit(law_of, shapes, sampled=sampled)
        except ValueError as error:
            refusals.append(f"{name}, {drafts}: refused: {error}")
            continue
        except (TypeError, AttributeError) as error:
            raise ValueError(
                f"{name} is no law (draft, target) → Law for {drafts} (one that cannot verify them "
                f"raises ValueError): {type(error).__name__}: {error}"
            ) from error
        accepted, others = result.accepted, beside(drafts)
        mean, reference = (np.mean(list(x.values())) for x in (accepted, others))
        rows.append(
            {
                "rule": name,
                "drafts": drafts,
                "total_variation": result.total_variation,
                "where": result.where,
                "accepted": mean,
                "gain_percent": 100 * (mean / reference - 1),
                "smallest_gain": min(accepted[case] - others[case] for case in others),
            }
        )
    tell_refusals(name, rows, refusals)
    return rows


def tell_refusals(name: str, rows: list[dict[str, Any]], refusals: list[str]) -> None:
    """Prints what a rule refused; raises ValueError where that was everything."""
    if not rows:
        raise ValueError(f"{name} accepts no draft: {refusals[0]}")
    for refusal in refusals:
        CONSOLE.print(refusal)


def identity(name: str, rule: Rule) -> list[dict[str, Any]]:
    """For rules without a law: how many texts of all cases are plain sampling's for the same key."""
    rows, refusals = [], []
    for shape, widths in {"chain": (1, 1, 1), "tree": (2, 2)}.items():
        for noise, coupled in {"coupled": True, "other noise": False}.items():
            pairs = [cases.tables(case, 4, len(widths) + 1) for case in cases.CASES]
            tree = Tree.of_widths(widths)
            try:
                results = [coupling.compare(rule, *x, tree, KEYS, coupled=coupled) for x in pairs]
            except ValueError as error:
                refusals.append(f"{name}, {shape}: refused: {error}")
                break
            same, accepted = (np.concatenate(x) for x in zip(*results, strict=True))
            rows.append(
                {
                    "rule": name,
                    "drafts": f"{shape}, {noise}",
                    "same": int(same.sum()),
                    "of": same.size,
                    "accepted": float(accepted.mean()),
                }
            )
    tell_refusals(name, rows, refusals)
    return rows


def show_rules(rows: list[dict[str, Any]]) -> None:
    """Prints the table of the rules."""
    table = Table(title="Exact laws; gain beside token, for trees beside tree_without_replacement")
    for heading in ("rule", "drafts", "largest TV", "mean accepted", "gain", "smallest gain"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(
            row["rule"], row["drafts"], f"{row['total_variation']:.1e}", f"{row['accepted']:.3f}",
            f"{row['gain_percent']:+.1f} %", f"{round(row['smallest_gain'], 3) + 0.0:+.3f}",
        )  # fmt: skip
    CONSOLE.print(table)


def show_faults(planted: list[dict[str, Any]]) -> None:
    """Prints the table of the faults."""
    table = Table(title="Planted faults")
    table.add_column("fault")
    table.add_column("betrayed by", overflow="fold")
    for row in planted:
        betrayed = row["test"] or f"TV {row['total_variation']:.1e}"
        table.add_row(row["fault"], betrayed)
    CONSOLE.print(table)


def conclude(figures: dict[str, Any]) -> None:
    """Raises ValueError where a rule is not lossless, or a fault is not found."""
    for row in figures["rules"]:
        if not row["total_variation"] <= LOSSLESS:
            raise ValueError(
                f"{row['rule']} is not lossless: TV {row['total_variation']:.2g} on {row['where']}"
            )
    for row in figures["identity"]:
        if row["same"] < row["of"]:
            raise ValueError(
                f"{row['rule']} has no law, and only {row['same']} of {row['of']} texts are plain "
                "sampling's: write it as a law to have it enumerated"
            )
    for row in figures["faults"]:
        if row["test"] is None and not row["total_variation"] > LOSSLESS:
            raise ValueError(f"a planted fault is not found: {row['fault']}")


if __name__ == "__main__":
    launch.run(main)
