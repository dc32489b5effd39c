"""Verification rules, one file each. They know distributions, not networks.

`RULES` are those of the sampling mode, by name. In the greedy mode every rule is `greedy`: a target
that is one-hot leaves no other choice.
"""

from specjax.types import Verifier
from specjax.verification.greedy import greedy
from specjax.verification.token import token

__all__ = ["RULES", "greedy"]

RULES: dict[str, Verifier] = {"token": token}
