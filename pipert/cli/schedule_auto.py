"""``pipert schedule auto``: search for a schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipert.cli.schedule_inputs import (
    Comm,
    Forward,
    Group,
    Picture,
    Transport,
    colours,
    numbers,
    rules,
    save,
    save_picture,
    width,
)
from pipert.scheduler.action import Kind
from pipert.scheduler.costs import Costs
from pipert.scheduler.draw.text import text
from pipert.scheduler.formats.text import dumps
from pipert.scheduler.placement import Placement, positive
from pipert.scheduler.simulate import simulate


def auto(
    ranks: Annotated[int, typer.Option("--ranks", help="Pipeline ranks.")] = 4,
    microbatches: Annotated[int, typer.Option("--microbatches", help="Micro-batches of a step.")] = 8,
    chunks: Annotated[
        int | None, typer.Option("--chunks", help="Stages a rank, placed as in interleaved schedules; default 1.")
    ] = None,
    v: Annotated[bool, typer.Option("--v", help="Two stages a rank, placed as in V-shaped schedules.")] = False,
    forward: Forward = "1",
    backward: Annotated[
        str, typer.Option(metavar="T[,T...]", help="Time of the input-gradient half I, for all stages or for each.")
    ] = "1",
    weight: Annotated[
        str, typer.Option(metavar="T[,T...]", help="Time of the weight-gradient half W, for all stages or for each.")
    ] = "1",
    comm: Comm = "0",
    memory: Annotated[
        str | None,
        typer.Option(metavar="N[,N...]", help="Most live (stage, micro-batch) activations, of all ranks or each."),
    ] = None,
    transport: Transport = None,
    group: Group = None,
    seed: Annotated[int, typer.Option(help="Of the search's random choices.")] = 0,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Also write the schedule in the text format.")
    ] = None,
    picture: Picture = None,
) -> None:
    """Search for the fastest schedule of given costs and memory; tell how far from the best it can be."""
    from pipert.scheduler.search import search

    if v and chunks not in (None, 2):
        raise typer.BadParameter(
            f"--v puts two stages on a rank, not {chunks}; leave one of them out", param_hint="--chunks"
        )
    placement = Placement.v(ranks) if v else Placement.looped(ranks, 1 if chunks is None else chunks)
    costs = _costs(forward, backward, weight, comm, placement.num_stages)
    limits = None if memory is None else numbers("--memory", memory, int)
    found = search(
        costs,
        ranks,
        positive("microbatches", microbatches),
        placement=placement,
        limits=limits,
        semantics=rules(transport, group),
        seed=seed,
    )
    timeline = simulate(found.program or found.schedule, costs)
    if output is not None:
        save(dumps(found.schedule), output, "--output")
    if picture is not None:
        save_picture(picture, timeline)
    typer.echo(text(timeline, width=width(), colours=colours()))
    peaks = ", ".join(map(str, timeline.peaks))
    typer.echo(f"makespan {found.makespan:.6g}, bubble {timeline.bubble:.2%}, live activations {peaks}")
    typer.echo(f"bound    {found.bound:.6g}, {_verdict(found.gap, found.optimal)}")


def _costs(forward: str, backward: str, weight: str, comm: str, stages: int) -> Costs:
    """The costs that the options give, the whole backward as the sum of its halves."""
    options = {"--forward": forward, "--backward": backward, "--weight": weight, "--comm": comm}
    times, inputs, weights, hops = (numbers(name, value, float) for name, value in options.items())
    halves = Costs(times, 0, inputs, weights, hops).table(stages)
    return Costs(times, (halves[Kind.I] + halves[Kind.W]).tolist(), inputs, weights, hops)


def _verdict(gap: float, optimal: bool) -> str:
    """How good the schedule is, in words."""
    return "gap 0: no schedule is faster" if optimal else f"gap {gap:.2%}: no schedule is faster by more than that"
