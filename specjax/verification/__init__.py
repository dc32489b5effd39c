"""Verification rules, one file each. They know distributions, not networks."""

from specjax.types import Verifier
from specjax.verification.greedy import greedy

RULES: dict[str, Verifier] = {"greedy": greedy}
