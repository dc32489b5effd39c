"""Every notebook runs from top to bottom."""

from __future__ import annotations

import pathlib

import nbformat
import pytest
from nbclient import NotebookClient

COLAB = pathlib.Path(__file__).parent.parent.parent / "colab"


def printed_by(name):
    """What the cells of a notebook print, run from top to bottom."""
    notebook = nbformat.read(COLAB / name, as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(COLAB)}}).execute()
    outputs = (output for cell in notebook.cells for output in cell.get("outputs", []))
    return "".join(output.get("text", "") for output in outputs)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of the notebook machinery, not of specjax
def test_invent_a_verifier():
    printed = printed_by("invent_a_verifier.ipynb")
    assert "strict: first token 0.333, 0.667 (target 0.333, 0.667), accepted 1.111" in printed
    assert "lenient: first token 0.500, 0.500" in printed
    assert printed.count("; lossless") == 2 and printed.count("NOT lossless") == 2
    assert "fresh: largest TV" in printed and printed.count(": τ ") == 3


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of the notebook machinery, not of specjax
def test_quickstart(smollm2):
    printed = printed_by("quickstart.ipynb")
    assert "SmolLM2-135M-Instruct.Q4_1.gguf: 30 layers" in printed
    assert "same tokens: True" in printed
    assert "identical: yes" in printed
    assert printed.count("[LENGTH]") + printed.count("[EOS]") == 3
