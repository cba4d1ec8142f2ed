"""``pipert schedule diff`` and ``compare``: two schedules side by side, or several."""

from __future__ import annotations

import io
from typing import Annotated

import typer

from pipert.cli.schedule_inputs import (
    Chunks,
    Format,
    Group,
    GroupSize,
    Microbatches,
    Picture,
    Ranks,
    Transport,
    colours,
    on,
    read,
    rules,
    save_picture,
    width,
)
from pipert.scheduler.bounds import makespan_bound
from pipert.scheduler.costs import Costs
from pipert.scheduler.difference import Difference
from pipert.scheduler.errors import UnsafeProgramError
from pipert.scheduler.generators.registry import GENERATORS
from pipert.scheduler.simulate import simulate
from pipert.scheduler.timeline import Timeline


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A schedule's name or a file.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
    ranks: Ranks = 4,
    microbatches: Microbatches = 8,
    chunks: Chunks = 1,
    group_size: GroupSize = None,
    format: Format = "auto",
    transport: Transport = None,
    group: Group = None,
) -> None:
    """Show where two schedules or programs differ, rank by rank.

    The exit code is 0 if every rank does the same in the same order, 1 if not, 2 if one cannot be read.
    """
    semantics = rules(transport, group)
    sides = []
    for one in (a, b):
        layout = ranks, microbatches, _chunks(one, chunks)
        sides.append(on(read(one, *layout, format, semantics, _group_size(one, group_size)), semantics))
    difference = Difference(*sides)
    typer.echo(str(difference))
    raise typer.Exit(0 if difference.same else 1)


def compare(
    sources: Annotated[list[str], typer.Argument(metavar="NAME|FILE...", help="Schedules, by name or from files.")],
    ranks: Ranks = 4,
    microbatches: Microbatches = 8,
    chunks: Chunks = 2,
    group_size: GroupSize = None,
    format: Format = "auto",
    transport: Transport = None,
    group: Group = None,
    forward: Annotated[float, typer.Option(metavar="T", help="Time of a rank's forward, all its stages.")] = 1,
    backward: Annotated[float, typer.Option(metavar="T", help="Time of a rank's backward (I and W: half each).")] = 2,
    comm: Annotated[float, typer.Option(metavar="T", help="Time of a message.")] = 0,
    picture: Picture = None,
) -> None:
    """Compare schedules: makespan, bubble, activations kept, and the least makespan that any order could have.

    All ranks do the same work: a rank with several stages divides the forward and the backward among them. The exit
    code is 1 if one cannot run to its end.
    """
    semantics = rules(transport, group)
    rows, timelines = [], []
    for source in sources:
        layout = ranks, microbatches, _chunks(source, chunks)
        target = on(read(source, *layout, format, semantics, _group_size(source, group_size)), semantics)
        stages = target.num_stages / target.num_ranks
        costs = Costs(forward / stages, backward / stages, comm=comm)
        try:
            timeline = simulate(target, costs)
        except UnsafeProgramError as error:
            typer.echo(str(error))
            raise typer.Exit(1) from error
        timelines.append(timeline)
        rows.append(_figures(timeline, stages, makespan_bound(target, costs)))
    if picture is not None:
        save_picture(picture, *timelines)
    typer.echo(_table(rows))


def _chunks(source: str, chunks: int) -> int:
    """The chunks to ask for: those of a schedule that has its own number are not in question."""
    return chunks if source in GENERATORS and GENERATORS[source].chunked else 1


def _group_size(source: str, size: int | None) -> int | None:
    """The group size to ask for, likewise."""
    return size if source in GENERATORS and GENERATORS[source].grouped else None


def _figures(timeline: Timeline, stages: float, bound: float) -> tuple[str, ...]:
    """One row of the table."""
    within = max(timeline.idle_within)
    busy = sum(timeline.busy) / timeline.num_ranks
    return (
        timeline.name,
        f"{stages:g}",
        f"{timeline.makespan:.6g}",
        f"{timeline.bubble:.2%}",
        f"{within / (within + busy) if busy else 0:.2%}",
        f"{max(timeline.peaks) / stages:g}",
        f"{bound:.6g}",
        f"{timeline.makespan / bound - 1 if bound else 0:.1%}",
    )


def _table(rows: list[tuple[str, ...]]) -> str:
    """The figures of all schedules; the least makespan, bubbles and peak are bold in a terminal."""
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("schedule", "stages a rank", "makespan", "bubble", "own bubble", "peak", "bound", "above it"):
        table.add_column(heading, justify="left" if heading == "schedule" else "right", no_wrap=True)
    best = {at: min(float(row[at].rstrip("%")) for row in rows) for at in range(2, 6)}
    for row in rows:
        bold = [at in best and float(cell.rstrip("%")) == best[at] for at, cell in enumerate(row)]
        table.add_row(*(f"[bold]{cell}[/]" if yes else escape(cell) for cell, yes in zip(row, bold, strict=True)))
    out = io.StringIO()
    wide = max(width(), 160)  # a terminal that is too narrow shall wrap a row, not lose parts of it
    Console(file=out, width=wide, force_terminal=colours(), highlight=False, legacy_windows=False).print(table)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    return "\n".join(
        [
            *(line for line in lines if line),
            "own bubble: between each rank's own first and last action, where the next step may follow rank by rank",
            "peak: micro-batches that a rank keeps at most, through all of its stages",
            "bound: the least makespan that any order of the same work on the same ranks can have",
        ]
    )
