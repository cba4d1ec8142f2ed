"""Train a GPT over MPI ranks.

    pipert launch -n 4 examples/train_gpt.py examples/configs/tiny.toml
    pipert launch -n 2 examples/train_gpt.py examples/configs/tiny.toml parallel.dp=1 run.steps=50
    pipert launch -n 8 examples/train_gpt.py examples/configs/tiny-3d.toml parallel.tensors=rccl      # on 8 GPUs

The configuration says how many ranks there must be: pp × dp × tp. Settings after the file win over those in it. The
summary at the end says where the metrics (JSON lines) and the pictures of the pipeline are. Those of an earlier run in
the same folder are kept there in earlier-1, earlier-2, ...
"""

from __future__ import annotations

import sys

from pipert.config import load_config
from pipert.errors import ConfigError
from pipert.launch import end_before_mpi
from pipert.recipe import make_mesh
from pipert.trainer import train


def main() -> None:
    if len(sys.argv) < 2:
        end_before_mpi(str(__doc__))
    try:
        config = load_config(sys.argv[1], sys.argv[2:])
    except ConfigError as error:
        end_before_mpi(f"ConfigError: {error}")
    mesh = make_mesh(config)
    train(config, mesh)
    mesh.close()


if __name__ == "__main__":
    main()
