"""A tiny model in a GGUF file, text for it, and the programs run as a user runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.checkpoints.test_load import GOLDEN, write_gguf
from tests.conftest import QUICK

# Small programs are kept as well: many of these tests run the same ones.
SHARED_COMPILES = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", GOLDEN / "llama_untied")


@pytest.fixture(scope="module")
def environment(shared_folder):
    """Of the programs."""
    places = {"SPECJAX_CACHE": str(shared_folder / "cache"), "HF_HUB_OFFLINE": "1"}
    return os.environ | QUICK | SHARED_COMPILES | places


@pytest.fixture(scope="module")
def run(environment):
    def run(program, *arguments):
        return subprocess.run(
            [sys.executable, "-m", f"experiments.{program}", *arguments],
            capture_output=True, text=True, timeout=480, check=False, env=environment,
        )  # fmt: skip

    return run


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Answers that repeat their prompts, as token ids."""
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    lines = [
        {"prompt_tokens": [n, n + 1, n], "response_tokens": [n + 1, n, n] * 4} for n in range(5, 13)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
