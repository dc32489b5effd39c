"""Decodes with `transformers`, on request: the process behind `specjax.evaluation.peer`.

  python peer_worker.py FOLDER [ASSISTANT_FOLDER]

Each line on stdin is a request `{"prompts", "mode", "num_draft_tokens", "max_new_tokens",
"stop_tokens"}`, each line on stdout its answer `{"tokens", "seconds"}`, prefill included. The first
line on stdout says that the models are loaded. It imports nothing of specjax, so that no second jax
takes memory or cores.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM


def main(folder: str, assistant_folder: str | None = None) -> None:
    """Answers requests until stdin ends."""
    model, assistant = (
        path and AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for path in (folder, assistant_folder)
    )
    print("{}", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        k, stops = request["num_draft_tokens"], request["stop_tokens"]
        options = {}
        if request["mode"] == "lookup":
            options = {"prompt_lookup_num_tokens": k}
        elif request["mode"] == "assisted":
            options = {"assistant_model": assistant}
            assistant.generation_config.num_assistant_tokens = k
            assistant.generation_config.num_assistant_tokens_schedule = "constant"
            assistant.generation_config.assistant_confidence_threshold = 0.0
        width = max(map(len, request["prompts"]))
        pad = stops[0] if stops else 0
        ids = torch.tensor([[pad] * (width - len(row)) + row for row in request["prompts"]])
        mask = torch.tensor(
            [[0] * (width - len(row)) + [1] * len(row) for row in request["prompts"]]
        )
        started = time.perf_counter()
        with torch.no_grad():
            out = model.generate(
                ids, attention_mask=mask, max_new_tokens=request["max_new_tokens"],
                do_sample=False, eos_token_id=stops or None, pad_token_id=pad, **options,
            )  # fmt: skip
        seconds = time.perf_counter() - started
        rows = []
        for row in out[:, width:].tolist():
            ends = [i for i, token in enumerate(row) if token in stops]
            rows.append(row[: ends[0] + 1] if ends else row)
        print(json.dumps({"tokens": rows, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
