"""What the programs say while a target is loaded."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

from experiments import launch
from tests.checkpoints.test_load import GOLDEN

LOAD = """
from experiments import launch
from specjax.checkpoints import memory
memory.free = lambda: {free}
launch.load_target({target!r})
"""


def test_what_cannot_be_written_is_told_before_the_work(tmp_path):
    launch.check_writable(str(tmp_path / "new.json"))
    for path in (tmp_path, tmp_path / "no" / "folder.json"):
        with pytest.raises(OSError, match=str(tmp_path)):
            launch.check_writable(str(path))


def stderr_of(free, terminal=False):
    """Of loading a tiny target in a process whose stderr is a terminal or a pipe."""
    code = LOAD.format(free=free, target=str(GOLDEN / "llama_tied"))
    reader, writer = pty.openpty() if terminal else os.pipe()
    subprocess.run([sys.executable, "-c", code], stderr=writer, check=True)
    told = os.read(reader, 10_000)
    os.close(reader)
    os.close(writer)
    return told.decode()


def test_what_weights_need_is_told_on_a_terminal():
    told = stderr_of(2**30, terminal=True)
    assert "target llama_tied: 0.00 G parameters, 0.00 GiB in float32" in told
    assert "they do not fit" not in told


def test_weights_that_do_not_fit_are_told_anywhere():
    told = stderr_of(0)
    assert told.startswith("target llama_tied: 0.00 G parameters") and told.count("\n") == 1
    assert "they do not fit; load_target(…, dtype='bfloat16') halves them" in told
