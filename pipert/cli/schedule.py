"""``pipert schedule``: show, check, simulate and compare schedules, by name or from a file. No torch, no MPI."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipert.cli.schedule_auto import auto
from pipert.cli.schedule_inputs import (
    Backward,
    Chunks,
    Comm,
    Format,
    Forward,
    Group,
    GroupSize,
    Microbatches,
    Picture,
    Ranks,
    Source,
    Transport,
    colours,
    is_cut,
    numbers,
    on,
    read,
    rules,
    save,
    save_picture,
    width,
)
from pipert.cli.schedule_pairs import compare, diff
from pipert.scheduler.costs import Costs
from pipert.scheduler.draw.text import text
from pipert.scheduler.errors import UnsafeProgramError
from pipert.scheduler.formats import torch_csv
from pipert.scheduler.formats.text import dumps
from pipert.scheduler.generators.registry import GENERATORS
from pipert.scheduler.program import Program
from pipert.scheduler.recurrence import simulate_1f1b
from pipert.scheduler.schedule import Schedule
from pipert.scheduler.semantics import NAMED
from pipert.scheduler.simulate import simulate as run
from pipert.scheduler.summary import Summary
from pipert.scheduler.trace import chrome_trace
from pipert.scheduler.verify import verify

#: A picture of more micro-batches, over all ranks, shows nothing.
DRAWN = 500_000

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Show, check, simulate and compare pipeline schedules.",
)

app.command()(diff)
app.command()(compare)
app.command()(auto)


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
    group_size: GroupSize = None,
    format: Format = "auto",
    transport: Transport = None,
    group: Group = None,
    as_text: Annotated[
        bool, typer.Option("--text", help="Print it in the text format, to be saved and edited.")
    ] = False,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="Print it as the schedule CSV of PyTorch's pipelining.")
    ] = False,
    picture: Picture = None,
) -> None:
    """Show what every rank does, in order; with a transport also every message."""
    semantics = rules(transport, group)
    target = on(read(source, ranks, microbatches, chunks, format, semantics, group_size), semantics)
    if picture is not None:
        save_picture(picture, run(target, Costs(1, 2)))
    if as_csv:
        typer.echo(torch_csv.dumps(target).rstrip())
    else:
        typer.echo(dumps(target).rstrip() if as_text else text(target, width=width(), colours=colours()))


@app.command()
def check(
    source: Source,
    ranks: Ranks = 4,
    microbatches: Microbatches = 8,
    chunks: Chunks = 1,
    group_size: GroupSize = None,
    format: Format = "auto",
    transport: Transport = None,
    group: Group = None,
    limit: Annotated[
        str | None, typer.Option(metavar="N[,N...]", help="Most live activations, for all ranks or for each.")
    ] = None,
) -> None:
    """Prove a schedule or program safe, or show why it is not.

    The exit code is 0 if it is safe, 1 if not, 2 if it cannot be read.
    """
    limits = None if limit is None else numbers("--limit", limit, int)
    semantics = rules(transport, group)
    target = read(source, ranks, microbatches, chunks, format, semantics, group_size)
    if isinstance(target, Schedule):
        proof = verify(target, limits=limits)  # a fault of the schedule is best shown without messages
        target = on(target, semantics) if proof.ok else target
    if isinstance(target, Program):
        proof = verify(on(target, semantics), limits=limits)
    typer.echo(str(proof))
    if not proof.ok and is_cut(source):
        typer.echo(f"{source} ends within a line, so it may have been cut off", err=True)
    raise typer.Exit(0 if proof.ok else 1)


@app.command()
def simulate(
    source: Source,
    ranks: Ranks = 4,
    microbatches: Microbatches = 8,
    chunks: Chunks = 1,
    group_size: GroupSize = None,
    format: Format = "auto",
    transport: Transport = None,
    group: Group = None,
    forward: Forward = "1",
    backward: Backward = "2",
    comm: Comm = "0",
    picture: Picture = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write it as a trace for ui.perfetto.dev.")
    ] = None,
) -> None:
    """Run a schedule or program in simulated time: makespan, bubble, idle time and live activations.

    Any number of micro-batches will do for 1f1b without a transport; beyond a million actions it is not drawn. The exit
    code is 1 if it cannot run to its end.
    """
    times = {"forward": forward, "backward": backward, "comm": comm}
    costs = Costs(**{name: numbers(f"--{name}", value, float) for name, value in times.items()})
    semantics = rules(transport, group)
    if source == "1f1b" and chunks == 1 and ranks * microbatches > DRAWN and not (semantics or picture or trace):
        typer.echo(_figures(simulate_1f1b(ranks, microbatches, costs)))
        return
    target = on(read(source, ranks, microbatches, chunks, format, semantics, group_size), semantics)
    try:
        timeline = run(target, costs)
    except UnsafeProgramError as error:
        typer.echo(str(error))
        raise typer.Exit(1) from error
    if picture is not None:
        save_picture(picture, timeline)
    if trace is not None:
        save(chrome_trace(timeline), trace, "--trace")
    typer.echo(text(timeline, width=width(), colours=colours()))
    typer.echo(_figures(timeline.summary()))


def _figures(summary: Summary) -> str:
    """Makespan and bubble, and for each rank its idle time and its most live activations."""
    rows = [("rank", "idle", "share", "live")]
    for rank, (idle, peak) in enumerate(zip(summary.idle, summary.peaks, strict=True)):
        share = idle / summary.makespan if summary.makespan else 0.0
        rows.append((str(rank), f"{idle:.6g}", f"{share:.1%}", str(peak)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([f"makespan {summary.makespan:.6g}, bubble {summary.bubble:.2%}", *table])
