"""A plain torch loop that distils a draft model: the yardstick of `benchmark_distill`.

  python torch_distill.py FOLDER OPTIONS

FOLDER holds the drafter as `transformers` loads it, and `batches.npz`. It takes a step for every line
on stdin and answers `{"seconds", "loss", "peak_bytes"}`. It imports nothing of specjax.
"""

from __future__ import annotations

import json
import pathlib
import resource
import sys
import time

import numpy as np
import torch
from transformers import AutoModelForCausalLM


def main(folder: str, options: str) -> None:
    """Answers requests until stdin ends."""
    options = json.loads(options)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    )
    model.get_input_embeddings().requires_grad_(False)
    model.get_output_embeddings().requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, betas=(options["b1"], options["b2"]), weight_decay=options["weight_decay"]
    )  # fmt: skip
    arrays = np.load(pathlib.Path(folder) / "batches.npz")
    head = torch.from_numpy(arrays["head"])
    print("{}", flush=True)
    for number, _ in enumerate(sys.stdin):
        batch = {
            name: torch.from_numpy(arrays[f"{name}_{number}"])
            for name in ("tokens", "positions", "segments", "hidden", "weights")
        }
        optimizer.param_groups[0]["lr"] = options["learning_rates"][number]
        started = time.perf_counter()
        total, loss = batch["weights"].sum(), 0.0
        optimizer.zero_grad()
        rows = len(batch["tokens"]) // options["accumulate"]
        for start in range(0, len(batch["tokens"]), rows):
            part = {name: x[start : start + rows] for name, x in batch.items()}
            loss += step(model, head, part, total)
        torch.nn.utils.clip_grad_norm_(trained, options["clip"] or torch.inf)
        optimizer.step()
        seconds = time.perf_counter() - started
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"seconds": seconds, "loss": loss, "peak_bytes": peak}), flush=True)


def step(
    model: torch.nn.Module, head: torch.Tensor, batch: dict[str, torch.Tensor], total: torch.Tensor
) -> float:
    """Adds the gradient of a micro-batch's forward KL, and returns its share of the loss."""
    length = batch["tokens"].shape[1]
    same = batch["segments"][:, :, None] == batch["segments"][:, None, :]
    mask = same & torch.ones(length, length, dtype=torch.bool).tril()
    hidden = model.model(
        input_ids=batch["tokens"].long(), attention_mask=mask[:, None],
        position_ids=batch["positions"].long(),
    ).last_hidden_state  # fmt: skip
    wanted = batch["weights"] > 0
    with torch.no_grad():
        log_p = torch.log_softmax(batch["hidden"][wanted] @ head.T, -1)
    log_q = torch.log_softmax(model.lm_head(hidden[wanted]), -1)
    loss = (log_p.exp() * (log_p - log_q)).sum() / total
    loss.backward()
    return loss.item()


if __name__ == "__main__":
    main(*sys.argv[1:])
