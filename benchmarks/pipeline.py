"""The pipeline against one process, against torch.distributed.pipelining on gloo, and against its own simulation.

Three parts, each a job of MPI ranks in which the contestants take turns step by step; figures are medians.

* ``gpt``: a GPT on 2 ranks, one thread each. Against one process with two threads, against torch with the same
  schedule, and against what the simulator says for the block times measured in the same run.
* ``sleep``: stages that sleep, on 8 and 16 ranks, so that the makespan shows the runtime and not the cores. Against
  what the simulator says for what the stages take by themselves; torch's steps beside it.
* ``cost``: stages that do next to nothing and messages of 1 KiB: what an action costs in the runtime itself.

The last line is one JSON object with figures, bars and whether they hold; the exit code says the same.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from pathlib import Path

from _verdicts import verdicts

#: Part, ranks, rounds.
JOBS = (("gpt", 2, 9), ("sleep", 8, 3), ("sleep", 16, 3), ("cost", 2, 31))

#: What a figure's name ends in, whether it is a floor or a ceiling, and the bar.
BARS = (
    ("predicted against measured step", "at least", 0.97),
    ("speed against torch", "at least", 1.0),
    ("makespan over simulated", "at most", 1.03),
    ("pipert's own, us an action", "at most", 100.0),
)


def worker(part: str, rounds: int, folder: Path) -> None:
    """What each rank of a part's job does."""
    import pipert

    mesh = pipert.Mesh.from_mpi(pp=int(folder.joinpath("ranks").read_text()), deadline=120.0)
    figures = importlib.import_module(f"_pipeline_{part}").run(mesh, folder, rounds)
    if mesh.world.rank == 0:
        folder.joinpath("figures").write_text(json.dumps(figures))


def job(part: str, ranks: int, rounds: int) -> dict[str, float]:
    """Run one part on so many ranks."""
    from pipert.launch import launch

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.joinpath("ranks").write_text(str(ranks))
        code = launch(ranks, [__file__, "--part", part, "--rounds", str(rounds), "--folder", name])
        if code:
            sys.exit(f"{part} on {ranks} ranks ended with exit code {code}")
        figures: dict[str, float] = json.loads(folder.joinpath("figures").read_text())
    for figure, value in figures.items():
        print(f"{figure:60} {value:10.4g}", flush=True)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=sorted({part for part, _, _ in JOBS}), help="only this part")
    parser.add_argument("--rounds", type=int, help="steps of each contestant that count")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.folder:
        worker(arguments.part, arguments.rounds, arguments.folder)
        return 0
    figures: dict[str, float] = {}
    for part, ranks, rounds in JOBS:
        if arguments.part in (None, part):
            figures |= job(part, ranks, arguments.rounds or rounds)
    bars = verdicts(figures, BARS)
    ok = all(verdict["ok"] for verdict in bars.values())
    print(json.dumps({"benchmark": "pipeline", "figures": figures, "bars": bars, "ok": ok}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
