"""Cross-entropy in three steps, so that the vocabulary can be shared out among ranks.

    statistics = cross_entropy_statistics(logits, targets, first=first)      # 1. one pass over this rank's logits
    maximum = all_reduce_max(statistics[0])
    sums = all_reduce_sum(cross_entropy_sums(statistics, maximum, columns))
    losses = cross_entropy_losses(sums, maximum, targets, vocabulary)        # 2. a few numbers a token
    cross_entropy_gradient_(logits, targets, maximum, sums, gradient, ...)   # 3. one pass, in place

`cross_entropy` does all three for a vocabulary in one piece, with autograd.
"""

from __future__ import annotations

from typing import Any

import torch

from pipert.hipkernels.errors import KernelInputError, KernelTargetIndexError
from pipert.hipkernels.ops.operator import define, once_only
from pipert.hipkernels.ops.tensors import rows_of
from pipert.hipkernels.reference import cross_entropy as reference
from pipert.hipkernels.runtime import DTYPES, library_for

IGNORE = -100


def cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = IGNORE,
    smoothing: float = 0.0,
    vocabulary: int | None = None,
    overwrite: bool = False,
) -> torch.Tensor:
    """Loss of every token, ``-log softmax(logits)[target]``, in nats.

    Args:
        logits: shape (..., columns); fp32, bf16 or fp16 (fp64 by the torch reference).
        targets: int64, shape (...), in [0, vocabulary) or ``ignore_index``.
        ignore_index: such a token has loss 0 and no gradient.
        smoothing: share of the target's probability that is spread evenly over the vocabulary.
        vocabulary: columns beyond it are padding with probability 0; default all columns.
        overwrite: the backward pass writes the gradient over the logits, which saves their size in memory. Nothing else
            may need the logits then, and there is one backward pass only.

    Returns:
        fp32 (fp64 for fp64), shape (...).

    Raises:
        KernelInputError: shapes or dtypes do not fit, or (on the CPU) a target is outside; on a GPU its loss is NaN.
    """
    columns = _check(logits, targets, vocabulary)
    if not 0.0 <= smoothing <= 1.0:
        raise KernelInputError(f"cross_entropy: smoothing={smoothing} is not between 0 and 1")
    flat = logits.reshape(-1, logits.shape[-1])
    losses = losses_op(flat, targets.reshape(-1), columns, ignore_index, smoothing, overwrite)[0]
    return losses.reshape(targets.shape)  # type: ignore[no-any-return]


def cross_entropy_statistics(
    logits: torch.Tensor, targets: torch.Tensor, *, first: int = 0, vocabulary: int | None = None
) -> torch.Tensor:
    """Step 1, for the columns [first, first + columns) of a vocabulary; one pass over the logits.

    Args:
        logits: shape (tokens, columns), contiguous.
        targets: int64, shape (tokens,), of the whole vocabulary.
        first: the first column's number in the whole vocabulary.
        vocabulary: columns that are no padding; default all.

    Returns:
        shape (4, tokens), fp32: maximum, sum of ``exp(x - maximum)``, the target's logit (0 if another rank has it),
        sum of ``x - maximum``.
    """
    columns = _check_shard(logits, targets, vocabulary)
    return statistics_op(logits, targets, columns, first)  # type: ignore[no-any-return]


def cross_entropy_sums(statistics: torch.Tensor, maximum: torch.Tensor, columns: int) -> torch.Tensor:
    """Between steps 1 and 2: sums relative to the maximum of all ranks, to be added over them; shape (3, tokens)."""
    shift = statistics[0] - maximum
    return torch.stack((statistics[1] * shift.exp(), statistics[2], statistics[3] + columns * shift))


def cross_entropy_losses(
    sums: torch.Tensor,
    maximum: torch.Tensor,
    targets: torch.Tensor,
    vocabulary: int,
    *,
    ignore_index: int = IGNORE,
    smoothing: float = 0.0,
) -> torch.Tensor:
    """Step 2: the loss of every token; NaN for targets outside the vocabulary."""
    losses = sums[0].log() - (sums[1] - maximum)
    if smoothing:
        losses = (1.0 - smoothing) * losses + smoothing * (sums[0].log() - sums[2] / vocabulary)
    losses = losses.masked_fill((targets < 0) | (targets >= vocabulary), float("nan"))
    return losses.masked_fill(targets == ignore_index, 0.0)


def cross_entropy_gradient_(
    logits: torch.Tensor,
    targets: torch.Tensor,
    maximum: torch.Tensor,
    sums: torch.Tensor,
    gradient: torch.Tensor,
    *,
    first: int = 0,
    columns: int | None = None,
    vocabulary: int | None = None,
    ignore_index: int = IGNORE,
    smoothing: float = 0.0,
) -> torch.Tensor:
    """Step 3: the logits become their gradient.

    Args:
        logits: as given to step 1.
        targets: likewise.
        maximum: of all ranks.
        sums: of all ranks.
        gradient: shape (tokens,), of the losses.
        first: as given to step 1.
        columns: columns here that are no padding; default all.
        vocabulary: columns of all ranks together; default ``columns``.
        ignore_index: such a token has no gradient.
        smoothing: as given to step 2.

    Returns:
        logits.
    """
    columns = _check_shard(logits, targets, columns)
    tokens = len(targets)
    for name, given, shape in (
        ("maximum", maximum, (tokens,)),
        ("sums", sums, (len(sums), tokens)),
        ("gradient", gradient, (tokens,)),
    ):
        if given.shape != shape or given.device != logits.device:
            raise KernelInputError(
                f"cross_entropy_gradient_: {name} has shape {tuple(given.shape)} on {given.device}; it must be "
                f"{shape} on {logits.device}"
            )
    even = smoothing / (vocabulary or columns)
    gradient = gradient.masked_fill(targets == ignore_index, 0.0).to(maximum.dtype)
    gradient_op(logits, targets, maximum, 1.0 / sums[0], gradient, columns, first, 1.0 - smoothing, even)
    return logits


def _check(logits: torch.Tensor, targets: torch.Tensor, vocabulary: int | None) -> int:
    """The columns that are no padding."""
    _, columns = rows_of(logits, "cross_entropy")
    if targets.shape != logits.shape[:-1] or targets.dtype != torch.int64 or targets.device != logits.device:
        raise KernelInputError(
            f"cross_entropy: targets are {targets.dtype} {tuple(targets.shape)} on {targets.device}; "
            f"they must be int64 {tuple(logits.shape[:-1])} on {logits.device}"
        )
    if vocabulary is not None and not 1 <= vocabulary <= columns:
        raise KernelInputError(f"cross_entropy: a vocabulary of {vocabulary} in logits of {columns} columns")
    return vocabulary or columns


def _check_shard(logits: torch.Tensor, targets: torch.Tensor, columns: int | None) -> int:
    """The columns that are no padding, of logits that must be a matrix."""
    if logits.dim() != 2:
        raise KernelInputError(f"cross_entropy: logits of shape {tuple(logits.shape)}; a shard's are (tokens, columns)")
    return _check(logits, targets, columns)


def _check_targets(targets: torch.Tensor, columns: int, ignore_index: int) -> None:
    wrong = targets[((targets < 0) | (targets >= columns)) & (targets != ignore_index)]
    if wrong.numel():
        raise KernelTargetIndexError(
            f"cross_entropy: target {wrong[0]} is out of bounds, neither in [0, {columns}) nor {ignore_index}"
        )


def _statistics(logits: torch.Tensor, targets: torch.Tensor, columns: int, first: int) -> torch.Tensor:
    library = library_for(logits)
    if library is None:
        return reference.statistics(logits, targets, columns, first)
    result = logits.new_empty(4, len(logits), dtype=torch.float32)
    numbers = (len(logits), columns, logits.shape[1], first, DTYPES[logits.dtype])
    library.run("cross_entropy_statistics", result, logits.contiguous(), targets.contiguous(), *numbers)
    return result


def _gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    maximum: torch.Tensor,
    inverse_sum: torch.Tensor,
    gradient: torch.Tensor,
    columns: int,
    first: int,
    hit: float,
    even: float,
    out: torch.Tensor | None = None,
) -> None:
    out = logits if out is None else out
    library = library_for(logits, maximum, inverse_sum, gradient)
    if library is None:
        reference.gradient(out, logits, targets, maximum, inverse_sum, gradient, columns, first, hit, even)
        return
    if not logits.is_contiguous():
        raise KernelInputError(f"cross_entropy_gradient_: logits have strides {logits.stride()}; make them contiguous")
    rows = targets.contiguous(), maximum.contiguous(), inverse_sum.contiguous(), gradient.contiguous()
    numbers = (len(logits), columns, logits.shape[1], first, hit, even, DTYPES[logits.dtype])
    library.run("cross_entropy_gradient", out, logits, *rows, *numbers)


def _gradient_new(logits: torch.Tensor, *rest: Any) -> torch.Tensor:
    logits = logits.contiguous()
    out = torch.empty_like(logits)
    _gradient(logits, *rest, out)  # type: ignore[call-arg]
    return out


def _losses(
    logits: torch.Tensor, targets: torch.Tensor, columns: int, ignore_index: int, smoothing: float, overwrite: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if targets.device.type == "cpu":
        _check_targets(targets, columns, ignore_index)
    statistics = _statistics(logits, targets, columns, 0)
    maximum, sums = statistics[0].clone(), statistics[1:]
    options = {"ignore_index": ignore_index, "smoothing": smoothing}
    losses = cross_entropy_losses(sums, maximum, targets, columns, **options)  # type: ignore[arg-type]
    return losses, maximum, 1.0 / sums[0]


def _losses_fake(logits: Any, targets: Any, *rest: Any) -> Any:
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return tuple(logits.new_empty(logits.shape[0], dtype=dtype) for _ in range(3))


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    logits, targets, ctx.columns, ctx.ignore_index, ctx.smoothing, ctx.overwrite = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, targets, *output[1:])


def _losses_gradients(ctx: Any, gradient: Any, *_: Any) -> tuple[Any, ...]:
    if gradient is None:
        return (None,) * 6
    logits, targets, maximum, inverse_sum = ctx.saved_tensors
    gradient = gradient.masked_fill(targets == ctx.ignore_index, 0.0)
    numbers = (ctx.columns, 0, 1.0 - ctx.smoothing, ctx.smoothing / ctx.columns)
    if ctx.overwrite and logits.is_contiguous():
        gradient_op(logits, targets, maximum, inverse_sum, gradient, *numbers)
        dx = logits.detach()
    else:
        dx = gradient_new_op(logits, targets, maximum, inverse_sum, gradient, *numbers)
    return dx, None, None, None, None, None


_ROWS = "Tensor targets, Tensor maximum, Tensor inverse_sum, Tensor gradient"
_NUMBERS = "int columns, int first, float hit, float even"
statistics_op = define(
    "cross_entropy_statistics(Tensor logits, Tensor targets, int columns, int first) -> Tensor",
    _statistics,
    lambda logits, *rest: logits.new_empty(4, logits.shape[0], dtype=_losses_fake(logits, None)[0].dtype),
)
gradient_op = define(
    f"cross_entropy_gradient_(Tensor(a!) logits, {_ROWS}, {_NUMBERS}) -> ()", _gradient, lambda *rest: None
)
gradient_new_op = define(
    f"cross_entropy_gradient(Tensor logits, {_ROWS}, {_NUMBERS}) -> Tensor",
    _gradient_new,
    lambda logits, *rest: logits.new_empty(logits.shape),
    once_only,
)
losses_op = define(
    "cross_entropy(Tensor logits, Tensor targets, int columns, int ignore_index, float smoothing, bool overwrite) "
    "-> (Tensor, Tensor, Tensor)",
    _losses,
    _losses_fake,
    _losses_gradients,
    _save,
)
