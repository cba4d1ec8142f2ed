"""Runs every benchmark, one after another: ``python benchmarks [name ...]``.

A benchmark is a script beside this file whose name does not start with an underscore. It prints its own numbers and
exits non-zero when it falls short of what it promises. At the end stands a table of all of them.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent


def chosen(names: list[str]) -> list[Path]:
    """The scripts of these names, or all of them."""
    scripts = sorted(path for path in HERE.glob("*.py") if not path.name.startswith("_"))
    unknown = sorted(set(names) - {path.stem for path in scripts})
    if unknown:
        sys.exit(f"no benchmark called {', '.join(unknown)}; there are: {', '.join(path.stem for path in scripts)}")
    return [path for path in scripts if not names or path.stem in names]


def main() -> int:
    console = Console()
    table = Table("benchmark", "result", "seconds", title="benchmarks")
    failed = 0
    for script in chosen(sys.argv[1:]):
        console.rule(script.stem)
        start = time.perf_counter()
        code = subprocess.run([sys.executable, str(script)], cwd=HERE.parent, check=False).returncode
        failed += code != 0
        result = "ok" if code == 0 else f"[red]exit code {code}[/red]"
        table.add_row(script.stem, result, f"{time.perf_counter() - start:.1f}")
    console.print(table)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
