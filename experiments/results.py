"""A file of figures that a run adds to, and the same command goes on with."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from experiments import launch


class Results:
    """The rows so far, and the file that keeps them; one process at a time may use it.

    Attributes:
      settings: what all rows depend on.
      rows: as they were added.
    """

    def __init__(self, path: str | None, settings: dict[str, Any]):
        self._path, self.settings, self.rows = path, settings, []
        if not path or not pathlib.Path(path).stat().st_size:
            return
        try:
            then = json.loads(pathlib.Path(path).read_text("utf-8"))
            before, self.rows = then["settings"], then["rows"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path} holds no results of this program; name another") from None
        self._require_same(before, settings)

    def _require_same(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        other = sorted(name for name in before | now if before.get(name) != now.get(name))
        if other:
            differ = ", ".join(f"{name} {before.get(name)} (now {now.get(name)})" for name in other)
            raise ValueError(
                f"{self._path} holds results with {differ}: give these again, or move that file away"
            )

    def check_identity(self, target: str, identity: Mapping[str, Any]) -> None:
        """Raises ValueError where there are rows of another target or drafter of these names."""
        for row in self.rows:
            if row["target"] == target:
                self._require_same(row["identity"], identity)

    def has(self, **cell: Any) -> bool:
        """Whether there are rows with these entries."""
        return any(all(row[key] == value for key, value in cell.items()) for row in self.rows)

    def add(self, rows: list[dict[str, Any]]) -> None:
        """Adds rows, and writes."""
        self.rows += rows
        launch.write_json(self._path, {"settings": self.settings, "rows": self.rows})
