"""``python -m pipert.hipkernels build --target host``: compile the kernels ahead of their first use."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pipert.hipkernels.build import build, library_path
from pipert.hipkernels.errors import KernelError
from pipert.hipkernels.targets import find_target


def main(arguments: list[str] | None = None) -> int:
    """Run one command; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m pipert.hipkernels", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (("build", "compile a library unless it is there"), ("path", "where a library is or would be")):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--target", default="host", help="host, gfx90a,gfx942 or sm_80,sm_90 (default: host)")
        command.add_argument(
            "--folder", type=Path, help="where libraries are kept (default: PIPERT_CACHE or ~/.cache/pipert)"
        )
    options = parser.parse_args(arguments)
    try:
        target = find_target(options.target)
        path = (build if options.command == "build" else library_path)(target, options.folder)
    except KernelError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
