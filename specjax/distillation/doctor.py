"""Why is acceptance low? One check for each thing that is usually wrong.

Some compare what the drafter's folder says with the target. The others change ONE thing along the
target's own text (`distillation.probe`) and ask whether clearly more would be accepted: a drafter that
drafts better with taps one block further was trained on those. Two faults at once may hide each other:
put right what is named, and ask again.
"""

from __future__ import annotations

import dataclasses
import enum
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax import metrics
from specjax.checkpoints import huggingface
from specjax.distillation.probe import EMBEDDED, Probe, examine
from specjax.drafters import manifest
from specjax.drafters.dflash import DFlash
from specjax.drafters.draft_lm import DraftLM
from specjax.drafters.eagle3 import Eagle3
from specjax.models.sharding import EMBEDDINGS
from specjax.models.target import Target, target_hash
from specjax.models.tokenizer import fingerprint
from specjax.models.transformer import head_of
from specjax.types import Drafter, LoadedDrafter, PyTree

GAIN = 1.5  # a change counts that lets this many times as much be accepted, …
ERRORS = 3  # … and by this many standard errors: about twenty changes are tried
BLOCK = 16  # anchors; neighbouring ones draft the same tokens, so that errors are of blocks
MASKS = 12  # special tokens beside the named ones that are tried as a mask: some have hundreds
ROUNDING = 0.01, 0.05  # share of anchors or cycles that may differ in float32, in narrower types


class Status(enum.StrEnum):
    """What a check says."""

    OK = "ok"
    WRONG = "wrong"
    UNSURE = "unsure"
    NOT_APPLICABLE = "not applicable"


@dataclasses.dataclass(frozen=True)
class Finding:
    """The outcome of a check.

    Attributes:
      check: its name.
      status: ok, wrong, unsure, not applicable.
      seen: what was compared or measured.
      advice: what to do; empty where there is nothing to do.
    """

    check: str
    status: Status
    seen: str
    advice: str = ""


Outcome = tuple[Status, str, str] | tuple[Status, str]  # all of a finding but its name


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """What the checks look at.

    Attributes:
      probe: the drafter on the target's text.
      accepted: `[n]`, right drafts behind each anchor, as training sees it; as decoding drafts it
        where nothing is trained.
      folder: of the drafter; None where it has none.
      told: what `manifest.write` said in it.
      config: its `config.json`.
    """

    probe: Probe
    accepted: np.ndarray
    folder: pathlib.Path | None
    told: Mapping[str, Any]
    config: Mapping[str, Any]


def diagnose(
    target: Target,
    loaded: Drafter | LoadedDrafter,
    prompts: Sequence[np.ndarray],
    *,
    folder: pathlib.Path | None = None,
    max_new_tokens: int = 64,
) -> tuple[list[Finding], Probe]:
    """All checks, and what they looked at.

    Args:
      target, loaded: the pair.
      prompts: token ids; some that the drafter was made for.
      folder: of the drafter, where it has one.
      max_new_tokens: longest answer.

    Raises:
      ValueError: the target's output is not finite, or its answers are too short to tell anything.
    """
    probe = examine(target, loaded, prompts, max_new_tokens)
    accepted = probe.accepted() if probe.trainable else probe.accepted_when_decoding()
    told, config = {}, {}
    if folder is not None:
        told, path = manifest.read(folder), folder / "config.json"
        config = huggingface.read_json(path) if path.exists() else {}
    case = Case(probe, accepted, folder, told, config)
    return [Finding(name, *check(case)) for name, check in CHECKS.items()], probe


def rises(before: np.ndarray, after: np.ndarray) -> bool:
    """Whether `[n]` anchors have clearly more after a change: by half, and beyond the noise."""
    gain = after.astype(float) - before
    blocks = [block.mean() for block in np.array_split(gain, len(gain) // BLOCK)]
    noise = np.std(blocks, ddof=1) / np.sqrt(len(blocks))
    return gain.mean() > max((GAIN - 1) * before.mean(), ERRORS * noise)


def judge(
    before: np.ndarray,
    tried: Mapping[str, np.ndarray],
    has: str,
    advice: str,
    what: str = "accepted a draft",
) -> Outcome:
    """Wrong where a change lets clearly more be accepted; the best one is named.

    Args:
      before: `[n]` of the drafter as it is.
      tried: the same after each change.
      has: what is configured.
      advice: what to do if that is wrong; `{}` stands for the change.
      what: the numbers are.
    """
    seen = f"{has}: {before.mean():.2f} {what}"
    if tried:
        seen += "".join(f"; {change}: {after.mean():.2f}" for change, after in tried.items())
        best = max(tried, key=lambda change: tried[change].mean())
        if rises(before, tried[best]):
            return Status.WRONG, seen, advice.format(best)
    return Status.OK, seen


def _hash_of(
    case: Case, key: str, now: Callable[[], str | None], what: str, advice: str
) -> Outcome:
    """A hash in the drafter's folder against the target's."""
    if case.folder is None:
        return Status.NOT_APPLICABLE, "the drafter has no folder"
    if case.told.get(key) is None:
        silent = "does not say for which" if case.told else "is missing: nothing says for which"
        return (
            Status.UNSURE, f"{manifest.FILE} in its folder {silent} {what}",
            f"make sure that it was trained with this {what}",
        )  # fmt: skip
    if case.told[key] != now():
        return Status.WRONG, f"it was made with {case.told[key]}, the target has {now()}", advice
    return Status.OK, str(case.told[key])


def check_target(case: Case) -> Outcome:
    """Whether it was trained for these weights."""
    target = case.probe.target
    return _hash_of(
        case, "target_hash", lambda: target_hash(target), "target",
        f"it learnt the text of {case.told.get('target')}: train it for {target.name}, or give that "
        "target",
    )  # fmt: skip


def check_tokenizer(case: Case) -> Outcome:
    """Whether token ids mean what they meant in training."""
    tokenizer = case.probe.target.tokenizer
    if tokenizer is None:
        return Status.NOT_APPLICABLE, "the target has no tokenizer"
    return _hash_of(
        case, "tokenizer_hash", lambda: fingerprint(tokenizer)["tokenizer_hash"], "tokenizer",
        "its token ids mean something else: give the target with the tokenizer it was trained with",
    )  # fmt: skip


def check_template(case: Case) -> Outcome:
    """Whether prompts look as they did in training."""
    tokenizer = case.probe.target.tokenizer
    if tokenizer is None or tokenizer.chat_template is None:
        return Status.NOT_APPLICABLE, "the target has no chat template"
    return _hash_of(
        case, "template_hash", lambda: fingerprint(tokenizer)["template_hash"], "chat template",
        "it learnt from prompts that were rendered otherwise: serve with that template and its options "
        "(--template_options), or train on text of this one",
    )  # fmt: skip


def check_vocabulary(case: Case) -> Outcome:
    """Whether it can say what the target says, and its tokens are the target's."""
    probe = case.probe
    vocabulary = getattr(probe.drafter, "vocabulary", None)
    if vocabulary is None:
        config = getattr(probe.drafter, "config", None)
        if config is None:
            return Status.NOT_APPLICABLE, "it drafts tokens of the text"
        return Status.OK, f"all {config.vocab_size} tokens of the target"
    share = float(vocabulary.locate(probe.said[:, 1])[1].mean())
    has = f"{len(vocabulary)} tokens, {share:.0%} of what the target says"
    first, ids = probe.drafted[:, 0], vocabulary.array
    index, steps = np.searchsorted(ids, first).clip(0, len(ids) - 1), np.arange(len(ids))
    tables = {
        "no offsets (the first ids of the target)": steps,
        "ids one higher": ids + 1,
        "ids one lower": ids - 1,
        "offsets (it holds ids: write id − i)": ids - steps,
        "the table one row further": np.roll(ids, -1),
        "the table one row before": np.roll(ids, 1),
    }
    right = first == probe.said[:, 1]
    tried = {
        name: (table[index] == probe.said[:, 1]) & (first >= 0)
        for name, table in tables.items()
        if (table != ids).any()
    }
    outcome = judge(
        right.astype(float), tried, has,
        "d2t says other tokens than the head was trained on: write it as {}", "of first drafts right",
    )  # fmt: skip
    if outcome[0] is Status.OK and share < 0.9:
        status = Status.WRONG if share < 0.7 else Status.UNSURE
        return (
            status, has,
            f"no more than {share:.0%} can be accepted: choose the draft vocabulary by the text that "
            "is drafted, or a larger one",
        )  # fmt: skip
    return outcome if outcome[0] is Status.WRONG else (Status.OK, has)


def check_output(case: Case) -> Outcome:
    """Whether anything is drafted at all."""
    drafted = (case.probe.drafted >= 0).any(-1)
    seen = f"{int((~drafted).sum())} of {len(drafted)} anchors without a draft"
    if drafted.any():
        return Status.OK, seen
    if not jax.tree.leaves(case.probe.params):
        return Status.UNSURE, seen, "it found nothing to draft in these prompts"
    return (
        Status.WRONG, seen,
        "its output is not finite (NaN): its weights are broken, or its type too narrow",
    )  # fmt: skip


def check_dtype(case: Case) -> Outcome:
    """Whether rounding costs acceptance."""
    probe, wide = case.probe, jnp.dtype(jnp.float32)
    target, drafter = probe.target, probe.drafter
    if not jax.tree.leaves(probe.params):
        return Status.NOT_APPLICABLE, "it has no weights"
    types = {str(x.dtype) for x in jax.tree.leaves(probe.params) if x.ndim > 1}
    types |= {str(jnp.dtype(drafter.dtype)), str(target.dtype)}
    if len(types) > 1:
        return (
            Status.WRONG, f"weights, caches and target are {', '.join(sorted(types))}",
            f"load the drafter as {target.dtype}, the target's type",
        )  # fmt: skip
    if not probe.trainable or target.dtype == wide:
        return Status.OK, str(target.dtype)
    params = jax.tree.map(lambda x: x.astype(wide), probe.params)
    tables = {x: target.params[x].astype(wide) for x in EMBEDDINGS if x in target.params}
    features = probe.features(drafter.taps).astype(wide)
    after = probe.accepted(
        drafter=dataclasses.replace(drafter, dtype=wide), params=params,
        target_params=target.params | tables, features=features,
    )  # fmt: skip
    return judge(
        case.accepted, {"float32": after}, str(target.dtype),
        f"rounding to {target.dtype} costs acceptance: load the target as {{}}, or train in "
        f"{target.dtype}",
    )  # fmt: skip


def check_taps(case: Case) -> Outcome:
    """Whether features are of the blocks that it was trained on."""
    probe, taps = case.probe, case.probe.drafter.taps
    if not taps:
        return Status.NOT_APPLICABLE, "it reads no features"
    others = {by: tuple(tap + by for tap in taps) for by in (-1, 1)}
    orders = [*others.values(), *([taps[::-1]] if len(taps) > 1 else [])]
    tried = {
        _tap_names(other): probe.accepted(features=probe.features(other))
        for other in orders
        if set(other) <= set(probe.taps)
    }
    outcome = judge(
        case.accepted, tried, _tap_names(taps),
        "it drafts better on {}: write the taps it was trained on (outputs of blocks, counted from 0)",
    )  # fmt: skip
    key = "eagle_aux_hidden_state_layer_ids"
    readers, written = case.config.get(key), (case.config.get("eagle_config") or {}).get(key)
    if outcome[0] is Status.OK and readers and written and readers != [x + 1 for x in written]:
        return (
            Status.UNSURE, f"{outcome[1]}; config.json has {written} in eagle_config, {readers} above",
            "vLLM reads the upper ones, which count the blocks that read the features: make them one "
            "more each",
        )  # fmt: skip
    return outcome


def _tap_names(taps: Sequence[int]) -> str:
    return "taps " + " ".join("embedding" if tap == EMBEDDED else str(tap) for tap in taps)


def check_final_norm(case: Case) -> Outcome:
    """Whether the last norm is where it was in training."""
    probe, target = case.probe, case.probe.target
    if not probe.trainable or "final_norm" not in probe.params:
        return Status.NOT_APPLICABLE, "it has no norm of its own"
    norm, own = target.params["final_norm"], probe.params["final_norm"]
    tried = {}
    if own["scale"].shape == norm["scale"].shape and (own["scale"] != norm["scale"]).any():
        params = probe.params | {"final_norm": norm}
        tried["the target's norm as its own"] = probe.accepted(params=params)
    taps = probe.drafter.taps
    if taps:
        features = probe.features(taps)
        model = nnx.merge(target.graphdef, target.params)
        normed = model.final_norm(features)
        tried["features behind the target's norm"] = probe.accepted(features=normed)
        last = np.array(taps) == target.config.num_layers - 1
        if last.any() and not last.all():
            some = jnp.where(last[:, None], normed, features)
            tried["those of the last block behind it"] = probe.accepted(features=some)
    return judge(
        case.accepted, tried, "as it is",
        "it drafts better with {}: features here are outputs of blocks, before any norm, and the "
        "drafter's own norm is its folder's",
    )  # fmt: skip


def check_mask_token(case: Case) -> Outcome:
    """Whether unknown tokens look as they did in training."""
    probe = case.probe
    if not isinstance(probe.drafter, DFlash):
        return Status.NOT_APPLICABLE, "it drafts without masks"
    target, mask = probe.target, probe.drafter.mask_token
    table = target.params["embedding"]
    # Another row in the mask's place, and the head apart from it: no program is compiled again.
    head = {"head_weight": head_of(target.params)}

    def after(token: int) -> np.ndarray:
        changed = table.at[mask].set(table[token])
        return probe.accepted(target_params=target.params | head | {"embedding": changed})

    names = _special_tokens(target) | {f"token {mask + by}": mask + by for by in (-1, 1)}
    tried = {
        name: after(token)
        for name, token in names.items()
        if token != mask and 0 <= token < len(table)
    }
    outcome = judge(
        case.accepted, tried, f"token {mask}",
        "it drafts better with {}: write the id that it was trained with as mask_token_id",
    )  # fmt: skip
    said = np.isin(mask, [*target.stop_tokens, *np.concatenate(probe.result.tokens)])
    if outcome[0] is Status.OK and said:
        return (
            Status.UNSURE, f"{outcome[1]}; the target says token {mask}, too",
            "a mask should be a token that no text has: make sure that it was trained with this one",
        )  # fmt: skip
    return outcome


def _special_tokens(target: Target) -> dict[str, int]:
    """Tokens that some would take as a mask, by name."""
    tokenizer = target.tokenizer
    names = {f"stop token {token}": token for token in target.stop_tokens}
    for kind in ("pad", "eos", "bos", "unk", "mask"):
        token = getattr(tokenizer, f"{kind}_token_id", None)
        if token is not None and token not in names.values():
            names[f"{kind} token {token}"] = token
    added = getattr(tokenizer, "added_tokens_decoder", {}).items()
    others = [(token, x) for token, x in added if x.special and token not in names.values()]
    return names | {f"{x} ({token})": token for token, x in others[:MASKS]}


def check_rotation(case: Case) -> Outcome:
    """Whether positions are turned as in training: θ, scaling, and which dimensions are a pair."""
    probe, drafter = case.probe, case.probe.drafter
    if not probe.trainable or not isinstance(drafter, DraftLM | Eagle3 | DFlash):
        return Status.NOT_APPLICABLE, "it has no attention of its own"
    own, target = drafter.config, probe.target.config
    has = f"θ {own.rope_theta:g}{', scaled' * bool(own.rope_factors)}"
    schemas = _rotations_said(case.config)
    if len(schemas) > 1:
        return (
            Status.WRONG, "config.json says " + " and ".join(schemas),
            "rope_theta and rope_scaling must say what rope_parameters say: engines read either",
        )  # fmt: skip
    tried = {}
    same_size = own.head_dim == target.head_dim
    factors = target.rope_factors if same_size else own.rope_factors
    if (own.rope_theta, own.rope_factors) != (target.rope_theta, factors):
        turned = _with_rotation(drafter, target.rope_theta, factors)
        scaled = ", scaled" * bool(factors)
        tried[f"the target's θ {target.rope_theta:g}{scaled}"] = probe.accepted(drafter=turned)
    half = own.head_dim // 2
    order = np.arange(own.head_dim).reshape(half, 2).T.ravel()
    for name, columns in (
        ("weights of neighbouring pairs (2i, 2i + 1)", order),
        ("weights that were split into halves once too often", np.argsort(order)),
    ):
        tried[name] = probe.accepted(params=_reordered(probe.params, columns))
    return judge(
        case.accepted, tried, has, "it drafts better with {}: put its config or conversion right"
    )


def _rotations_said(config: Mapping[str, Any]) -> list[str]:
    """What the keys of transformers 4 and of 5 say of θ and scaling, where both are there."""
    layer = config.get("transformer_layer_config", config)
    new = layer.get("rope_parameters")
    if not new or "rope_theta" not in layer or "rope_theta" not in new:
        return []
    old = layer.get("rope_scaling") or {}
    shared = sorted(key for key in old.keys() & new.keys() if isinstance(old[key], int | float))
    told = [
        [("rope_theta", theta), *((key, said[key]) for key in shared)]
        for theta, said in ((layer["rope_theta"], old), (new["rope_theta"], new))
    ]
    if bool(old.get("factor")) != bool(new.get("factor")):
        told[0].append(("factor", old.get("factor") or 1))
        told[1].append(("factor", new.get("factor") or 1))
    words = (", ".join(f"{key} {float(value):g}" for key, value in one) for one in told)
    return list(dict.fromkeys(words))


def _with_rotation(drafter: Any, theta: float, factors: tuple[float, ...]) -> Any:
    config = dataclasses.replace(drafter.config, rope_theta=theta, rope_factors=factors)
    changes = {"config": config}
    if isinstance(drafter, DraftLM):
        changes["graphdef"] = Target("", config, {}).graphdef
    return dataclasses.replace(drafter, **changes)


def _reordered(params: PyTree, columns: np.ndarray) -> PyTree:
    """Params whose queries and keys have their dimensions in another order."""

    def one(path: tuple, x: jax.Array) -> jax.Array:
        names = [str(getattr(part, "key", part)) for part in path]
        if names[-1] in ("qkv", "qkv_bias"):
            return jnp.concatenate([x[..., :-1, columns], x[..., -1:, :]], axis=-2)
        turned = names[-2:-1] in (["query_norm"], ["key_norm"])
        return x[columns] if turned else x

    return jax.tree_util.tree_map_with_path(one, params)


def check_embeddings(case: Case) -> Outcome:
    """Whether embedding and head are the target's where they should be."""
    probe = case.probe
    if not probe.trainable:
        return Status.NOT_APPLICABLE, "it has none of its own"
    shared, same = {"embedding": probe.target.params["embedding"]}, "the target's embedding"
    if getattr(probe.drafter, "vocabulary", None) is None:  # else its head is another by design
        shared["head_weight"], same = head_of(probe.target.params), "the target's"
    own = {name: probe.params[name] for name in shared if name in probe.params}
    words = {"embedding": "embedding", "head_weight": "head"}
    if any(table.shape != shared[name].shape for name, table in own.items()):
        return Status.OK, "of its own, and of another size than the target's"
    other = {x: shared[x] for x, table in own.items() if not np.array_equal(table, shared[x])}
    if not other:
        return Status.OK, same
    tried = {
        f"the target's {words[name]}": probe.accepted(params=probe.params | {name: table})
        for name, table in other.items()
    }
    if len(other) > 1:
        tried["the target's embedding and head"] = probe.accepted(params=probe.params | other)
    return judge(
        case.accepted, tried, f"{' and '.join(words[name] for name in other)} of its own",
        "it drafts better with {}: leave its copy out of the folder, or copy it again",
    )  # fmt: skip


def check_slots(case: Case) -> Outcome:
    """Whether draft k is of the token k places behind the anchor."""
    matches = {shift: case.probe.matches(shift).mean(1) for shift in (0, -1, 1)}
    tried = {"the token before": matches[-1], "the token after": matches[1]}
    return judge(
        matches[0], tried, "each draft against its token",
        "drafts are of {}: slots, or the labels in training, are off by one (a drafter that repeats "
        "what it reads is not trained at all)", "of drafts right",
    )  # fmt: skip


def check_decoded(case: Case) -> Outcome:
    """Whether decoding drafts what training sees, at every anchor."""
    if not case.probe.trainable:
        return Status.NOT_APPLICABLE, "nothing of it is trained"
    decoded = case.probe.accepted_when_decoding()
    differ = np.flatnonzero(decoded != case.accepted)
    seen = (
        f"{len(decoded) - len(differ)} of {len(decoded)} anchors alike, {decoded.mean():.2f} accepted "
        f"when decoding, {case.accepted.mean():.2f} in training"
    )
    if len(differ) > _tolerated(case, len(decoded)):
        return (
            Status.WRONG, seen,
            "`propose`, `prefill` or `observe` computes another thing than the objective: positions, "
            "masks or cached rows differ",
        )  # fmt: skip
    return Status.OK, seen


def check_counted(case: Case) -> Outcome:
    """Whether the cycles that were counted are those of the text, replayed."""
    probe = case.probe
    if not probe.trainable:
        return Status.NOT_APPLICABLE, "nothing of it is trained"
    result, starts = probe.result, np.flatnonzero(np.diff(probe.anchors[0], prepend=-1))
    differ, cycles, replayed = 0, 0, []
    for start, *counts in zip(
        starts, result.accepted, result.drafted, result.committed, strict=True
    ):
        accepted, drafted, committed = counts
        anchors = start + np.cumsum(committed) - committed
        expected = np.minimum(case.accepted[anchors], drafted)
        differ, cycles = differ + int((expected != accepted).sum()), cycles + len(accepted)
        replayed.append(expected)
    forced = case.accepted >= 1
    told = metrics.alpha(
        *map(np.concatenate, (result.accepted, result.drafted, result.committed)), 1
    )
    seen = (
        f"α₁ {forced.mean():.2f} teacher-forced, {told[0]:.2f} counted; {cycles - differ} of {cycles} "
        f"cycles as replayed, {np.concatenate(replayed).mean():.2f} accepted replayed, "
        f"{np.concatenate(result.accepted).mean():.2f} counted"
    )
    if differ > _tolerated(case, cycles):
        return (
            Status.WRONG, seen,
            "decoding keeps other rows than it should after a cycle of several tokens: look at "
            "`observe`",
        )  # fmt: skip
    return Status.OK, seen


def _tolerated(case: Case, count: int) -> float:
    """How many of so many may differ: one near-tie is no fault, however few there are."""
    return max(1, ROUNDING[case.probe.target.dtype.itemsize < 4] * count)


CHECKS: dict[str, Callable[[Case], Outcome]] = {
    "target": check_target,
    "tokenizer": check_tokenizer,
    "chat template": check_template,
    "vocabulary": check_vocabulary,
    "output": check_output,
    "dtype": check_dtype,
    "taps": check_taps,
    "final norm": check_final_norm,
    "mask token": check_mask_token,
    "rotation": check_rotation,
    "embedding and head": check_embeddings,
    "slot alignment": check_slots,
    "trained = decoded": check_decoded,
    "counted α": check_counted,
}
