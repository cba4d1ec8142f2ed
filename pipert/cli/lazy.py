"""A command whose module is imported when the command is used, not when it is listed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand


class LazyCommand(TyperCommand):
    """Stands for a command or group in the help of its parent, and hands over to the real one when it is called.

    Args:
        name: What the user types.
        module: Import name of the module that holds the real command as a ``typer.Typer`` called ``app``.
        help_line: The command's line in its parent's help.
    """

    def __init__(self, name: str, *, module: str, help_line: str) -> None:
        super().__init__(name, help=help_line)
        self.module = module

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Import the real command and let it read its arguments."""
        return self.load().make_context(info_name, args, parent, **extra)

    def load(self) -> Any:
        """Import the real command."""
        return typer.main.get_command(import_module(self.module).app)
