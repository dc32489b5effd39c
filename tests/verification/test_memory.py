"""What a rule keeps beside the target's logits and the draft's q."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from specjax.noise import Noise
from specjax.sampling import Sampling
from specjax.trees import Tree
from specjax.types import Draft
from specjax.verification import RULES

BATCH, VOCAB = 4, 20_000
CHAIN, TREE = Tree.chain(8), Tree.of_widths((3, 2))


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize("filters", [False, True])
@pytest.mark.parametrize(
    ("name", "tree", "has_q"),
    [
        ("token", CHAIN, True),
        ("token", CHAIN, False),
        ("block", CHAIN, True),
        ("block", CHAIN, False),
        ("gumbel", CHAIN, False),
        ("gumbel", TREE, False),
        ("tree_match", TREE, False),
        ("tree_without_replacement", TREE, True),
        ("tree_traversal", TREE, True),
        ("tree_traversal", CHAIN, True),
    ],
)
def test_no_rule_processes_all_rows_at_once(name, tree, has_q, filters):
    """Less than one more array of [batch, N, V]: a few rows of V numbers a sequence."""
    nodes = len(tree.parents)
    draft = Draft(
        array(BATCH, nodes, dtype=jnp.int32),
        array(BATCH, nodes, VOCAB) if has_q else None,
        array(BATCH, dtype=jnp.int32),
        None if tree == CHAIN else tree,
    )
    some = (array(BATCH, dtype=jnp.int32), array(BATCH), array(BATCH))
    sampling = Sampling(array(BATCH), *(some if filters else ()))
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), BATCH))

    @jax.jit
    def verify(draft, logits, sampling, keys, positions):
        return jax.vmap(RULES[name].verify)(draft, logits, sampling, Noise(keys, positions))

    logits, positions = array(BATCH, nodes + 1, VOCAB), array(BATCH, dtype=jnp.int32)
    compiled = verify.lower(draft, logits, sampling, keys, positions).compile()
    row = BATCH * VOCAB * 4
    rows = compiled.memory_analysis().temp_size_in_bytes / row
    # Making the noise of one row takes about ten, for any K.
    assert rows < (12 if name == "gumbel" else 6.5)
