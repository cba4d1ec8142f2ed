"""Metrics as JSON lines: one object a line, readable while the run goes on."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self, TextIO

from pipert.errors import DataError

Value = float | int | str | bool | None


class MetricsWriter:
    """Write records to a file, each at once. Numbers that JSON lacks become the texts "nan", "inf" and "-inf".

    Args:
        path: the file; its folder is made.
        append: go on with a file that is there, instead of starting a new one.
    """

    def __init__(self, path: Path, *, append: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file: TextIO = path.open("a" if append else "w", encoding="utf-8")

    def write(self, record: Mapping[str, Value]) -> None:
        """Add a record; it is in the file when this returns."""
        plain = {key: _plain(value) for key, value in record.items()}
        self._file.write(json.dumps(plain, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file; a last line that is not finished (the run goes on, or was killed) is left out.

    Raises:
        DataError: another line is not a record.
    """
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict):
            yield record
        elif number < len(lines) or line.endswith("\n"):
            raise DataError(f"{path}, line {number} is not a record of metrics: {line.strip()[:80]!r}")


def _plain(value: Value) -> Value:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
