"""Buckets: parameters of one stage and one group that live, travel and are updated together, as shards or whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from pipert.optim.flat import Layout, Piece, buckets_of
from pipert.optim.precision import HALF, accumulates_in


class Entry(Protocol):
    """A parameter of this rank; `pipert.engine.parameters.Owned` is one."""

    @property
    def name(self) -> str:
        """Its name in the model."""
        ...

    @property
    def order(self) -> int:
        """Its place among all parameters of the model."""
        ...

    @property
    def stage(self) -> int:
        """This rank's first stage that uses it."""
        ...

    @property
    def parameter(self) -> torch.nn.Parameter:
        """The parameter itself."""
        ...

    @property
    def counted(self) -> bool:
        """Whether this copy of it counts in totals."""
        ...

    @property
    def tie(self) -> int | None:
        """The number of its tie, if it has copies in other stages."""
        ...


class Bucket:
    """Some parameters in one flat buffer, of which the optimizer updates this replica's shard.

    The parameters become views of the buffer. At ZeRO stage 3 its memory is there only between `allocate` and `free`;
    while it is not, the parameters read as NaN. What autograd has kept of them stays valid, because the buffer is the
    same one when it is allocated again.

    A tied weight has a bucket of its own, so that all its copies lie alike and stay equal to the bit.

    Args:
        entries: of one stage, dtype and device; with a gradient or all without.
        group: the number of the optimizer's parameter group; None for frozen ones that no group has.
        zero: the ZeRO stage.
        parts: replicas.
        index: this one.

    Attributes:
        shard: this replica's weights, ``[layout.shard]`` in the parameters' dtype; all of them at stage 0.
        master: the weights that are updated: the shard itself, or an fp32 copy of it; None until it is needed.
        gradient: the shard of the gradients since `zero_grad`, in fp32 (fp64); at stage 0 they are in ``.grad``.
        incoming: what this step adds to it.
        used: which parameters have a gradient.
        shapes: the parameters' own.
        taken: bytes of the gradients that `take` found last.
    """

    def __init__(self, entries: Sequence[Entry], group: int | None, zero: int, parts: int, index: int) -> None:
        self.entries, self.group, self.zero = tuple(entries), group, zero
        self.parameters = tuple(entry.parameter for entry in entries)
        self.stage, self.tie = entries[0].stage, entries[0].tie
        sizes = tuple(parameter.numel() for parameter in self.parameters)
        self.layout = Layout(sizes, parts, index) if zero else Layout(sizes)
        self.pieces: tuple[Piece, ...] = self.layout.pieces()
        self.shapes = [parameter.shape for parameter in self.parameters]
        first = self.parameters[0]
        self.flat = torch.zeros(self.layout.padded, dtype=first.dtype, device=first.device)
        nothing = torch.nan if first.is_floating_point() else 0
        self._poison = torch.full((), nothing, dtype=first.dtype, device=first.device)
        self._fill()
        own = self.flat[self.layout.own]
        self.shard = own.clone() if zero == 3 else own
        self.master: torch.Tensor | None = None
        self.gradient: torch.Tensor | None = None
        self.incoming: torch.Tensor | None = None
        self.used = [False] * len(entries)
        self.taken = 0
        self._arrived = [False] * len(entries)
        self._scale = 1.0
        if zero == 3:
            self.free()

    # ---- weights ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _fill(self) -> None:
        """Move the parameters into the buffer."""
        for parameter, view in zip(self.parameters, self.layout.views(self.flat, self.shapes), strict=True):
            view.copy_(parameter)
            parameter.data = view

    @property
    def trainable(self) -> bool:
        """Whether any parameter is trainable now."""
        return any(parameter.requires_grad for parameter in self.parameters)

    @property
    def precise(self) -> torch.dtype:
        """In which gradients add up, and weights are updated."""
        dtype = self.flat.dtype
        return torch.float32 if dtype in HALF else dtype

    def allocate(self) -> None:
        """Give the buffer memory again, and the parameters their place in it."""
        self.flat.untyped_storage().resize_(self.flat.nbytes)
        for parameter, view in zip(self.parameters, self.layout.views(self.flat, self.shapes), strict=True):
            parameter.data = view

    def free(self) -> None:
        """Let go of the buffer's memory."""
        for parameter, shape in zip(self.parameters, self.shapes, strict=True):
            parameter.data = self._poison.expand(shape) if parameter.numel() else self._poison.new_empty(shape)
        self.flat.untyped_storage().resize_(0)

    def moved(self) -> Iterator[str]:
        """Names of parameters that have been given other memory than the buffer's."""
        there = self.flat.untyped_storage().nbytes() > 0
        for entry, start in zip(self.entries, self.layout.starts, strict=True):
            own = self.flat.data_ptr() + start * self.flat.itemsize if there else self._poison.data_ptr()
            if entry.parameter.numel() and entry.parameter.data_ptr() != own:
                yield entry.name

    def need_master(self) -> torch.Tensor:
        """The weights that are updated."""
        if self.master is None:
            self.master = self.shard if self.shard.dtype == self.precise else self.shard.to(self.precise)
        return self.master

    def round_master(self) -> None:
        """Round what was updated into the parameters' dtype."""
        if self.master is not None and self.master is not self.shard:
            self.shard.copy_(self.master)

    def views(self, flat: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
        """The parameters' parts of a whole buffer, in their shapes."""
        return [None] * len(self.entries) if flat is None else self.layout.views(flat, self.shapes)

    # ---- gradients as shards ---------------------------------------------------------------------------------------

    def set_aside(self, scale: float = 1.0) -> None:
        """Before a step with this loss scale: take what is in ``.grad``, which are sums already, into the shard."""
        self._scale = scale
        self.incoming, self._arrived = None, [False] * len(self.entries)
        present = [parameter.grad for parameter in self.parameters]
        if all(gradient is None for gradient in present):
            return
        if self.gradient is None:
            self.gradient = torch.zeros(self.layout.shard, dtype=self.precise, device=self.flat.device)
        for piece in self.pieces:
            gradient = present[piece.parameter]
            if gradient is not None:
                part = dense(gradient)[piece.first : piece.first + piece.stop - piece.start]
                self.gradient[piece.start : piece.stop].add_(part)
        for number, gradient in enumerate(present):
            self.used[number] |= gradient is not None
            self.parameters[number].grad = None

    def take(self) -> torch.Tensor:
        """All gradients that autograd has left, as one buffer; they are gone from ``.grad`` afterwards."""
        flat = torch.empty(self.layout.padded, dtype=self.precise, device=self.flat.device)
        self.taken = sum(parameter.grad.nbytes for parameter in self.parameters if parameter.grad is not None)
        flat[sum(self.layout.sizes) :].zero_()
        for number, (start, size) in enumerate(zip(self.layout.starts, self.layout.sizes, strict=True)):
            gradient, self.parameters[number].grad = self.parameters[number].grad, None
            if gradient is None:
                flat[start : start + size].zero_()
            else:
                self._arrived[number] = True
                flat[start : start + size].copy_(dense(gradient))
        return flat

    def add(self, part: torch.Tensor) -> None:
        """Add this replica's part of a sum over the replicas."""
        self.incoming = part if self.incoming is None else self.incoming.add_(part)

    def flags(self) -> torch.Tensor:
        """For each parameter whether this step has brought a gradient here, as numbers that can be summed."""
        return torch.tensor([float(here) for here in self._arrived], device=self.flat.device)

    def commit(self, counts: Sequence[float]) -> None:
        """What came in is whole; ``counts`` says on how many ranks each parameter had a gradient."""
        incoming, self.incoming = self.incoming, None
        if incoming is None or not any(counts):
            return
        if self._scale != 1.0:
            incoming.mul_(1.0 / self._scale)
        self.gradient = incoming if self.gradient is None else self.gradient.add_(incoming)
        self.used = [before or count > 0 for before, count in zip(self.used, counts, strict=True)]

    # ---- gradients, wherever they are ------------------------------------------------------------------------------

    def gradients(self) -> Iterator[tuple[Piece, torch.Tensor]]:
        """For each piece of this shard that has a gradient: the piece and its gradient, flat."""
        for piece in self.pieces:
            if self.zero:
                if self.gradient is not None and self.used[piece.parameter]:
                    yield piece, self.gradient[piece.start : piece.stop]
            else:
                gradient = self.parameters[piece.parameter].grad
                if gradient is not None:
                    yield piece, dense(gradient)

    def has_gradient(self, number: int) -> bool:
        """Whether a parameter has a gradient, here or in another shard."""
        return self.used[number] if self.zero else self.parameters[number].grad is not None

    def multiply(self, factor: float) -> None:
        """Multiply all gradients."""
        if self.gradient is not None:
            self.gradient.mul_(factor)
        for parameter in self.parameters if not self.zero else ():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def zero_grad(self) -> None:
        """Let go of all gradients."""
        self.gradient, self.incoming, self.used = None, None, [False] * len(self.entries)
        for parameter in self.parameters:
            parameter.grad = None


def dense(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient as a flat dense tensor."""
    return (gradient.to_dense() if gradient.is_sparse else gradient).detach().reshape(-1)


def make_buckets(
    entries: Sequence[Entry], groups: Sequence[int | None], zero: int, parts: int, index: int
) -> list[Bucket]:
    """Parameters of one stage, group, dtype and device, so many together as `buckets_of` says; tied weights alone.

    The same on every replica.
    """
    keyed: dict[tuple[int | None, tuple[object, ...]], list[Entry]] = {}
    for entry, group in zip(entries, groups, strict=True):
        parameter = entry.parameter
        alone = entry.name if entry.tie is not None else ""
        kind = (parameter.dtype, accumulates_in(parameter), str(parameter.device), parameter.requires_grad)
        keyed.setdefault((group, (entry.stage, *kind, alone)), []).append(entry)
    return [
        Bucket(some, group, zero, parts, index)
        for (group, _), same in keyed.items()
        for some in buckets_of(same, lambda entry: entry.parameter.nbytes)
    ]
