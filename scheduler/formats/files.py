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

#: A file is refused beyond this: 1 GiB is over a hundred million actions.
MOST_BYTES = 1 << 30

#: What the first line that says something looks like, in the order in which they are tried.
_SIGNS = {
    "pipert": re.compile(r"pipert-(schedule|program)\b"),
    "megatron": re.compile(r"(ranks|warmup)\s*[:=]?\s*\d|(virtual_)?microbatch_id\s*\|"),
    "deepspeed": re.compile(r"(rank|stage|stage_id)\s*=?\s*\d+\s*(:|$)", re.IGNORECASE),
    "torch": re.compile(r"\s*,|\"?\(?\d+[A-Z]"),
}


def read(path: str | Path, format: str = "auto", semantics: Semantics = NCCL_PAIR) -> Imported:
    """Read a schedule or program.

    Args:
        path: the file, or a named pipe.
        format: one of `FORMATS`, or ``auto`` to tell it by the first line.
        semantics: the transport of a program whose format names none.

    Raises:
        FormatError: no format of that name, or the file is not written in it; the message says where.
        OSError: there is no such file.
    """
    path = Path(path)
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    name = path.stem if path.is_file() else ""  # a pipe has a number instead
    return decode(content, format, source=str(path), name=name, semantics=semantics)


def decode(
    content: bytes, format: str = "auto", *, source: str, name: str = "", semantics: Semantics = NCCL_PAIR
) -> Imported:
    """Read what a file or a pipe gave; see `read`.

    Args:
        content: the bytes of a UTF-8 text.
        format: one of `FORMATS`, or ``auto``.
        source: what to call the file in errors.
        name: as for `loads`.
        semantics: as for `read`.

    Raises:
        FormatError: as for `read`.
    """
    if len(content) > MOST_BYTES:
        raise FormatError(f"{source} has more than {MOST_BYTES >> 20} MiB; give a smaller one")
    try:
        text = content.decode("utf-8-sig")  # spreadsheets and some editors begin a file with a mark
    except UnicodeDecodeError as error:
        raise FormatError(
            f"{source} is no UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8"
        ) from error
    try:
        return loads(text, format, name=name, semantics=semantics)
    except FormatError as error:
        raise FormatError(f"{source}, {error}") from error


def loads(content: str, format: str = "auto", *, name: str = "", semantics: Semantics = NCCL_PAIR) -> Imported:
    """Read a text; see `read`.

    Args:
        content: what the file holds.
        format: one of `FORMATS`, or ``auto``.
        name: what to call a schedule whose format has no names; the format's name if left out.
        semantics: as for `read`.

    Raises:
        FormatError: as for `read`.
    """
    check_format(format)
    chosen = detect(content) if format == "auto" else format
    if chosen == "torch":
        return torch_csv.loads(content, name=name or chosen, semantics=semantics)
    if chosen == "deepspeed":
        return instructions.loads(content, name=name or chosen, semantics=semantics)
    return megatron.loads(content, name=name or chosen) if chosen == "megatron" else Imported(text.loads(content))


def check_format(format: str) -> None:
    """Refuse a format that does not exist.

    Raises:
        FormatError: it is neither ``auto`` nor one of `FORMATS`.
    """
    if format not in ("auto", *FORMATS):
        raise FormatError(f"no format is called {format!r}; there are auto, {', '.join(FORMATS)}")


def detect(content: str) -> str:
    """The format of a text, by its first line."""
    said = (line for line in content.splitlines() if line.strip() and not line.lstrip().startswith("#"))
    first = next(said, "")
    for name, sign in _SIGNS.items():
        if sign.match(first):
            return name
    return "pipert"  # whose reader says what a file begins with
