"""What the commands of ``pipert schedule`` share: options, and how schedules, transports and numbers are read."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from pipert.scheduler.errors import FormatError, LayoutError
from pipert.scheduler.formats.files import MOST_BYTES, check_format, decode
from pipert.scheduler.formats.files import read as read_file
from pipert.scheduler.formats.imported import Imported
from pipert.scheduler.generators.registry import GENERATORS, generate
from pipert.scheduler.lower import lower
from pipert.scheduler.program import Program
from pipert.scheduler.schedule import Schedule
from pipert.scheduler.semantics import NCCL_PAIR, Semantics
from pipert.scheduler.timeline import Timeline
from pipert.scheduler.transports import transport as named_transport

Number = TypeVar("Number", int, float)

Source = Annotated[
    str, typer.Argument(metavar="NAME|FILE", help="A name (pipert schedule list), a file, or - for standard input.")
]
Ranks = Annotated[int, typer.Option("--ranks", help="Pipeline ranks of a schedule made by name.")]
Microbatches = Annotated[int, typer.Option("--microbatches", help="Its micro-batches.")]
Chunks = Annotated[int, typer.Option("--chunks", help="Its stages a rank.")]
GroupSize = Annotated[
    int | None, typer.Option("--group-size", help="Micro-batches of a group of an interleaved schedule, >= ranks.")
]
Format = Annotated[
    str, typer.Option("--format", metavar="NAME", help="Of a file: auto, pipert, torch, deepspeed or megatron.")
]
Transport = Annotated[
    str | None,
    typer.Option("--transport", help="Lower a schedule for this transport; judge a program file by its rules."),
]
Group = Annotated[
    str | None,
    typer.Option("--group", help="What shares a queue on that transport: pair, direction, rank or none."),
]
Forward = Annotated[str, typer.Option("--forward", metavar="T[,T...]", help="Time of F, for all stages or for each.")]
Backward = Annotated[str, typer.Option("--backward", metavar="T[,T...]", help="Time of B (I and W: half of it each).")]
Comm = Annotated[str, typer.Option("--comm", metavar="T[,T...]", help="Time of a message between stage s and s + 1.")]
Picture = Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Also write the picture as SVG.")]


def read(
    source: str,
    ranks: int,
    microbatches: int,
    chunks: int,
    format: str = "auto",
    semantics: Semantics | None = None,
    group_size: int | None = None,
) -> Schedule | Program:
    """The schedule of that name, else the file; what a file has that is left out is told on standard error."""
    check_format(format)
    if source in GENERATORS:
        return generate(source, ranks, microbatches, chunks, group_size)
    imported = _from_file(source, format, semantics or NCCL_PAIR)
    if imported is not None:
        for notice in imported.notices:
            typer.echo(notice, err=True)
        return imported.value
    near = get_close_matches(source.lower(), GENERATORS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"the names are {', '.join(GENERATORS)}"
    raise LayoutError(f"{source} is neither a schedule's name nor a file; {hint}")


def _from_file(source: str, format: str, semantics: Semantics) -> Imported | None:
    """What a file, a pipe, or for ``-`` the standard input holds; None if there is nothing of that name."""
    try:
        if source == "-":
            return decode(sys.stdin.buffer.read(MOST_BYTES + 1), format, source="standard input", semantics=semantics)
        return read_file(source, format, semantics) if Path(source).exists() else None
    except OSError as error:
        raise FormatError(f"{source} cannot be read ({error.strerror}); name a file that can") from error


def is_cut(source: str) -> bool:
    """Whether the source is a file whose last line has no end, as that of a file that was cut off."""
    if source in GENERATORS or not Path(source).is_file():
        return False
    with Path(source).open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) not in b"\r\n"


def rules(transport: str | None, group: str | None) -> Semantics | None:
    """The message rules that the options ask for."""
    if transport is None and group is not None:
        raise typer.BadParameter("needs --transport: it says what shares a queue there", param_hint="--group")
    return None if transport is None else named_transport(transport, group)


def on(target: Schedule | Program, semantics: Semantics | None) -> Schedule | Program:
    """A schedule lowered for a transport, a program as it is but under the transport's rules."""
    if semantics is None:
        return target
    return replace(target, semantics=semantics) if isinstance(target, Program) else lower(target, semantics)


def numbers(option: str, value: str, number: Callable[[str], Number]) -> Number | tuple[Number, ...]:
    """One number, or a tuple of those between commas."""
    try:
        found = tuple(map(number, value.split(",")))
    except ValueError as error:
        raise typer.BadParameter(f"{value!r} is neither a number nor numbers with commas", param_hint=option) from error
    return found if len(found) > 1 else found[0]


def save(text: str, path: Path, option: str) -> None:
    """Write a text that an option asked for."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(f"{path} cannot be written: {error.strerror}", param_hint=option) from error


def save_picture(path: Path, *timelines: Timeline) -> None:
    """Write timelines as one SVG picture."""
    from pipert.scheduler.draw.svg import svg

    save(svg(*timelines), path, "--svg")


def width() -> int:
    """Columns of the terminal."""
    return shutil.get_terminal_size((100, 24)).columns


def colours() -> bool:
    """Whether to print colours."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ
