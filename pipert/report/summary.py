"""What came of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Summary:
    """What came of a run. Losses and counts are the same on every rank; times are this rank's, files rank 0's.

    Attributes:
        steps: steps done.
        updates: those of them that changed the weights: the gradients were finite.
        tokens: tokens trained on.
        seconds: from the first step to the end of the last, evaluations included.
        before: held-out loss of the untrained model, in nats a token.
        after: held-out loss at the end.
        unigram: held-out loss of a model that has only counted the tokens of the training text.
        tokens_per_second: the median over the steps.
        utilisation: share of the measured peak of all ranks, counting the operations of the model, not recomputed ones.
        bubble: share of their time in which the ranks do not compute, in a typical step of this rank's pipeline.
        predicted_bubble: the same, simulated with the measured times of the computations.
        files: metrics and pictures.
    """

    steps: int
    updates: int
    tokens: int
    seconds: float
    before: float
    after: float
    unigram: float
    tokens_per_second: float
    utilisation: float
    bubble: float
    predicted_bubble: float
    files: tuple[Path, ...] = ()

    def __str__(self) -> str:
        skipped = f" ({self.steps - self.updates} skipped)" if self.updates < self.steps else ""
        return "\n".join(
            [
                f"{self.steps} steps{skipped} in {self.seconds:.0f} s: {self.tokens:,} tokens, "
                f"{self.tokens_per_second:,.0f} tokens/s, {self.utilisation:.0%} of the measured peak",
                f"held-out loss {self.before:.3f} -> {self.after:.3f} nats a token (unigram model: {self.unigram:.3f})",
                f"bubble {self.bubble:.1%}; {self.predicted_bubble:.1%} if only data were waited for",
                *(f"wrote {path}" for path in self.files),
            ]
        )
