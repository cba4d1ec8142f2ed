"""Benchmarks of several parts, each a job of MPI ranks of its own."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from _verdicts import Bar, conclude, verdicts


def run_jobs(script: str, words: str | None, jobs: Sequence[tuple[str, int, int]], bars: Sequence[Bar]) -> int:
    """The command line of a benchmark: runs all parts, prints figures and one JSON object; returns the exit code.

    Args:
        script: the benchmark's file, ``name.py``. Part ``gpt`` is the function ``run(mesh, folder, rounds)`` of
            ``_name_gpt.py``.
        words: what it measures.
        jobs: part, ranks, rounds.
        bars: for figures.
    """
    parser = argparse.ArgumentParser(description=words, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=sorted({part for part, _, _ in jobs}), help="only this part")
    parser.add_argument("--rounds", type=int, help="steps of each contestant that count")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    benchmark = Path(script).stem
    if arguments.folder:
        _worker(f"_{benchmark}_{arguments.part}", arguments.rounds, arguments.folder)
        return 0
    figures: dict[str, float] = {}
    for part, ranks, rounds in jobs:
        if arguments.part in (None, part):
            figures |= _job(script, part, ranks, arguments.rounds or rounds)
    return conclude(benchmark, figures, verdicts(figures, bars))


def _worker(module: str, rounds: int, folder: Path) -> None:
    """What each rank of a part's job does."""
    import pipert

    mesh = pipert.Mesh.from_mpi(pp=int(folder.joinpath("ranks").read_text()), deadline=120.0)
    figures = importlib.import_module(module).run(mesh, folder, rounds)
    if mesh.world.rank == 0:
        folder.joinpath("figures").write_text(json.dumps(figures))


def _job(script: str, part: str, ranks: int, rounds: int) -> dict[str, float]:
    """Run one part on so many ranks."""
    from pipert.launch import launch

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.joinpath("ranks").write_text(str(ranks))
        code = launch(ranks, [script, "--part", part, "--rounds", str(rounds), "--folder", name])
        if code:
            sys.exit(f"{part} on {ranks} ranks ended with exit code {code}")
        figures: dict[str, float] = json.loads(folder.joinpath("figures").read_text())
    for figure, value in figures.items():
        print(f"{figure:70} {value:10.4g}", flush=True)
    return figures
