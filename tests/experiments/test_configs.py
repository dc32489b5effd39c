"""Every config names a drafter and options that it has, and says how to run it."""

from __future__ import annotations

import importlib
import pathlib

import pytest

from specjax import drafters

ROOT = pathlib.Path(__file__).parent.parent.parent
NAMES = sorted(path.stem for path in (ROOT / "configs").glob("*.py") if path.stem != "common")


@pytest.mark.parametrize("name", [name for name in NAMES if name != "__init__"])
def test_a_config(name):
    module = importlib.import_module(f"configs.{name}")
    full, local = module.get_config(), module.get_config("runlocal")
    assert f"--config=configs/{name}.py" in module.__doc__ and "--workdir=" in module.__doc__
    assert full.to_dict().keys() == local.to_dict().keys()
    for config in (full, local):
        drafters.check_options(config.drafter.to_dict())
        assert 0 <= config.optimizer.warmup_steps < config.total_steps
        assert config.data.batch_size % config.accumulate == 0
    assert local.target == "smollm2" and local.total_steps <= 12
    with pytest.raises(ValueError, match="only :runlocal is known"):
        module.get_config("runlokal")
