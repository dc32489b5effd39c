"""Mistakes that are easily made in a rule, planted, each with what betrays it.

A tool that proves rules right must be seen to find them wrong. Most faults here are a rule's law bent
in one place; a few stand in what surrounds the law, and only the test that is named shows them.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from specjax.trees import Tree
from specjax.verification import cases, enumeration
from specjax.verification.block import block_law
from specjax.verification.law import Law, LawOf
from specjax.verification.siblings import Siblings
from specjax.verification.token import log_ratios, residual, token_law
from specjax.verification.tree_match import tree_match_law
from specjax.verification.tree_traversal import leaves_first
from specjax.verification.tree_without_replacement import tree_without_replacement_law

VOCAB = 4


@dataclasses.dataclass(frozen=True)
class Fault:
    """A planted fault.

    Attributes:
      what: in a few words.
      law_of: the bent law; None where no law is at fault.
      case: the name of the case that betrays it.
      tree: of the draft.
      sampled: as in `enumeration.DraftLaw`.
      num_valid: the controller, or a constant.
      test: where no law is at fault, the test that betrays it, `module::function` in
        `tests/verification`.
    """

    what: str
    law_of: LawOf | None = None
    case: str = "random"
    tree: Tree = Tree.chain(2)
    sampled: bool = True
    num_valid: enumeration.ValidLength | int | None = None
    test: str | None = None

    def total_variation(self) -> float | None:
        """What the fault does to the text; None where it has no law."""
        if self.law_of is None:
            return None
        shape, options = (VOCAB, self.tree), {"num_valid": self.num_valid}
        result = cases.run(self.law_of, self.case, shape, sampled=self.sampled, **options)
        return result.total_variation


def _accept_always(draft, target):
    law = token_law(draft, target)
    ends = jnp.arange(law.terminal.shape[0]) == draft.num_valid
    return dataclasses.replace(law, terminal=ends.astype(law.terminal.dtype))


def _residual_p(draft, target):
    return Law(token_law(draft, target).terminal, lambda node: jnp.exp(target[node]))


def _residual_turned(draft, target):
    def next_weights(node):
        p = jnp.exp(target[node])
        q = jnp.exp(draft.log_q[jnp.minimum(node, draft.tokens.shape[0] - 1)])
        return jnp.where(node < draft.num_valid, jnp.maximum(q - p, 0), p)

    return Law(token_law(draft, target).terminal, next_weights)


def _residual_of_another_slot(draft, target):
    law = token_law(draft, target)
    return Law(law.terminal, lambda node: law.next_weights(jnp.maximum(node - 1, 0)))


def _bonus_row_off_by_one(draft, target):
    law = token_law(draft, target)

    def next_weights(node):
        early = jnp.exp(target[jnp.maximum(node - 1, 0)])
        return jnp.where(node == draft.num_valid, early, law.next_weights(node))

    return Law(law.terminal, next_weights)


def _q_before_truncation(draft, target):
    full = jnp.log(jnp.asarray(cases.untruncated(VOCAB), draft.log_q.dtype))
    told = jnp.broadcast_to(full, draft.log_q.shape)
    return token_law(dataclasses.replace(draft, log_q=told), target)


def _num_valid_ignored(draft, target):
    whole = jnp.full_like(draft.num_valid, draft.tokens.shape[0])
    return token_law(dataclasses.replace(draft, num_valid=whole), target)


def drop_unlikely(context, tokens):
    """A controller that leaves a token out because of what it is."""
    _, q = cases.tables("random", VOCAB, 3)
    for count, token in enumerate(tokens):
        if q[enumeration.number((*context, *tokens[:count]), VOCAB), token] < 0.4:
            return count
    return len(tokens)


def _block_with_token_residual(draft, target):
    return Law(block_law(draft, target).terminal, lambda node: residual(draft, target, node, 1.0))


def _block_with_weights_for_chances(draft, target):
    weights = [jnp.zeros((), target.dtype)]
    for ratio in log_ratios(draft, target):
        weights.append(jnp.minimum(weights[-1] + ratio, 0))
    chain = Tree.chain(draft.tokens.shape[0])
    ends = leaves_first(chain, jnp.exp(jnp.stack(weights)))
    return Law(ends, block_law(draft, target).next_weights)


def products_of_clamped_ratios(draft, target):
    """K = 2: i drafts are kept where u_1 … u_i ≤ c_i = Π min(p / q, 1), at the last such i.

    Pr[u_1 u_2 ≤ c] = c (1 − log c); neither holds with 1 − c_1 + c_2 log c_1.
    """
    one, two = jnp.cumprod(jnp.exp(jnp.minimum(log_ratios(draft, target), 0)))
    both = two - jax.scipy.special.xlogy(two, two)
    none = 1 - one + jax.scipy.special.xlogy(two, one)
    ends = jnp.stack([none, 1 - none - both, both])
    return Law(ends, lambda node: residual(draft, target, node, 1.0))


def siblings_sorted(draft, target):
    """Two siblings, in the order of q and not as they were drawn."""
    row = draft.log_q[0]
    order = jnp.argsort(-row[draft.tokens])
    tokens = draft.tokens[order]
    rest = jax.nn.log_softmax(row.at[tokens[0]].set(-jnp.inf))
    places = jnp.append(0, order + 1)
    again = dataclasses.replace(draft, tokens=tokens, log_q=jnp.stack([row, rest]))
    law = tree_without_replacement_law(again, target[places])
    ends = law.terminal.at[places].set(law.terminal)
    return Law(ends, lambda node: law.next_weights(jnp.argmax(places == node)))


def _siblings_from_one_row(draft, target):
    elders = np.array([draft.tree.children[parent][0] - 1 for parent in draft.tree.parents])
    told = dataclasses.replace(draft, log_q=draft.log_q[elders])
    return tree_without_replacement_law(told, target)


def siblings_with_their_elders_residual(draft, target):
    """After the last sibling the next token is drawn as if it had not been tried."""
    law = tree_without_replacement_law(draft, target)
    one_less = dataclasses.replace(draft, num_valid=draft.num_valid - 1)
    return Law(law.terminal, tree_without_replacement_law(one_less, target).next_weights)


def _traversal_without_update(draft, target):
    siblings = Siblings(draft, target, draft.tree, inherits=True)
    accept, _ = siblings.all()
    ends = leaves_first(draft.tree, accept)
    return Law(ends, lambda node: siblings.after_all(accept, node))


def _match_without_rest(draft, target):
    return Law(tree_match_law(draft, target).terminal, lambda node: jnp.exp(target[node]))


_PAIR, _FORK = Tree.of_widths((2,)), Tree.of_widths((2, 1))
FAULTS: tuple[Fault, ...] = (
    Fault("token: every draft is accepted", _accept_always),
    Fault("token: the correction is drawn from p", _residual_p),
    Fault("token: the correction is drawn from (q − p)₊", _residual_turned),
    Fault("token: the residual of the slot before", _residual_of_another_slot),
    Fault("token: the bonus is drawn from the row before", _bonus_row_off_by_one),
    Fault("token: q is what it was before truncation", _q_before_truncation, "q truncated"),
    Fault("token: num_valid is ignored", _num_valid_ignored, num_valid=1),
    Fault("controller: unlikely tokens are dropped", token_law, num_valid=drop_unlikely),
    Fault("block: the residual of token", _block_with_token_residual),
    Fault("block: h is the weight P", _block_with_weights_for_chances),
    Fault("block: clamped ratios, products of uniforms", products_of_clamped_ratios),
    Fault("siblings: sorted after they were sampled", siblings_sorted, tree=_PAIR),
    Fault("siblings: q is not renormalised for the later", _siblings_from_one_row, tree=_FORK),
    Fault("siblings: the last is left out of R", siblings_with_their_elders_residual, tree=_PAIR),
    Fault("tree_traversal: a is not updated", _traversal_without_update, tree=_FORK),
    Fault("tree_match: the next token is drawn from all of p", _match_without_rest, tree=_FORK,
          sampled=False),
    Fault("noise: verdict and draft share theirs",
          test="test_sampler::test_reused_draft_noise_is_caught"),
    Fault("sampler: u ≤ p accepts at u = 0 what has p = 0",
          test="test_sampler::test_u_zero_does_not_accept_what_has_probability_zero"),
    Fault("gumbel: the noise of the position before",
          test="test_gumbel::test_noise_of_another_position_is_caught"),
)  # fmt: skip
