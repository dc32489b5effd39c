"""Every notebook runs from top to bottom."""

from __future__ import annotations

import pathlib

import nbformat
import pytest
from nbclient import NotebookClient

COLAB = pathlib.Path(__file__).parent.parent.parent / "colab"


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of the notebook machinery, not of specjax
def test_quickstart(smollm2):
    notebook = nbformat.read(COLAB / "quickstart.ipynb", as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(COLAB)}}).execute()
    printed = "".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", [])
    )
    assert "SmolLM2-135M-Instruct.Q4_1.gguf: 30 layers" in printed
    assert "same tokens: True" in printed
    assert "identical: yes" in printed
    assert printed.count("[LENGTH]") + printed.count("[EOS]") == 3
