r"""Makes qwen_gguf.json: reference logits of the Qwen2.5-Coder GGUF pair, by `transformers`.

  python -m tests.golden.make_qwen_gguf FOLDER

FOLDER holds the two files named below. Of every position of the prompt: the argmax, the logarithm of
the sum of exponentials, and the logits of every 4001st token. `transformers` takes minutes to read
such a file, which is why its answer is kept.
"""

from __future__ import annotations

import json
import pathlib
import sys

import torch
from transformers import AutoModelForCausalLM

FILES = tuple(f"qwen2.5-coder-{size}-instruct-q4_k_m.gguf" for size in ("0.5b", "1.5b"))
PROMPT = [750, 15811, 1445, 982, 262, 421, 308, 366, 220, 17, 510, 286, 470, 308]
STRIDE = 4001


def main(folder: str) -> None:
    """Runs both models over the prompt."""
    golden = {"prompt": PROMPT, "stride": STRIDE}
    for name in FILES:
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
        with torch.no_grad():
            logits = model(torch.tensor([PROMPT])).logits[0]
        golden[name] = {
            "argmax": logits.argmax(-1).tolist(),
            "logsumexp": logits.logsumexp(-1).tolist(),
            "logits": logits[:, ::STRIDE].tolist(),
        }
        del model
    path = pathlib.Path(__file__).with_name("qwen_gguf.json")
    path.write_text(json.dumps(golden) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
