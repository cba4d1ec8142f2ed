"""``pipert verify-run``: does a configuration train to the numbers of one process?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from pipert.verify_run import Comparison

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def verify_run(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A TOML file, as for examples/train_gpt.py.")],
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings that win over the file's.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="How many steps are compared.")] = 3,
    dtype: Annotated[
        Literal["configured", "float64", "float32", "bfloat16"],
        typer.Option(help="Of the parameters; float64 tells faults from rounding best."),
    ] = "configured",
    json: Annotated[bool, typer.Option("--json", help="Print one line of JSON instead of a table.")] = False,
) -> None:
    """Train a few steps in the configured layout and in one process, and report the largest differences.

    Starts the ranks itself; under mpirun or srun it uses those that are there. Rank 0 needs memory for the whole model.
    The exit code is 0 when all differences are rounding, 1 when not, 2 when the configuration cannot be run.
    """
    from pipert.comm.mpi_start import promised_rank
    from pipert.config import load_config

    configuration = load_config(config, settings or [])
    if promised_rank() is None and configuration.parallel.world > 1:
        from pipert.launch import launch

        options = ["--steps", str(steps), "--dtype", dtype, *(["--json"] if json else [])]
        command = ["-m", "pipert", "verify-run", *options, config, *(settings or [])]
        raise typer.Exit(launch(configuration.parallel.world, command))

    import torch

    from pipert.recipe import make_mesh
    from pipert.verify_run import verify_run as compare

    mesh = make_mesh(configuration)
    chosen = None if dtype == "configured" else getattr(torch, dtype)
    comparison = compare(configuration, mesh, steps, chosen)
    if mesh.rank == 0:
        typer.echo(comparison.to_json() if json else _table(comparison))
    mesh.close()
    raise typer.Exit(0 if comparison.ok else 1)


def _table(comparison: Comparison) -> str:
    from rich.console import Console
    from rich.table import Table

    table = Table("step", "largest difference of", "absolute", "relative", "in", box=None, pad_edge=False)
    for found in comparison.differences:
        bad = not found.relative <= comparison.tolerance
        name = found.where + (" [bold red]too large[/bold red]" if bad else "")
        table.add_row(str(found.step), found.what, f"{found.absolute:.1e}", f"{found.relative:.1e}", name)
    console = Console()
    console.width = max(console.width, 100)
    with console.capture() as capture:
        console.print(table)
    verdict = "the layout changes nothing" if comparison.ok else f"DIFFERENT from step {comparison.worst.step} on"
    worst = comparison.worst
    return (
        f"{comparison.layout}\n{capture.get()}"
        f"{verdict}: the largest relative difference to one process is {worst.relative:.1e} ({worst.what} "
        f"{worst.where}), rounding explains {comparison.tolerance:.0e}"
    )
