"""One stage: the forward and backward of a micro-batch through the blocks that a rank owns."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipert.engine.backward import run_backward
from pipert.engine.blocks import BlockRunner, uses_global_random
from pipert.engine.boundary import Entry, Handover
from pipert.engine.deferred import Deferred
from pipert.engine.loss import LossFunction, weighted
from pipert.engine.offload import Mover, Saved
from pipert.engine.recompute import Recompute, recomputed
from pipert.errors import ConfigError
from pipert.graph.stage import StageModule
from pipert.randomness import Draw

#: Of the tensors that cross a boundary and require one; None where the later stages do not use the tensor.
Gradients = Sequence[torch.Tensor | None]


@dataclass
class StepData:
    """What the stages of a rank need for one step, and what they find out.

    Attributes:
        recording: whether there will be backwards.
        trainable_from: stages below it have none.
        draws: for each micro-batch its step and samples.
        weights: for each micro-batch its weight in the loss of the whole batch.
        inputs: owner of the first stage: each micro-batch's inputs, None once used.
        targets: owner of the last stage: each micro-batch's targets.
        losses: owner of the last stage: each micro-batch's mean loss, None where it counts nothing.
        outputs: owner of the last stage: each micro-batch's output where they are kept, else None.
        scale: what the loss is multiplied by before the backward.
    """

    recording: bool
    trainable_from: int
    draws: Sequence[Draw]
    weights: Sequence[float]
    inputs: list[Any] = field(default_factory=list)
    targets: list[Any] = field(default_factory=list)
    losses: list[torch.Tensor | None] = field(default_factory=list)
    outputs: list[Any] | None = None
    scale: float = 1.0


#: References to the memory of a tensor that nobody else uses: the tensor's own and the one through which we look.
_SOLE_OWNER = 2


class Stage:
    """Consecutive blocks of the model.

    A micro-batch is *live* here from its forward to the end of its backward. Until then the stage keeps its autograd
    graph alone (as `GradientEdge`, not as tensors): what it sent on is freed as soon as it has left, unless the graph
    itself needs it. A backward in two halves keeps between them only what `pipert.engine.deferred` puts off.

    Args:
        index: which stage.
        module: what it runs.
        device: where.
        recompute: what is computed a second time instead of kept, see `pipert.engine.recompute`.
        loss_fn: on the last stage.
        whole: makes the model's whole output, where tensor-parallel ranks have parts of it.

    Attributes:
        live: the micro-batches between their forward and the end of their backward.
    """

    def __init__(
        self,
        index: int,
        module: StageModule,
        device: torch.device,
        recompute: Recompute = "none",
        loss_fn: LossFunction | None = None,
        whole: Callable[[Any], Any] | None = None,
    ) -> None:
        self.index = index
        self.module = module
        self.device = device
        self.live: dict[int, _Live] = {}
        self._recompute_all = recompute == "full"
        self._runner = BlockRunner({b.name: b.module for b in module.blocks}, device, recompute)
        self._loss_fn = loss_fn
        self._whole = whole
        self._loss_draws = uses_global_random(loss_fn)
        self._anchor = torch.zeros((), requires_grad=True)
        self._memories: frozenset[int] = frozenset()
        self._step = StepData(False, 0, (), ())
        self._recording = False
        self._split: Collection[int] = ()
        self._moved: Collection[int] = ()
        self._mover: Mover | None = None
        module.call = self._runner

    def begin(self, step: StepData, split: Collection[int] = (), moved: Collection[int] = ()) -> None:
        """Get ready for a step.

        Args:
            step: what it needs.
            split: micro-batches whose backwards run in two halves.
            moved: micro-batches whose activations go to host memory in between.
        """
        self._step, self._split, self._moved = step, split, moved
        if moved and self._mover is None:
            self._mover = Mover(self.device)
        self._recording = step.recording and self.index >= step.trainable_from
        self.find_memories()

    def find_memories(self) -> None:
        """Find out where parameters and buffers lie; again whenever that changes within a step."""
        self._memories = frozenset(map(_memory, [*self.module.parameters(), *self.module.buffers()]))

    def forward(self, microbatch: int, handover: Handover | None) -> Handover | None:
        """Run a micro-batch forward.

        Args:
            microbatch: which.
            handover: the previous stage's output; None on the first stage.

        Returns:
            what the next stage gets; None on the last stage, which computes the loss.
        """
        entry = self._runner.deferred = None
        saved = Saved(self._mover, self._memories) if self._mover and microbatch in self._moved else None
        with torch.set_grad_enabled(self._recording), saved.saving() if saved else nullcontext():
            if handover is None:
                value, self._step.inputs[microbatch] = self._step.inputs[microbatch], None
            elif self._recording and handover.spec.with_gradient:
                entry = Entry(handover)
                self._runner.deferred = Deferred() if microbatch in self._split else None
                value = entry.value(self._anchor)
            else:
                value = handover.value()
            self._runner.draw = self._step.draws[microbatch]
            output = self._run(value)
            if self._loss_fn is None:
                result, roots = Handover.of(output)
                result = self._owned(result)
            else:
                result, roots = None, self._finish(microbatch, output)
        if self._recording:
            seeds: list[torch.Tensor | None] = [torch.ones_like(root) for root in roots] if result is None else []
            edges = [get_gradient_edge(root) for root in roots]
            self.live[microbatch] = _Live(entry, edges, seeds, self._runner.deferred, saved)
        return result

    def _run(self, value: Any) -> Any:
        if not (self._recompute_all and self._recording):
            return self.module(value)
        draw, deferred = self._runner.draw, self._runner.deferred

        def run(value: Any) -> Any:
            self._runner.draw, self._runner.deferred = draw, deferred
            return self.module(value)

        return recomputed(run, self.module, f"stage {self.index}", value)

    def _finish(self, microbatch: int, output: Any) -> list[torch.Tensor]:
        """The loss of a micro-batch; returns the root of its backward, if it has one."""
        assert self._loss_fn is not None
        step = self._step
        if step.outputs is not None:
            step.outputs[microbatch] = output if self._whole is None else self._whole(output)
        weight = step.weights[microbatch]
        if not weight:
            return []
        loss = self._runner.bound("loss", self._loss_fn, self._loss_draws)(output, step.targets[microbatch])
        root = weighted(loss, weight, step.scale)
        step.losses[microbatch] = loss.detach()
        if self._recording and not root.requires_grad:
            raise ConfigError(
                f"the loss of micro-batch {microbatch} depends on no trainable parameter, although there are "
                "some; do not detach the output, or freeze all parameters"
            )
        return [root]

    def _owned(self, handover: Handover) -> Handover:
        """Copy what shares memory with parameters or buffers: those may change while it is still on its way."""
        tensors = [tensor.clone() if _memory(tensor) in self._memories else tensor for tensor in handover.tensors]
        return Handover(handover.spec, tensors)

    def offload(self, microbatch: int) -> None:
        """Move what the forward keeps for the backward to host memory."""
        saved = self.live[microbatch].saved
        assert saved is not None
        saved.offload()

    def reload(self, microbatch: int) -> None:
        """Bring it back."""
        saved = self.live[microbatch].saved
        assert saved is not None
        saved.reload()

    def backward(self, microbatch: int, gradients: Gradients) -> list[torch.Tensor | None]:
        """Run a micro-batch backward; its activations are free afterwards.

        Parameters' gradients are added to, in the order of the calls. A micro-batch of weight 0 adds nothing.

        Args:
            microbatch: which.
            gradients: those of the stage's output, None where the later stages do not use a tensor; empty on the last
                stage.

        Returns:
            those of its input, one for each tensor with gradient, None where the stage does not use it.
        """
        live = self.live.pop(microbatch)
        self._run_backward(live, microbatch, gradients)
        return self._input_gradients(live)

    def backward_input(self, microbatch: int, gradients: Gradients) -> list[torch.Tensor | None]:
        """The first half of a backward; the micro-batch keeps afterwards only what its weight gradients need.

        Where no gradient flows back there is nothing to do before the second half.

        Args:
            microbatch: which.
            gradients: as for `backward`.

        Returns:
            as `backward`.
        """
        live = self.live[microbatch]
        if live.deferred is None:
            live.seeds = list(gradients) or live.seeds
            return []
        self._run_backward(live, microbatch, gradients)
        return self._input_gradients(live)

    def backward_weight(self, microbatch: int) -> None:
        """The second half of a backward: adds to the parameters' gradients; the micro-batch keeps nothing."""
        live = self.live.pop(microbatch)
        if live.deferred is None:
            self._run_backward(live, microbatch, ())
            return
        with _outside_autocast(self.device.type):
            live.deferred.accumulate()

    def _run_backward(self, live: _Live, microbatch: int, gradients: Gradients) -> None:
        """Run the graph from all that is used later, and let go of it."""
        pairs = zip(live.edges, list(gradients) or live.seeds, strict=True)
        used = [(edge, seed) for edge, seed in pairs if seed is not None]
        live.edges, live.seeds = [], []
        if live.saved is not None and self._mover is not None:
            self._mover.wait()
            live.saved = None
        edges, seeds = [edge for edge, _ in used], [seed for _, seed in used]
        if edges and self._step.weights[microbatch]:
            with _outside_autocast(self.device.type):
                run = run_backward if live.deferred is None else live.deferred.first_half
                run(edges, seeds)

    def _input_gradients(self, live: _Live) -> list[torch.Tensor | None]:
        entry, live.entry = live.entry, None
        found = entry.gradients() if entry else []
        return [gradient if gradient is None else _unshared(gradient) for gradient in found]


def warm_up(recompute: bool) -> None:
    """Let torch import now what it imports when the first backward, or recompute, runs: about a second of computing.

    In the first step the ranks of a pipeline would do so one after another, each while all others wait.
    """
    with torch.enable_grad():
        root = torch.zeros((), requires_grad=True) * 1
        if recompute:
            root = recomputed(torch.clone, torch.nn.Identity(), "nothing", root)
        torch.autograd.backward([get_gradient_edge(root)], [torch.ones(())])


@dataclass(slots=True)
class _Live:
    """A micro-batch between its forward and the end of its backward.

    Attributes:
        entry: where its input entered the graph, if a gradient flows back.
        edges: where its backward starts.
        seeds: the gradients with which it starts, as far as they are known: on the last stage the loss's with respect
            to itself.
        deferred: what its backward puts off, if that runs in two halves and a gradient flows back.
        saved: what its graph keeps, if that is moved to host memory.
    """

    entry: Entry | None
    edges: list[GradientEdge]
    seeds: list[torch.Tensor | None]
    deferred: Deferred | None
    saved: Saved | None = None


def _outside_autocast(device: str) -> AbstractContextManager[None]:
    """A backward computes in the types of its forward, also where a block had left autocast."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _unshared(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient in memory of its own.

    autograd may give one piece of memory to an input's gradient and to a parameter's (``x + p.view(…)``), and adds to
    the latter in place in the next micro-batch, when the former may not have been sent yet.
    """
    references = torch._C._storage_Use_Count(gradient.untyped_storage()._cdata)
    return gradient if references <= _SOLE_OWNER else gradient.clone()
