"""Verification rules, one file each, and what proves them. They know distributions, not networks.

`RULES` are those of the sampling mode, by name. In the greedy mode every rule is `greedy`: a target
that is one-hot leaves no other choice.

| rule | drafts | next to plain sampling |
|---|---|---|
| `token` | chain | same law |
| `block` | chain | same law, accepts the most |
| `gumbel` | chain, tree of any kind | the same text for the same key |
| `tree_match` | deterministic tree | same law |
| `tree_without_replacement` | sampled tree of static shape | same law |
| `tree_traversal` | sampled tree of static shape | same law, accepts more |
"""

from specjax.types import Rule
from specjax.verification.block import block
from specjax.verification.greedy import greedy
from specjax.verification.gumbel import gumbel
from specjax.verification.token import token
from specjax.verification.tree_match import tree_match
from specjax.verification.tree_traversal import tree_traversal
from specjax.verification.tree_without_replacement import tree_without_replacement

__all__ = ["RULES", "greedy"]

RULES: dict[str, Rule] = {
    "token": token,
    "block": block,
    "gumbel": gumbel,
    "tree_match": tree_match,
    "tree_without_replacement": tree_without_replacement,
    "tree_traversal": tree_traversal,
}
