"""pipert inside a training loop of your own: a model in plain torch, and the three lines.

    pipert launch -n 4 examples/embed_in_your_trainer.py
    mpiexec -n 4 python examples/embed_in_your_trainer.py

Four ranks are two replicas of a pipeline of two stages.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

import pipert

WORDS, WIDTH, LENGTH, BATCH, STEPS = 97, 64, 32, 16, 60


class Block(nn.Module):
    """A residual block of your own: any module that maps one value to one value."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (samples, words, width) to the same."""
        return x + self.inner(x)


def batches(replica: int, replicas: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Your data: sequences in which every word follows from the one before. Each replica has its part of each batch."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        words = [torch.randint(WORDS, (BATCH,), generator=generator)]
        for _ in range(LENGTH):
            words.append((5 * words[-1] + 3) % WORDS)
        both = torch.stack(words, dim=1).tensor_split(replicas)[replica]
        yield both[:, :-1], both[:, 1:]


def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), *(Block() for _ in range(4)), nn.Linear(WIDTH, WORDS))

    mesh = pipert.Mesh.from_mpi(pp=2, dp=2)
    pipe = pipert.Pipeline(model, loss_fn, mesh, schedule="1f1b", microbatches=4)
    optim = torch.optim.AdamW(pipe.parameters(), lr=1e-3)

    for batch in batches(mesh.dp_rank, mesh.dp):
        result = pipe.step(batch)  # the same result on every rank
        optim.step()
        optim.zero_grad()
        if mesh.rank == 0 and result.step % 10 == 9:
            print(f"step {result.step + 1}: loss {result.loss:.3f}")
    mesh.close()


if __name__ == "__main__":
    main()
