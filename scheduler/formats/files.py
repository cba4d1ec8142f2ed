"""Read a file in any format: pipert's own, or those of other systems."""

from __future__ import annotations

import re
from pathlib import Path

from pipert.scheduler.errors import FormatError
from pipert.scheduler.formats import instructions, megatron, text, torch_csv
from pipert.scheduler.formats.imported import Imported
from pipert.scheduler.semantics import NCCL_PAIR, Semantics

#: The formats by name.
FORMATS = ("pipert", "torch", "deepspeed", "megatron")

#: What the first line that says something looks like, in the order in which they are tried.
_SIGNS = {
    "pipert": re.compile(r"pipert-(schedule|program)\b"),
    "megatron": re.compile(r"(ranks|warmup)\s+\d"),
    "deepspeed": re.compile(r"(rank|stage)\s+\d+\s*:"),
    "torch": re.compile(r"\s*,|\(?\d+[A-Z]"),
}


def read(path: str | Path, format: str = "auto", semantics: Semantics = NCCL_PAIR) -> Imported:
    """Read a schedule or program.

    Args:
        path: the file.
        format: one of `FORMATS`, or ``auto`` to tell it by the first line.
        semantics: the transport of a program whose format names none.

    Raises:
        FormatError: no format of that name, or the file is not written in it; the message says where.
        OSError: there is no such file.
    """
    if format not in ("auto", *FORMATS):
        raise FormatError(f"no format is called {format!r}; there are auto, {', '.join(FORMATS)}")
    try:
        content = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"{path} is not a text file ({error.reason} at byte {error.start})") from error
    name = Path(path).stem
    try:
        chosen = detect(content) if format == "auto" else format
        if chosen == "torch":
            return torch_csv.loads(content, name=name, semantics=semantics)
        if chosen == "deepspeed":
            return instructions.loads(content, name=name, semantics=semantics)
        return megatron.loads(content, name=name) if chosen == "megatron" else Imported(text.loads(content))
    except FormatError as error:
        raise FormatError(f"{path}, {error}") from error


def detect(content: str) -> str:
    """The format of a text, by its first line.

    Raises:
        FormatError: it looks like none of them.
    """
    said = (line for line in content.splitlines() if line.strip() and not line.lstrip().startswith("#"))
    first = next(said, "")
    for name, sign in _SIGNS.items():
        if sign.match(first):
            return name
    return "pipert"  # whose reader says what a file begins with
