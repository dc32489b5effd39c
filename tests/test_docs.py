"""The code in docs/ runs, and the commands print what the page says."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PAGE = (ROOT / "docs/adding_a_rule.md").read_text("utf-8")


def blocks(page):
    return re.findall(r"```python\n(.*?)```", page, re.DOTALL)


PYTHON = blocks(PAGE)
COMMANDS = re.findall(r"^python -m (experiments\.audit .*)$", PAGE, re.MULTILINE)


def test_every_block_runs():
    assert len(PYTHON) == 3 and len(COMMANDS) == 2
    names = {}
    for block in PYTHON:
        exec(compile(block, "docs/adding_a_rule.md", "exec"), names)
    assert int(names["verdict"].node) in range(3)


def test_the_bigram_drafter_runs(capsys):
    names = {}
    for block in blocks((ROOT / "docs/adding_a_drafter.md").read_text("utf-8")):
        exec(compile(block, "docs/adding_a_drafter.md", "exec"), names)
    assert names["fast"].tau > 1.2 and "τ " in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_the_audit_says_what_the_page_says(command, tmp_path):
    (tmp_path / "lenience.py").write_text(PYTHON[0], "utf-8")
    done = subprocess.run(
        [sys.executable, "-m", *command.split()],
        capture_output=True, text=True, timeout=240, check=False, cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "SPECJAX_CACHE": str(tmp_path)},
    )  # fmt: skip
    if command.endswith(":strict"):
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.count("+0.0 %") == 2
    else:
        assert done.returncode == 1 and done.stderr.count("\n") == 1
        assert done.stderr.startswith("audit: lenience:lenient is not lossless: TV ")
