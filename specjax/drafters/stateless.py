"""What a drafter without a state of its own shares with the others like it."""

from __future__ import annotations

from specjax.types import Committed, PyTree


class Stateless:
    """The three methods of `specjax.types.Drafter` that such a drafter has no use for."""

    confident = False

    def init_state(self, max_len: int) -> PyTree:
        """No state: everything it needs is in the context."""
        return ()

    def prefill(
        self, params: PyTree, target_params: PyTree, state: PyTree, chunk: Committed
    ) -> PyTree:
        """Nothing to take in."""
        return state

    def observe(
        self, params: PyTree, target_params: PyTree, state: PyTree, committed: Committed
    ) -> PyTree:
        """Nothing to take in."""
        return state
