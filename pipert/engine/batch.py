"""Batches: pulled where they are needed, split into micro-batches along dimension 0."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from pipert.engine.structure import flatten, unflatten
from pipert.errors import BatchError, BoundaryError, EndOfData

INPUTS, TARGETS = 0, 1
_SIDES = ("inputs", "targets")


def pull(source: object) -> object:
    """The batch itself: ``source``, or the next item where it is an iterator.

    Raises:
        EndOfData: the iterator is exhausted.
    """
    if not isinstance(source, Iterator):
        return source
    try:
        return next(source)
    except StopIteration:
        raise EndOfData("the data iterator is exhausted; stop, or start the next epoch with a new one") from None


def split(batch: object, side: int, parts: int) -> list[Any]:
    """One side of a batch as micro-batches.

    Args:
        batch: a pair ``(inputs, targets)``, split into at most ``parts`` parts as `torch.tensor_split` does (8
            samples in 3 parts: 3, 3, 2); or a list of such pairs, which are the micro-batches already. A list
            ``[inputs, targets]``, as torch's DataLoader makes, is a pair, but the pairs in a list are tuples.
        side: `INPUTS` or `TARGETS`.
        parts: how many micro-batches to make.

    Raises:
        BatchError: the batch is neither, or may be either, or cannot be split.
    """
    if isinstance(batch, list) and batch and all(_is_pair(item) for item in batch):
        return [item[side] for item in batch]
    _check_meaning(batch)
    if not _is_pair(batch) and not (isinstance(batch, list) and len(batch) == 2):
        raise BatchError(
            f"a batch must be a pair (inputs, targets) or a list of such pairs, one for each micro-batch, not "
            f"{_describe(batch)}; only ranks that own neither the first nor the last stage may pass None"
        )
    value = batch[side]  # type: ignore[index]
    if value is None and side == TARGETS:
        return []  # one for each micro-batch; only the inputs tell how many
    _check_rows(batch)
    return split_value(value, parts, _SIDES[side])


def _check_meaning(batch: object) -> None:
    """Refuse ``[[a, b], [c, d]]``: one pair of inputs and targets with two parts each, or two micro-batches."""
    twos = [isinstance(item, list | tuple) and len(item) == 2 for item in batch] if isinstance(batch, list) else []
    if twos == [True, True]:
        raise BatchError(
            "a list of two lists of two may be one pair (inputs, targets) or two micro-batches; pass a tuple "
            "(inputs, targets), or a list of tuples [(inputs, targets), (inputs, targets)]"
        )


def _check_rows(batch: Any) -> None:
    """Refuse inputs and targets of different samples: losses that broadcast would not notice."""
    rows = [{len(t) for t in _tensors(value) if t.dim() and t.numel()} for value in (batch[INPUTS], batch[TARGETS])]
    if all(len(found) == 1 for found in rows) and rows[INPUTS] != rows[TARGETS]:
        inputs, targets = (found.pop() for found in rows)
        raise BatchError(
            f"there are {inputs} samples of inputs and {targets} of targets in dimension 0; they are split into "
            "micro-batches alike, so give both as many, or pass a list of (inputs, targets) pairs"
        )


def _tensors(value: object) -> list[torch.Tensor]:
    try:
        return flatten(value)[0]
    except BoundaryError:  # told when this side is split, where it is needed
        return []


def _is_pair(item: object) -> bool:
    return isinstance(item, tuple) and len(item) == 2


def _describe(batch: object) -> str:
    if isinstance(batch, list) and batch and all(isinstance(item, list) and len(item) == 2 for item in batch):
        return f"a list of {len(batch)} lists (make each a tuple, as in [(inputs, targets), ...])"
    if isinstance(batch, Iterable) and not isinstance(batch, torch.Tensor | list | tuple | dict | str):
        return f"{type(batch).__name__} (pass iter(...) of it, or one batch after another)"
    size = f" of {len(batch)}" if isinstance(batch, list | tuple | dict) else ""
    return f"{'an empty ' if size == ' of 0' else ''}{type(batch).__name__}{size if size != ' of 0' else ''}"


def split_value(value: object, parts: int, what: str) -> list[Any]:
    """A nested value in at most ``parts`` parts; each has at least one sample.

    Tensors are split along dimension 0, which is the samples. Tensors without dimensions or without elements, and plain
    data, go whole into every part.

    Raises:
        BatchError: there are no samples, or the tensors do not agree about them.
    """
    try:
        tensors, structure = flatten(value)
    except BoundaryError as error:
        raise BatchError(f"the {what} cannot be split into micro-batches: {error}") from None
    splittable = [tensor for tensor in tensors if tensor.dim() and tensor.numel()]
    rows = {len(tensor) for tensor in splittable}
    if len(rows) != 1:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors) or "none"
        rule = "the same number of samples in dimension 0" if rows else "at least one sample"
        raise BatchError(
            f"the {what} have tensors of shapes {shapes}; to be split into micro-batches they need {rule}; "
            "otherwise pass a list of (inputs, targets) pairs, one for each micro-batch"
        )
    count = min(parts, rows.pop())
    columns = [
        tensor.tensor_split(count) if tensor.dim() and tensor.numel() else (tensor,) * count for tensor in tensors
    ]
    return [unflatten(structure, part) for part in zip(*columns, strict=True)]


def samples(value: object) -> int:
    """How many samples a micro-batch has: dimension 0 of its first tensor that has one; else 1."""
    tensors, _ = flatten(value)
    return next((len(tensor) for tensor in tensors if tensor.dim() and tensor.numel()), 1)


def to_device(value: object, device: torch.device) -> Any:
    """The value with its tensors on ``device``; the same object where they are there already."""
    tensors, structure = flatten(value)
    if all(tensor.device == device for tensor in tensors):
        return value
    return unflatten(structure, [tensor.to(device, non_blocking=True) for tensor in tensors])
