r"""Trains a drafter for a target.

  python -m experiments.distill --config=configs/smollm2_draft_lm.py --workdir=runs/smollm2_draft_lm \
    --config.data.path=responses.jsonl

The same command again goes on from the newest checkpoint; SIGTERM saves and ends with status 0. At the
end the weights with the best held-out acceptance are exported to `WORKDIR/drafter`, which
`--drafter=WORKDIR/drafter` of the other programs takes (from a bucket, as a copy in a local folder).
Every key of a config is in `configs/common.py`, and `--config.key=value` changes it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from absl import flags
from etils import epath
from ml_collections import ConfigDict, config_flags

import specjax
from experiments import launch
from specjax import drafters
from specjax.distillation import data, features
from specjax.distillation.state import Checkpoints
from specjax.distillation.steps import compute_params
from specjax.distillation.trainer import fetched, set_up, train
from specjax.drafters import manifest
from specjax.models.sharding import EMBEDDINGS, make_mesh, param_shardings
from specjax.models.target import Target, target_hash
from specjax.models.transformer import check_taps
from specjax.types import LoadedDrafter, PyTree

CONFIG = config_flags.DEFINE_config_file("config", None, "A file of configs/.")
WORKDIR = flags.DEFINE_string("workdir", None, "Folder or bucket of checkpoints and metrics.")
_DISTRIBUTED = flags.DEFINE_bool(
    "distributed", False, "Join the other hosts of a pod first (jax.distributed)."
)


def main() -> None:
    """Reads the data, loads the target, trains, exports."""
    launch.require(config=CONFIG.value, workdir=WORKDIR.value)
    if _DISTRIBUTED.value:
        jax.distributed.initialize()
    config = CONFIG.value.copy_and_resolve_references()
    launch.require(**{"config.data.path": config.data.path, "config.target": config.target})
    target = launch.load_target(config.target, config.data.template_options.to_dict())
    train_examples, held_out = read(config, target)
    loaded = first_drafter(config, target, train_examples)
    shardings = param_shardings(target.params, make_mesh(**config.mesh))
    params = jax.device_put(target.params, shardings)
    target = dataclasses.replace(target, params=params, known_hash=target_hash(target))
    set_up(config.to_dict(), target, loaded)  # says what is wrong before hours of caching
    # A run that goes on must have the same text, wherever it lies.
    lasting = config.to_dict() | {"text": data.examples_hash([*train_examples, *held_out])}
    lasting["data"].pop("path")
    lasting["features"] = {"dtype": config.features.dtype, "cached": bool(config.features.path)}
    outcome = train(
        lasting, target, loaded, batches(config, target, loaded, train_examples),
        evaluation(config, held_out), WORKDIR.value,
        evaluators=[(config.tau_every, tau(config, target, loaded, held_out))],
        tensorboard=config.tensorboard,
    )  # fmt: skip
    if outcome.preempted:
        say(f"preempted at step {outcome.step}: the same command goes on")
        return
    tables = fetched({name: x for name, x in target.params.items() if name in EMBEDDINGS})
    if jax.process_index() == 0:
        target = dataclasses.replace(target, params=tables)
        folder = epath.Path(WORKDIR.value) / "drafter"
        with tempfile.TemporaryDirectory() as local:  # the work directory may be a bucket
            drafters.export(outcome.drafter, target, pathlib.Path(local))
            folder.mkdir(parents=True, exist_ok=True)
            # What says that it is a drafter comes last: a folder with it is whole.
            files = epath.Path(local).iterdir()
            for path in sorted(files, key=lambda path: path.name == manifest.FILE):
                path.copy(folder / path.name, overwrite=True)
        say(f"the drafter, of step {outcome.exported_step}, is in {folder}")


def first_drafter(
    config: ConfigDict, target: Target, examples: list[data.Example]
) -> LoadedDrafter:
    """The drafter with the weights that a new run begins with."""
    counts = data.token_counts(examples, target.config.vocab_size)
    loaded = drafters.from_config(config.drafter.to_dict(), target, config.seed, counts)
    if not config.init_from:
        return loaded
    if loaded.drafter.taps:
        raise ValueError(
            "init_from has weights only; a drafter of features goes on from its folder, which knows "
            f'its taps and vocabulary: drafter = {{"name": …, "model": "{config.init_from}/drafter"}} '
            "in a config of your own"
        )
    masters = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, np.float32), loaded.params)
    with Checkpoints(config.init_from, read_only=True) as checkpoints:
        best = checkpoints.restore_best(masters)
    if best is None:
        raise FileNotFoundError(f"init_from={config.init_from} holds no best checkpoint")
    say(f"first weights: step {best[1]} of {config.init_from}")
    return dataclasses.replace(loaded, params=best[0])


def say(text: str) -> None:
    """Prints, on the first host."""
    if jax.process_index() == 0:
        print(text, flush=True)


def read(config: ConfigDict, target: Target) -> tuple[list[data.Example], list[data.Example]]:
    """The examples to train on and to evaluate on; prints what was read."""
    examples, stats = data.read_examples(
        config.data.path, target.tokenizer, vocab_size=target.config.vocab_size,
        max_tokens=config.data.sequence_length,
    )  # fmt: skip
    say(
        f"{stats.kept} of {stats.read} examples, {stats.too_long} longer than "
        f"{config.data.sequence_length} tokens; {stats.tokens} tokens, {stats.supervised_tokens} of "
        "them the target's own"
    )
    return data.split(examples, config.data.held_out)


def rows_of_this_host(config: ConfigDict) -> int:
    """B of this host, in a micro-batch."""
    rows, hosts = config.data.batch_size, jax.process_count()
    if rows % (hosts * config.accumulate):
        raise ValueError(
            f"a batch of {rows} rows does not divide by {hosts} hosts × {config.accumulate} "
            "micro-batches"
        )
    return rows // hosts // config.accumulate


def batches(
    config: ConfigDict, target: Target, loaded: LoadedDrafter, examples: list[data.Example]
) -> Any:
    """Endless training batches: of text, or of cached features where the config names a folder."""
    host = {"process_index": jax.process_index(), "process_count": jax.process_count()}
    rows = rows_of_this_host(config) * config.accumulate
    sizes = {"sequence_length": config.data.sequence_length, "batch_size": rows}
    if not config.features.path:
        return data.train_batches(examples, seed=config.seed, **sizes, **host)
    folder = pathlib.Path(config.features.path)
    # A cache with more taps than this drafter's serves several.
    taps = tuple(sorted({*loaded.drafter.taps, *config.features.taps}))
    check_taps(taps, target.config)
    identity = data.fingerprint(target.tokenizer) | {
        "data": data.examples_hash(examples),
        "sequence_length": config.data.sequence_length,
        "dtype": config.features.dtype,
    }
    if not (folder / features.MANIFEST).exists():
        layout = features.layout_of(
            target.config, taps, config.data.sequence_length, config.features.dtype
        )
        sizes["batch_size"] = rows_of_this_host(config)
        text = data.evaluation_batches(examples, **sizes)
        count = sum(int(batch["segments"].any(-1).sum()) for batch in text)
        told = features.check_disk(folder, layout, count)
        say(f"target features are written to {folder}: at most {told}")
        with launch.progress() as report:
            features.write_cache(
                folder, target, taps, text, identity, dtype=config.features.dtype,
                sequence_length=config.data.sequence_length, progress=report, total=count,
            )  # fmt: skip
    source, unpack = features.open_cache(folder, target, loaded.drafter.taps, identity)
    return data.cached_batches(source, unpack, batch_size=rows, seed=config.seed, **host)


def evaluation(
    config: ConfigDict, examples: list[data.Example]
) -> Callable[[], Iterable[features.Batch]]:
    """Passes over the held-out rows."""
    rows = rows_of_this_host(config)
    made = data.evaluation_batches(
        examples, batch_size=rows, sequence_length=config.data.sequence_length,
        process_index=jax.process_index(), process_count=jax.process_count(),
    )  # fmt: skip
    count = max(1, config.data.held_out_rows // (rows * jax.process_count()))

    @functools.cache
    def kept() -> list[features.Batch]:
        return list(itertools.islice(made, count))

    return kept


def tau(
    config: ConfigDict, target: Target, loaded: LoadedDrafter, examples: list[data.Example]
) -> Callable[[PyTree], dict[str, float]]:
    """Decodes held-out prompts with the drafter: τ at temperature 0 and 1."""
    if config.tau_prompts < 1:
        raise ValueError(f"tau_prompts must be at least 1, got {config.tau_prompts}")
    context = target.config.context_length
    prompts = [example.prompt for example in examples if len(example.prompt) < context]
    prompts = prompts[: config.tau_prompts]
    if not prompts:
        raise ValueError(f"no held-out prompt leaves room in the target's context of {context}")

    def figures(params: PyTree) -> dict[str, float]:
        params = compute_params(params, target.dtype)
        drafter = dataclasses.replace(loaded, params=params)
        longest = max(map(len, prompts))
        options = {"max_new_tokens": 64, "max_len": min(longest + 64, context)}
        return {
            f"tau_at_{temperature}": specjax.decode(
                target, drafter, [np.asarray(x) for x in prompts], temperature=float(temperature),
                key=jax.random.key(config.seed), **options,
            ).tau
            for temperature in (0, 1)
        }  # fmt: skip

    return figures


if __name__ == "__main__":
    launch.run(main)
