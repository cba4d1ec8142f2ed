"""The ``pipert`` command.

It starts quickly: a command's module, and with it torch or numba, is imported when the command is used.
"""

from __future__ import annotations

import sys
from io import TextIOWrapper
from typing import Annotated

import typer
from typer.core import TyperGroup

from pipert import __version__
from pipert.cli.lazy import LazyCommand
from pipert.comm.errors import CommError
from pipert.errors import PipertError
from pipert.scheduler.errors import ScheduleError

#: name -> (module that holds the command as ``app``, its line in ``pipert --help``)
COMMANDS = {
    "launch": ("pipert.cli.launch", "Run a script on several MPI ranks of this machine."),
    "schedule": ("pipert.cli.schedule", "Show, check and simulate pipeline schedules."),
    "verify-run": ("pipert.cli.verify_run", "Compare a configuration's numbers with those of one process."),
    "doctor": ("pipert.cli.doctor", "Report what this machine offers: MPI, threads, compilers, GPUs."),
}

app = typer.Typer(name="pipert", no_args_is_help=True, add_completion=False, rich_markup_mode=None)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pipert {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Pipeline-parallel runtime for training transformers on MPI and RCCL."""


def build() -> TyperGroup:
    """The whole command, each sub-command ready to be imported when it is used."""
    group = typer.main.get_group(app)
    for name, (module, help_line) in COMMANDS.items():
        group.add_command(LazyCommand(name, module=module, help_line=help_line))
    return group


def main() -> None:
    """Run the ``pipert`` command; pipert's own errors end it with one message and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # what a terminal or pipe cannot show must not end the command
            stream.reconfigure(errors="backslashreplace")
    try:
        build()(prog_name="pipert")
    except (PipertError, CommError, ScheduleError) as error:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        sys.exit(2)
