"""The actions of a spread vocabulary on one rank; docs/vocabulary.md tells what they are for."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from pipert.comm.transport import Request, Transport
from pipert.engine.boundary import Handover
from pipert.engine.port import Port
from pipert.engine.shard_loss import (
    STATISTICS,
    HeadRows,
    ShardScores,
    Totals,
    combine,
    input_gradient,
    score,
    weight_gradient,
)
from pipert.engine.stage import StepData
from pipert.engine.vocabulary_part import VocabularyPart
from pipert.errors import BatchError
from pipert.optim.precision import accumulates_in
from pipert.scheduler.action import Action, Kind


class _Flight(NamedTuple):
    """A collective under way, with its memory."""

    request: Request
    name: str
    tensor: torch.Tensor


class SpreadVocabulary:
    """Runs the actions of a spread vocabulary on one rank.

    Args:
        part: what this rank holds.
        transport: the ranks of the pipeline.
        first: the rank of the first stage.
        last: that of the last stage.
        ports: of this rank's stages; the first and the last one are used where they are here.
        last_stage: the number of the last stage.
        device: where this rank computes.
        uses: the kinds in the program that use a micro-batch's logits behind S: SUM_H, T, both or none.

    Attributes:
        prepare: for some kinds of action what they wait for.
        perform: for every kind what it does.
    """

    def __init__(
        self,
        part: VocabularyPart,
        transport: Transport,
        first: int,
        last: int,
        ports: Mapping[int, Port],
        last_stage: int,
        device: torch.device,
        uses: Collection[Kind],
    ) -> None:
        self._part, self._transport, self._device = part, transport, device
        self._first, self._last = first, last
        self._is_first, self._is_last = transport.rank == first, transport.rank == last
        self._ports, self._last_stage = ports, last_stage
        self._uses = uses
        self._step = StepData(False, 0, (), ())
        self._ids: list[torch.Tensor] = []
        self._targets: list[torch.Tensor] = []
        self._flights: dict[tuple[Kind, int], _Flight] = {}
        self._unwatched: deque[_Flight] = deque()
        self._scores: dict[int, ShardScores] = {}
        self._users: dict[int, int] = {}
        self._totals: dict[int, Totals] = {}
        self._hidden: dict[int, torch.Tensor] = {}
        self.prepare: dict[Kind, Callable[[int], None]] = {
            Kind.S: lambda m: self._wait(Kind.CAST_H, m),
            Kind.SUM_H: self._settle,
            Kind.T: self._settle,
            Kind.G: lambda m: self._wait(Kind.CAST_E, m),
        }
        self.perform: dict[Kind, Callable[[int], None]] = {
            Kind.S: self._score,
            Kind.T: self._weight,
            Kind.G: self._scatter,
            Kind.CAST_H: self._cast_hidden,
            Kind.STATS: self._statistics,
            Kind.SUM_H: self._sum_hidden,
            Kind.SUM_E: self._sum_embedding,
            Kind.CAST_E: self._cast_embedding,
        }

    # ---- the step --------------------------------------------------------------------------------------------------

    def begin(self, step: StepData) -> None:
        """Get ready for a step: every rank gets its token ids and targets. Every rank calls it."""
        self._step = step
        mine = [_packed(step.inputs if self._is_first else ()), _packed(step.targets if self._is_last else ())]
        sizes = json.dumps([shapes for shapes, _ in mine]).encode()
        blobs = self._transport.exchange(sizes + b"\n" + mine[0][1] + mine[1][1])
        self._ids = self._unpack(blobs[self._first], 0)
        self._targets = self._unpack(blobs[self._last], 1)

    def _unpack(self, blob: bytes, which: int) -> list[torch.Tensor]:
        head, _, body = blob.partition(b"\n")
        shapes = json.loads(head)
        skipped = sum(int(np.prod(shape)) for shape in shapes[0]) if which else 0
        numbers = torch.from_numpy(np.frombuffer(body, dtype=np.int32).astype(np.int64))
        sizes = [int(np.prod(shape)) for shape in shapes[which]]
        pieces = torch.split(numbers[skipped : skipped + sum(sizes)], sizes)
        return [piece.view(shape).to(self._device) for piece, shape in zip(pieces, shapes[which], strict=True)]

    def reap(self) -> None:
        """Let go of what is complete, without waiting."""
        while self._unwatched and self._unwatched[0].request.test():
            self._unwatched.popleft()

    def finish(self) -> None:
        """The end of the step: everything is complete, and every micro-batch's loss is known."""
        for kind, microbatch in list(self._flights):
            if kind is Kind.STATS:
                self._settle(microbatch)
        while self._unwatched:
            flight = self._unwatched.popleft()
            self._transport.wait(flight.request, flight.name)
        self._ids, self._targets = [], []
        self._totals.clear()
        self._scores.clear()

    def _fly(self, kind: Kind, microbatch: int, request: Request, tensor: torch.Tensor, awaited: bool = True) -> None:
        flight = _Flight(request, str(Action(self._part.home, kind, microbatch)), tensor)
        if awaited:
            self._flights[kind, microbatch] = flight
        else:
            self._unwatched.append(flight)

    def _wait(self, kind: Kind, microbatch: int) -> None:
        flight = self._flights[kind, microbatch]
        self._transport.wait(flight.request, flight.name)

    def _landed(self, kind: Kind, microbatch: int) -> torch.Tensor:
        return self._flights.pop((kind, microbatch)).tensor

    # ---- embedding -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _sum_embedding(self, microbatch: int) -> None:
        """Rows that are here, zeros for the others: the sum over all ranks is the embedding, exactly."""
        places, here = self._places(microbatch)
        rows = self._part.rows(self._part.embedding)[torch.where(here, places, 0)] * here[:, None]
        self._fly(Kind.SUM_E, microbatch, self._transport.iallreduce(rows), rows, awaited=self._is_first)

    def finish_embedding(self, microbatch: int) -> None:
        """Wait for what SUM_E brings to the first stage."""
        self._wait(Kind.SUM_E, microbatch)
        rows = self._landed(Kind.SUM_E, microbatch).view(*self._ids[microbatch].shape, -1)
        flows = self._step.recording and self._part.embedding.requires_grad
        self._ports[0].inputs[microbatch] = Handover.of(rows.requires_grad_(flows))[0]

    def _cast_embedding(self, microbatch: int) -> None:
        size = (self._ids[microbatch].numel(), self._part.embedding.shape[1])
        gradient = torch.empty(size, dtype=self._part.embedding.dtype, device=self._device)
        if self._is_first:
            found = self._ports[0].leaving_gradients.pop(microbatch)[0]
            gradient = torch.zeros_like(gradient) if found is None else _as_rows(found, gradient)
        self._fly(Kind.CAST_E, microbatch, self._transport.ibroadcast(gradient, self._first), gradient)

    @torch.no_grad()
    def _scatter(self, microbatch: int) -> None:
        gradient = self._landed(Kind.CAST_E, microbatch)
        if self._step.weights[microbatch]:
            places, here = self._places(microbatch)
            rows = self._part.shard.filled
            found = torch.ops.aten.embedding_dense_backward(gradient[here], places[here], rows, -1, False)
            _accumulate(self._part.embedding, found)

    def _places(self, microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
        places = self._ids[microbatch].reshape(-1) - self._part.start
        return places, (places >= 0) & (places < self._part.shard.filled)

    # ---- head ------------------------------------------------------------------------------------------------------

    @property
    def _head(self) -> HeadRows:
        part = self._part
        return HeadRows(part.rows(part.head), part.start, part.whole, part.loss)

    def _cast_hidden(self, microbatch: int) -> None:
        weight, targets = self._part.head, self._targets[microbatch]
        hidden = torch.empty(targets.numel(), weight.shape[1], dtype=weight.dtype, device=self._device)
        if self._is_last:
            output = self._ports[self._last_stage].leaving.pop(microbatch).tensors[0]
            if output.shape != (*targets.shape, weight.shape[1]):
                raise BatchError(
                    f"the last stage gives {list(output.shape)} for targets {list(targets.shape)}; a spread head takes "
                    f"one vector of {weight.shape[1]} for each target"
                )
            self._hidden[microbatch] = output[:0]
            hidden = _as_rows(output, hidden)
        self._fly(Kind.CAST_H, microbatch, self._transport.ibroadcast(hidden, self._last), hidden)

    @torch.no_grad()
    def _score(self, microbatch: int) -> None:
        hidden, targets = self._landed(Kind.CAST_H, microbatch), self._targets[microbatch].reshape(-1)
        self._scores[microbatch] = score(self._head, hidden, targets, Kind.SUM_H in self._uses)
        self._users[microbatch] = len(self._uses)

    def _release(self, microbatch: int, used: bool = True) -> None:
        """Let go of the logits when nothing uses them any more."""
        self._users[microbatch] -= used
        if not self._users[microbatch]:
            del self._scores[microbatch], self._users[microbatch]

    def _statistics(self, microbatch: int) -> None:
        own = self._scores[microbatch].own_4N
        everybody = own.new_empty(self._transport.size, STATISTICS, own.shape[1])
        self._fly(Kind.STATS, microbatch, self._transport.iallgather(everybody, own), everybody)
        self._release(microbatch, used=False)

    def _settle(self, microbatch: int) -> None:
        """Wait for the statistics, once; from then on the loss is known."""
        if (Kind.STATS, microbatch) not in self._flights:
            return
        self._wait(Kind.STATS, microbatch)
        everybody, targets = self._landed(Kind.STATS, microbatch), self._targets[microbatch].reshape(-1)
        totals = combine(self._part.loss, self._part.whole, everybody, targets)
        self._totals[microbatch] = totals
        if self._is_last and self._step.weights[microbatch]:
            self._step.losses[microbatch] = totals.mean

    def _share(self, microbatch: int) -> torch.Tensor:
        return self._totals[microbatch].share(self._step.weights[microbatch] * self._step.scale)

    @torch.no_grad()
    def _sum_hidden(self, microbatch: int) -> None:
        scores, targets = self._scores[microbatch], self._targets[microbatch].reshape(-1)
        gradient = input_gradient(self._head, scores, self._totals[microbatch], self._share(microbatch), targets)
        self._release(microbatch)
        request = self._transport.iallreduce(gradient)
        self._fly(Kind.SUM_H, microbatch, request, gradient, awaited=self._is_last)

    def finish_hidden(self, microbatch: int) -> None:
        """Wait for what SUM_H brings to the last stage."""
        self._wait(Kind.SUM_H, microbatch)
        gradient, like = self._landed(Kind.SUM_H, microbatch), self._hidden.pop(microbatch)
        shape = (*self._targets[microbatch].shape, gradient.shape[1])
        self._ports[self._last_stage].gradients[microbatch] = [gradient.view(shape).to(like.dtype)]

    @torch.no_grad()
    def _weight(self, microbatch: int) -> None:
        scores, targets = self._scores[microbatch], self._targets[microbatch].reshape(-1)
        self._release(microbatch)
        if self._step.weights[microbatch]:
            totals = self._totals[microbatch]
            found = weight_gradient(self._head, scores, totals, self._share(microbatch), targets)
            _accumulate(self._part.head, found)


def _packed(values: Sequence[Any]) -> tuple[list[list[int]], bytes]:
    """Shapes and numbers of some tensors of token ids."""
    tensors = [value for value in values if value is not None]
    shapes = [list(tensor.shape) for tensor in tensors]
    return shapes, b"".join(tensor.cpu().numpy().astype(np.int32).tobytes() for tensor in tensors)


def _as_rows(value: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """A value as a contiguous matrix of the shape and type of ``rows``."""
    return value.detach().reshape(rows.shape).to(rows.dtype).contiguous()


def _accumulate(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
    """Add the gradient of a parameter's first rows to it, in the type in which it is kept."""
    if parameter.grad is None and len(gradient) == len(parameter):
        parameter.grad = gradient.to(accumulates_in(parameter))
        return
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, dtype=accumulates_in(parameter))
    parameter.grad[: len(gradient)].add_(gradient.to(accumulates_in(parameter)))
