"""``pipert schedule``: show, check and simulate pipeline schedules, by name or from a file. No torch, no MPI."""

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

from pipert.scheduler.costs import Costs
from pipert.scheduler.draw.text import text
from pipert.scheduler.errors import LayoutError, UnsafeProgramError
from pipert.scheduler.formats.text import dumps, load
from pipert.scheduler.generators.registry import GENERATORS, generate
from pipert.scheduler.lower import lower
from pipert.scheduler.program import Program
from pipert.scheduler.schedule import Schedule
from pipert.scheduler.semantics import NAMED
from pipert.scheduler.simulate import simulate as run
from pipert.scheduler.timeline import Timeline
from pipert.scheduler.verify import verify

Number = TypeVar("Number", int, float)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Show, check and simulate pipeline schedules.",
)

Source = Annotated[str, typer.Argument(metavar="NAME|FILE", help="A schedule's name (pipert schedule list) or a file.")]
Ranks = Annotated[int, typer.Option("--ranks", help="Pipeline ranks of a schedule made by name.")]
Microbatches = Annotated[int, typer.Option("--microbatches", help="Its micro-batches.")]
Chunks = Annotated[int, typer.Option("--chunks", help="Its stages a rank.")]
Transport = Annotated[
    str | None,
    typer.Option("--transport", help="Lower a schedule for this transport; judge a program file by its rules."),
]
Picture = Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Also write the picture as SVG.")]


@app.command("list")
def list_names() -> None:
    """List the schedules and transports that have names."""
    lines = ["schedules"]
    lines += [f"  {name:<16} {entry.summary}" for name, entry in GENERATORS.items()]
    lines += ["transports", *(f"  {name:<16} {semantics.describe()}" for name, semantics in NAMED.items())]
    typer.echo("\n".join(lines))


@app.command()
def show(
    source: Source,
    ranks: Ranks = 4,
    microbatches: Microbatches = 8,
    chunks: Chunks = 1,
    transport: Transport = None,
    as_text: Annotated[
        bool, typer.Option("--text", help="Print it in the text format, to be saved and edited.")
    ] = False,
    picture: Picture = None,
) -> None:
    """Show what every rank does, in order; with a transport also every message."""
    target = _on(_read(source, ranks, microbatches, chunks), transport)
    if picture is not None:
        _save(run(target, Costs(1, 2)), picture)
    typer.echo(dumps(target).rstrip() if as_text else text(target, width=_width(), colours=_colours()))


@app.command()
def check(
    source: Source,
    ranks: Ranks = 4,
    microbatches: Microbatches = 8,
    chunks: Chunks = 1,
    transport: Transport = None,
    limit: Annotated[
        str | None, typer.Option(metavar="N[,N...]", help="Most live activations, for all ranks or for each.")
    ] = None,
) -> None:
    """Prove a schedule or program safe, or show why it is not.

    The exit code is 0 if it is safe, 1 if not, 2 if it cannot be read.
    """
    limits = None if limit is None else _numbers("--limit", limit, int)
    target = _read(source, ranks, microbatches, chunks)
    if isinstance(target, Schedule):
        proof = verify(target, limits=limits)  # a fault of the schedule is best shown without messages
        target = _on(target, transport) if proof.ok else target
    if isinstance(target, Program):
        proof = verify(_on(target, transport), limits=limits)
    typer.echo(str(proof))
    raise typer.Exit(0 if proof.ok else 1)


@app.command()
def simulate(
    source: Source,
    ranks: Ranks = 4,
    microbatches: Microbatches = 8,
    chunks: Chunks = 1,
    transport: Transport = None,
    forward: Annotated[str, typer.Option(metavar="T[,T...]", help="Time of F, for all stages or for each.")] = "1",
    backward: Annotated[str, typer.Option(metavar="T[,T...]", help="Time of B (I and W: half of it each).")] = "2",
    comm: Annotated[str, typer.Option(metavar="T[,T...]", help="Time of a message between stage s and s + 1.")] = "0",
    picture: Picture = None,
) -> None:
    """Run a schedule or program in simulated time: makespan, bubble, idle time and live activations.

    The exit code is 1 if it cannot run to its end.
    """
    times = {"forward": forward, "backward": backward, "comm": comm}
    costs = Costs(**{name: _numbers(f"--{name}", value, float) for name, value in times.items()})
    target = _on(_read(source, ranks, microbatches, chunks), transport)
    try:
        timeline = run(target, costs)
    except UnsafeProgramError as error:
        typer.echo(str(error))
        raise typer.Exit(1) from error
    if picture is not None:
        _save(timeline, picture)
    typer.echo(text(timeline, width=_width(), colours=_colours()))
    typer.echo(_figures(timeline))


def _read(source: str, ranks: int, microbatches: int, chunks: int) -> Schedule | Program:
    """The schedule of that name, else the file."""
    if source in GENERATORS:
        return generate(source, ranks, microbatches, chunks)
    if Path(source).is_file():
        return load(source)
    near = get_close_matches(source.lower(), GENERATORS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"the names are {', '.join(GENERATORS)}"
    raise LayoutError(f"{source} is neither a schedule's name nor a file; {hint}")


def _on(target: Schedule | Program, transport: str | None) -> Schedule | Program:
    """A schedule lowered for a transport, a program as it is but under the transport's rules."""
    if transport is None:
        return target
    semantics = NAMED.get(transport)
    if semantics is None:
        near = get_close_matches(transport.lower(), NAMED, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise LayoutError(f"no transport is called {transport!r}; {hint}there are {', '.join(NAMED)}")
    return replace(target, semantics=semantics) if isinstance(target, Program) else lower(target, semantics)


def _numbers(option: str, value: str, number: Callable[[str], Number]) -> Number | tuple[Number, ...]:
    """One number, or a tuple of those between commas."""
    try:
        numbers = tuple(map(number, value.split(",")))
    except ValueError as error:
        raise typer.BadParameter(f"{value!r} is neither a number nor numbers with commas", param_hint=option) from error
    return numbers if len(numbers) > 1 else numbers[0]


def _figures(timeline: Timeline) -> str:
    """Makespan and bubble, and for each rank its idle time and its most live activations."""
    rows = [("rank", "idle", "share", "live")]
    for rank, (idle, peak) in enumerate(zip(timeline.idle, timeline.peaks, strict=True)):
        share = idle / timeline.makespan if timeline.makespan else 0.0
        rows.append((str(rank), f"{idle:.6g}", f"{share:.1%}", str(peak)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([f"makespan {timeline.makespan:.6g}, bubble {timeline.bubble:.2%}", *table])


def _save(timeline: Timeline, path: Path) -> None:
    from pipert.scheduler.draw.svg import svg

    try:
        path.write_text(svg(timeline), encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(f"{path} cannot be written: {error.strerror}", param_hint="--svg") from error


def _width() -> int:
    return shutil.get_terminal_size((100, 24)).columns


def _colours() -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ
