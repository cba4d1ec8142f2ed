"""``pipert doctor``: what this machine offers, as a table."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(add_completion=False, rich_markup_mode=None)

#: How a finding's `ok` is shown.
_MARKS = {True: "[green]ok[/green]", None: "[dim]-[/dim]", False: "[bold red]FAILS[/bold red]"}


@app.command()
def doctor(
    messages: Annotated[bool, typer.Option(help="Also pass messages between two ranks (a few seconds).")] = True,
) -> None:
    """Report what this machine offers: MPI, threads, compilers, GPUs, and messages between two ranks.

    The exit code is 1 when something fails that pipert needs.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from pipert.doctor import doctor as examine

    with Console(stderr=True).status("") as status:
        findings = examine(lambda name: status.update(f"looking at {name}"), message_test=messages)
    table = Table("", "what", "found", box=None, pad_edge=False)
    for finding in findings:
        remedy = f"\n{escape(finding.remedy)}" if finding.remedy else ""
        table.add_row(_MARKS[finding.ok], finding.name, escape(finding.value) + remedy)
    console = Console()
    if not console.is_terminal:
        console.width = 160  # in a log, a path that is broken over lines cannot be searched for
    console.print(table)
    if any(finding.ok is False for finding in findings):
        raise typer.Exit(1)
