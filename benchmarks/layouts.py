"""How far layouts are from one process: losses, norms, every gradient and every weight of three steps.

The GPT of ``examples/configs/tiny.toml``, smaller and with dropout, on ranks that are threads of this process, in
float64 and in float32. Nothing is timed.

The last line is one JSON object with figures, bars and whether they hold; the exit code says the same.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from _verdicts import conclude, verdicts

import pipert
from pipert.comm.local import run_ranks
from pipert.comm.transport import Transport
from pipert.config import load_config
from pipert.verify_run import Comparison, verify_run

CONFIG = Path(__file__).resolve().parent.parent / "examples" / "configs" / "tiny.toml"
MODEL = [
    "model.layers=4",
    "model.hidden=64",
    "model.sequence=32",
    "model.dropout=0.1",
    "schedule.warmup=0",
    "model.tied=false",
]

#: Keys of the section `parallel`, and others, by the layout's name.
LAYOUTS = {
    "pp 4, 1F1B": "pp=4 dp=1",
    "pp 2 × 2 chunks, interleaved, recompute": "pp=2 dp=1 chunks=2 schedule=interleaved recompute=block",
    "pp 2, zero-bubble V": "pp=2 dp=1 schedule=zb-v",
    "pp 2, tied weights": "pp=2 dp=1 model.tied=true",
    "dp 4": "pp=1 dp=4",
    "tp 2": "pp=1 dp=1 tp=2",
    "tp 4, sequence parallel": "pp=1 dp=1 tp=4 sequence_parallel=true",
    "dp 4, ZeRO-1": "pp=1 dp=4 zero=1",
    "dp 4, ZeRO-2": "pp=1 dp=4 zero=2",
    "dp 2, ZeRO-3, 4 chunks": "pp=1 dp=2 zero=3 chunks=4 schedule=interleaved",
    "pp 4, vocabulary spread": "pp=4 dp=1 vocabulary=spread",
    "pp 2 × dp 2 × tp 2, ZeRO-1, early steps": "pp=2 dp=2 tp=2 sequence_parallel=true zero=1 optimizer.early=true",
    "pp 2 × dp 2, tied weights": "pp=2 dp=2 model.tied=true",
}
#: Pipelines alone change no bit.
EXACT = ("pp 4, 1F1B", "pp 2 × 2 chunks, interleaved, recompute", "pp 2, zero-bubble V")

#: What a figure's name ends in, whether it is a floor or a ceiling, and the bar.
BARS = (("float64", "at most", 1e-10), ("float32", "at most", 1e-3), ("bits", "at most", 0.0))


def compare(keys: str, dtype: torch.dtype, folder: str) -> Comparison:
    """One layout against one process."""
    places = [f"data.folder={folder}/data", f"run.output={folder}/run", "data.global_batch=8", "parallel.micro_batch=1"]
    config = load_config(CONFIG, [*MODEL, *places, *(key if "." in key else f"parallel.{key}" for key in keys.split())])
    layout = config.parallel

    def rank(_: Transport) -> Comparison:
        return verify_run(config, pipert.Mesh.local(pp=layout.pp, dp=layout.dp, tp=layout.tp), 3, dtype)

    return run_ranks(layout.world, rank)[0]


def main() -> int:
    torch.set_num_threads(1)
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, keys in LAYOUTS.items():
            for dtype in (torch.float64, torch.float32):
                comparison = compare(keys, dtype, folder)
                if name in EXACT:
                    figures[f"{name}, {str(dtype).removeprefix('torch.')} bits"] = comparison.worst.relative
                for what in ("loss", "norm", "gradient", "weight"):
                    worst = max(d.relative for d in comparison.differences if d.what == what)
                    figure = f"{name}, {what}, {str(dtype).removeprefix('torch.')}"
                    figures[figure] = worst
                    print(f"{figure:70} {worst:10.1e}", flush=True)
    return conclude("layouts", figures, verdicts(figures, BARS))


if __name__ == "__main__":
    sys.exit(main())
