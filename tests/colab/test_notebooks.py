"""The notebooks have one form, and every one runs from top to bottom."""

from __future__ import annotations

import pathlib
import re

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = pathlib.Path(__file__).parent.parent.parent
COLAB = ROOT / "colab"
NAMES = ("quickstart", "invent_a_verifier", "train_a_drafter")
BADGE = re.compile(r"\(https://colab\.research\.google\.com/github/(\S+)/blob/main/(\S+)\)")


def read(name):
    return nbformat.read(COLAB / f"{name}.ipynb", as_version=4)


def source(cells, kind):
    return next(cell.source for cell in cells if cell.cell_type == kind)


@pytest.fixture
def printed_by(monkeypatch):
    """What the cells of a notebook print in their small form, run from top to bottom."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # the specjax beside the notebook
    monkeypatch.setenv("SPECJAX_RUNLOCAL", "1")

    def printed(name):
        notebook = read(name)
        NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(COLAB)}}).execute()
        outputs = (output for cell in notebook.cells for output in cell.get("outputs", []))
        text = "".join(output.get("text", "") for output in outputs)
        for package in ("python", "specjax", "jax", "jaxlib", "flax"):
            assert re.search(rf"^{package} \d+\.\d+", text, re.MULTILINE), package
        return text

    return printed


def test_there_are_no_others():
    assert {path.stem for path in COLAB.glob("*.ipynb")} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_badge_opens_the_notebook_itself(name):
    cells = read(name).cells
    repository, path = BADGE.search(cells[0].source).groups()
    assert cells[0].source.startswith("[![Open in Colab]") and path == f"colab/{name}.ipynb"
    assert f'REPOSITORY = "https://github.com/{repository}"' in source(cells, "code")


@pytest.mark.parametrize("name", NAMES)
def test_they_begin_alike_and_store_no_outputs(name):
    cells = read(name).cells
    assert source(cells, "code") == source(read(NAMES[0]).cells, "code")
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of the notebook machinery, not of specjax
def test_invent_a_verifier(printed_by):
    printed = printed_by("invent_a_verifier")
    assert "strict: first token 0.333, 0.667 (target 0.333, 0.667), accepted 1.111" in printed
    assert "lenient: first token 0.500, 0.500" in printed
    assert printed.count("; lossless") == 2 and printed.count("NOT lossless") == 2
    assert "fresh: largest TV" in printed and printed.count(": τ ") == 3


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of the notebook machinery, not of specjax
def test_quickstart(smollm2, printed_by):
    printed = printed_by("quickstart")
    assert "SmolLM2-135M-Instruct.Q4_1.gguf: 30 layers" in printed
    assert "same tokens: True" in printed
    assert "identical: yes" in printed
    assert printed.count("[LENGTH]") + printed.count("[EOS]") == 3


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of the notebook machinery, not of specjax
def test_train_a_drafter(smollm2, printed_by):
    printed = printed_by("train_a_drafter")
    first, last = re.search(
        r"held-out α_1: (\S+) at step 0, (\S+) at step [1-9]", printed
    ).groups()
    assert float(first) < 0.02 and float(last) > 0.08
    untrained, trained = (
        float(re.search(rf"^{name}: τ (\S+) in \d+ cycles", printed, re.MULTILINE)[1])
        for name in ("untrained", "trained")
    )
    assert untrained < 1.02 and trained > untrained + 0.05
    assert "identical: yes" in printed
