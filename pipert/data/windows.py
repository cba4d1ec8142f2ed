"""Token ids cut into samples of equal length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pipert.data.order import whole
from pipert.data.tokenizer import Ids
from pipert.errors import DataError


class TokenWindows:
    """Sample i is the ids ``[i * sequence, (i + 1) * sequence]``: inputs without the last, targets without the first.

    Neighbours share one id, so every id but the first is a target once; a rest shorter than a window is left out.

    Args:
        tokens: all ids, for example `TokenFile.train`; may be mapped from a file.
        sequence: tokens a sample.

    Raises:
        DataError: there are too few ids for one sample, or ``sequence`` is no count.
    """

    def __init__(self, tokens: Ids, sequence: int) -> None:
        whole("sequence", sequence, 1)
        if len(tokens) <= sequence:
            raise DataError(
                f"{len(tokens)} tokens are too few for a sample of {sequence} and its next token; "
                "use more text or a shorter sequence"
            )
        self.tokens = tokens
        self.sequence = sequence

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.sequence

    def batch(self, ids: Sequence[int] | Ids) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of these samples: int64, each of shape (samples, sequence).

        Raises:
            DataError: there is no such sample.
        """
        lost = [int(index) for index in ids if not 0 <= index < len(self)]
        if lost:
            raise DataError(f"sample {lost[0]} of {len(self)}; samples are 0 to {len(self) - 1}")
        rows = np.empty((len(ids), self.sequence + 1), dtype=np.int64)
        for row, index in zip(rows, ids, strict=True):
            start = int(index) * self.sequence
            row[:] = self.tokens[start : start + self.sequence + 1]
        both = torch.from_numpy(rows)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()
