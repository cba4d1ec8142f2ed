"""``pipert launch``: a script, or a module, on several MPI ranks of this machine."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(add_completion=False, rich_markup_mode=None)


# Options after the script belong to the script.
@app.command(context_settings={"allow_interspersed_args": False})
def launch(
    command: Annotated[list[str], typer.Argument(metavar="SCRIPT [ARGS]...", help="A Python script and its options.")],
    ranks: Annotated[int, typer.Option("-n", "--ranks", min=1, help="How many ranks to start.")],
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module's import name.")] = False,
) -> None:
    """Run a Python script on several MPI ranks of this machine.

    Finds an MPI (the one that mpi4py was installed with, or the site's own), gives each rank its share of the threads,
    and ends every rank when one fails. The exit code is that of the first rank that failed.
    """
    from pipert.launch import launch as run

    raise typer.Exit(run(ranks, ["-m", *command] if module else command))
