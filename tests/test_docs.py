"""The code in docs/ runs, the commands are the programs', and both print what the page says."""

from __future__ import annotations

import importlib
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PAGE = (ROOT / "docs/adding_a_rule.md").read_text("utf-8")
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])


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


@pytest.mark.parametrize("name", ["choosing_a_drafter", "training_on_a_pod"])
def test_a_block_prints_what_stands_below_it(name, capsys):
    page = (ROOT / f"docs/{name}.md").read_text("utf-8")
    ((code, printed),) = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", page, re.DOTALL)
    exec(compile(code, f"docs/{name}.md", "exec"), {})
    assert capsys.readouterr().out == printed


def anchors(path):
    """What a page's headings are called in links, as GitHub makes it."""
    headings = re.findall(r"^#+ (.*)$", path.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), link
        assert not anchor or anchor in anchors(found), link


def flags_of(program):
    """Names of the flags that a program defines, and the modules that it shares with others."""
    shared = ["launch", "drafts"] + ["distill"] * (program in ("benchmark_distill", "compare"))
    files = [ROOT / f"experiments/{name}.py" for name in (program, *shared)]
    code = "".join(file.read_text("utf-8") for file in files)
    defined = r'(?:DEFINE(?:_\w+)?\(\s*(?:\w+\(\), )?|define_plot\(\s*|name: str = )"(\w+)"'
    return set(re.findall(defined, code))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_have_flags_and_keys_that_exist(page):
    text = page.read_text("utf-8").replace("\\\n", " ").replace("…", "")
    for program, rest in re.findall(r"python -m experiments\.(\w+) ([^\n`]*)", text):
        flags = re.findall(r"--([\w.]+)(?:=(\S*))?", rest)
        assert {name for name, _ in flags if "." not in name} <= flags_of(program), rest
        values = dict(flags)
        if values.get("config"):
            path, _, mode = values["config"].partition(":")
            module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
            config = module.get_config(mode)
            for name in values:
                node = config
                for key in name.split(".")[1:]:
                    assert key in node, f"{page.name}: --{name}"
                    node = node[key]


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
