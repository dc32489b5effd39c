"""What the target makes of training text: computed in every step, or once and kept on disk.

Either way an objective gets a `specjax.types.Trace` and cannot tell which it was.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from specjax.models.config import ModelConfig
from specjax.models.target import Target, target_hash
from specjax.models.transformer import read_text
from specjax.types import Progress, PyTree, Trace

Batch = Mapping[str, Any]  # tokens, loss_mask, positions, segments `[B, T]`, see `data`
TEXT = {"tokens": np.int32, "loss_mask": np.bool_, "positions": np.int32, "segments": np.int32}
MANIFEST, SHARD = "manifest.json", "rows-{:05d}.array_record"


def prediction_weights(batch: Batch) -> jax.Array:
    """`[B, T]` float32: 1 where the next token is of the same text and is to be predicted."""
    following = jnp.roll(batch["segments"], -1, axis=-1).at[..., -1].set(0)
    wanted = jnp.roll(batch["loss_mask"], -1, axis=-1)
    return ((batch["segments"] == following) & (following > 0) & wanted).astype(jnp.float32)


def traces(graphdef: Any, params: PyTree, taps: tuple[int, ...], batch: Batch) -> Trace:
    """The traces of a batch, `[B, …]`: those it brings along, or the target's own.

    Args:
      graphdef, params: the target; not used where the batch has `features` and `hidden`.
      taps: the drafter's.
      batch: text, `[B, T]` each.
    """
    text = batch["tokens"], batch["positions"], batch["segments"]
    if "hidden" in batch:
        features, hidden = batch["features"], batch["hidden"]
    else:
        model = nnx.merge(graphdef, params)
        out = jax.vmap(lambda *row: read_text(model, *row, taps))(*text)
        features, hidden = out.features, out.hidden
    features, hidden = jax.lax.stop_gradient((features, hidden))
    return Trace(*text, prediction_weights(batch), features, hidden)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a row lies in a record, one array after the other.

    Attributes:
      sequence_length, num_taps, hidden_size: T, M, D.
      dtype: of features and hidden states.
    """

    sequence_length: int
    num_taps: int
    hidden_size: int
    dtype: str

    @property
    def arrays(self) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
        """Type and shape of each array."""
        length, states = self.sequence_length, jnp.dtype(self.dtype)
        text = {name: (np.dtype(kind), (length,)) for name, kind in TEXT.items()}
        return text | {
            "features": (states, (length, self.num_taps, self.hidden_size)),
            "hidden": (states, (length, self.hidden_size)),
        }

    @property
    def row_bytes(self) -> int:
        """Size of a record."""
        return sum(kind.itemsize * int(np.prod(shape)) for kind, shape in self.arrays.values())

    def pack(self, row: Mapping[str, np.ndarray]) -> bytes:
        """A row as a record."""
        return b"".join(
            np.ascontiguousarray(row[name], kind).tobytes()
            for name, (kind, _) in self.arrays.items()
        )

    def unpack(self, record: bytes) -> dict[str, np.ndarray]:
        """A record as a row."""
        row, at = {}, 0
        for name, (kind, shape) in self.arrays.items():
            count = int(np.prod(shape))
            row[name] = np.frombuffer(record, kind, count, at).reshape(shape)
            at += count * kind.itemsize
        return row


def layout_of(
    config: ModelConfig, taps: tuple[int, ...], sequence_length: int, dtype: str
) -> Layout:
    """The layout of rows of a target."""
    return Layout(sequence_length, len(taps), config.hidden_size, dtype)


def _shards(folder: pathlib.Path) -> list[pathlib.Path]:
    return list(folder.glob("*.array_record"))


def check_disk(folder: pathlib.Path, layout: Layout, rows: int) -> str:
    """What a cache will take, in words.

    Raises:
      OSError: the disk has less.
    """
    folder.mkdir(parents=True, exist_ok=True)
    needed, free = rows * layout.row_bytes, shutil.disk_usage(folder).free
    free += sum(path.stat().st_size for path in _shards(folder))  # `write_cache` removes them
    told = f"{rows} rows of {layout.row_bytes / 2**20:.2f} MiB: {needed / 2**30:.2f} GiB"
    if needed > free:
        raise OSError(f"{folder}: cached features need {told}, the disk has {free / 2**30:.2f} GiB")
    return told


def write_cache(
    folder: pathlib.Path,
    target: Target,
    taps: tuple[int, ...],
    batches: Iterable[Batch],
    identity: Mapping[str, Any],
    *,
    sequence_length: int,
    dtype: str = "bfloat16",
    rows_per_shard: int = 1024,
    progress: Progress | None = None,
    total: int = 0,
) -> int:
    """Runs the target over all batches and keeps what it made of them, in ArrayRecord shards.

    The manifest is written last: a folder without one is no cache.

    Args:
      folder: emptied first.
      target, taps: whose features, and which.
      batches: of text; rows without any text are left out.
      identity: what else a reader must agree to: data, tokenizer and template hashes, seed.
      sequence_length: T.
      dtype: of features and hidden states on disk.
      rows_per_shard: records a file.
      progress: called with (what, rows done, total).
      total: rows expected.

    Returns:
      Rows written.
    """
    from array_record.python.array_record_module import ArrayRecordWriter

    for stale in (*_shards(folder), folder / MANIFEST):
        stale.unlink(missing_ok=True)
    layout = layout_of(target.config, taps, sequence_length, dtype)
    # Of a target that is split over hosts, every host is given all of the rows.
    split = jax.tree.leaves(target.params)[0].sharding
    whole = NamedSharding(split.mesh, PartitionSpec()) if isinstance(split, NamedSharding) else None
    run = jax.jit(traces, static_argnums=(0, 2), out_shardings=whole)
    done, writer = 0, None
    for batch in batches:
        trace = run(target.graphdef, target.params, taps, {name: batch[name] for name in TEXT})
        states = {"features": np.asarray(trace.features), "hidden": np.asarray(trace.hidden)}
        for i in np.flatnonzero(np.asarray(batch["segments"]).any(-1)):
            if done % rows_per_shard == 0:
                if writer:
                    writer.close()
                writer = ArrayRecordWriter(
                    str(folder / SHARD.format(done // rows_per_shard)), "group_size:1"
                )
            row = {name: batch[name][i] for name in TEXT}
            writer.write(layout.pack(row | {name: x[i] for name, x in states.items()}))
            done += 1
        if progress:
            progress("target features", done, max(total, done))
    if writer:
        writer.close()
    manifest = _identity(target, taps, identity) | dataclasses.asdict(layout) | {"rows": done}
    half = folder / f"{MANIFEST}.half"
    half.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    half.replace(folder / MANIFEST)
    return done


def open_cache(
    folder: pathlib.Path, target: Target, taps: tuple[int, ...], identity: Mapping[str, Any]
) -> tuple[Any, Callable[[bytes], dict[str, np.ndarray]]]:
    """A Grain source of a cache's records, and what makes rows of them, with these taps only.

    Raises:
      FileNotFoundError: there is no complete cache.
      ValueError: it was made for something else, or lacks a tap; the message names what differs.
    """
    import grain

    if not (folder / MANIFEST).exists():
        raise FileNotFoundError(f"{folder} holds no complete cache of features")
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    kept = manifest.get("taps", [])
    missing = [tap for tap in taps if tap not in kept]
    if missing:
        raise ValueError(
            f"{folder}: the cached features are of taps {kept}, {missing} are missing; delete the "
            "folder or name another"
        )
    for name, wanted in _identity(target, kept, identity).items():
        if manifest.get(name) != wanted:
            raise ValueError(
                f"{folder}: the cached features are of {name} {manifest.get(name)!r}, wanted is "
                f"{wanted!r}; delete the folder or name another"
            )
    layout = Layout(*(manifest[field.name] for field in dataclasses.fields(Layout)))
    source = grain.sources.ArrayRecordDataSource(sorted(map(str, folder.glob("*.array_record"))))
    if len(source) != manifest["rows"]:
        raise ValueError(f"{folder}: {len(source)} of {manifest['rows']} rows are there; delete it")
    columns = [kept.index(tap) for tap in taps]

    def unpack(record: bytes) -> dict[str, np.ndarray]:
        row = layout.unpack(record)
        return row | {"features": row["features"][:, columns]}

    return source, unpack


def _identity(target: Target, taps: Iterable[int], more: Mapping[str, Any]) -> dict[str, Any]:
    return {"target": target_hash(target), "taps": list(taps), **more}
