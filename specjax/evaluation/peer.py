"""Hugging Face `transformers` on the same weights and prompts: a yardstick outside this project.

It runs in a process of its own, that decodes only when it is asked to, so that both sides can take
turns on one machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from specjax.checkpoints.export import export_folder
from specjax.models.target import Target

WORKER = pathlib.Path(__file__).with_name("peer_worker.py")


@dataclasses.dataclass(frozen=True)
class PeerResult:
    """One decoding.

    Attributes:
      tokens: new tokens of each prompt, `[n]` int32, a stop token included.
      seconds: of the whole batch, prefill included.
    """

    tokens: list[np.ndarray]
    seconds: float


@dataclasses.dataclass(frozen=True)
class Peer:
    """A running process that has loaded the target (and an assistant)."""

    process: subprocess.Popen
    stop_tokens: tuple[int, ...]

    def decode(
        self,
        prompts: Sequence[np.ndarray],
        *,
        mode: str = "plain",
        num_draft_tokens: int = 0,
        max_new_tokens: int = 128,
    ) -> PeerResult:
        """Greedy decoding of token ids.

        Args:
          prompts: of one batch; the speculative modes take one prompt only.
          mode: `plain`, `lookup` (prompt lookup) or `assisted` (a draft model).
          num_draft_tokens: K of the speculative modes.
          max_new_tokens: for all rows.
        """
        answer = self._ask(
            {
                "prompts": [np.asarray(row).tolist() for row in prompts],
                "mode": mode,
                "num_draft_tokens": num_draft_tokens,
                "max_new_tokens": max_new_tokens,
                "stop_tokens": list(self.stop_tokens),
            }
        )
        tokens = [np.asarray(row, np.int32) for row in answer["tokens"]]
        return PeerResult(tokens, answer["seconds"])

    def _ask(self, request: dict[str, Any] | None) -> dict[str, Any]:
        if request is not None:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise ValueError(
                "the transformers process ended; is the extra `parity` installed "
                "(pip install 'specjax[parity]'), and is there memory for a second copy?"
            )
        return json.loads(line)


@contextlib.contextmanager
def transformers_peer(target: Target, assistant: Target | None = None) -> Iterator[Peer]:
    """Exports the models to a temporary folder, starts the process, ends it afterwards."""
    with tempfile.TemporaryDirectory() as root, contextlib.ExitStack() as stack:
        folders = []
        for name, model in (("target", target), ("assistant", assistant)):
            if model is not None:
                folders.append(str(pathlib.Path(root) / name))
                export_folder(dataclasses.replace(model, tokenizer=None), folders[-1])
        process = stack.enter_context(
            subprocess.Popen(
                [sys.executable, str(WORKER), *folders],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        )
        stack.callback(process.kill)
        peer = Peer(process, target.stop_tokens)
        peer._ask(None)
        yield peer
