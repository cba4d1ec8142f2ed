"""Optimizers of a pipeline whose steps are actions of its programs, with their state in shards (ZeRO)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, overload

import torch

from pipert.comm.mesh import Mesh
from pipert.errors import ConfigError
from pipert.layers.shard import shard_of
from pipert.optim.bucket import Bucket, Entry, make_buckets
from pipert.optim.flat import Piece
from pipert.optim.loss_scale import Decision, LossScaler, check_max_norm
from pipert.optim.memory import Memory, nbytes
from pipert.optim.precision import accumulates_in
from pipert.optim.rules import Elementwise, Factory, Rule
from pipert.optim.states import check_states, gathered_states, load_states
from pipert.scheduler.action import Kind


class Host(Protocol):
    """What an optimizer needs of its pipeline; `pipert.Pipeline` is one."""

    mesh: Mesh
    loss_scale: LossScaler

    def attach(self, optimizer: ZeroOptimizer) -> None:
        """Make the optimizer's actions part of the programs; calls its `prepare`."""
        ...

    def detach(self, optimizer: ZeroOptimizer) -> None:
        """Undo `attach`."""
        ...

    def update(self, *parts: Kind) -> None:
        """Run an update program."""
        ...

    def norm_of(self, squares: Sequence[tuple[int, float]]) -> float:
        """The norm over all ranks from each rank's (parameter's order, sum of squares)."""
        ...

    def together(self, work: Callable[[], None]) -> None:
        """Do some work on every rank; a refusal on any of them is raised on all."""
        ...


class ZeroOptimizer(torch.optim.Optimizer):
    """Any element-wise torch optimizer on flat shards, updating all ranks of a pipeline together.

        optim = pipert.ZeroOptimizer(pipe, lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9), zero=1)
        for batch in loader:
            pipe.step(batch)
            optim.step(); optim.zero_grad()

    The ZeRO stage says what the replicas share out among them instead of each having all of it: 1 the optimizer's state
    and masters, 2 gradients too, 3 weights too (gathered a stage at a time, so more chunks mean less memory). The
    numbers are the same. Without replicas every stage is 0.

    `step` is one decision on all ranks: if a gradient anywhere is inf or NaN nothing changes, to the bit; else
    gradients are clipped, and every stage is updated. A parameter without a gradient is left alone, as torch does.
    Weights of half precision have masters in fp32, made from them.

    With ``early`` each stage is updated within `pipe.step`, behind its last gradient, in the bubble at the end of the
    pipeline. `step` then only finds out whether that was right. If gradients must be clipped, or one is not finite, it
    restores everything exactly and does it again. Weights count as updated only after `step`.

    From stage 1 on gradients are not in ``.grad`` after a step, but in shards: use `pipe.grad_norm`, ``clip`` and
    `gradients`. At stage 3 parameters read as NaN outside of steps: use `gathered`.

    Args:
        pipe: the pipeline. All its trainable parameters must be in a group.
        factory: makes the optimizer from parameter groups (a list of dicts, as torch takes).
        params: this rank's parameters, or groups of them, as for torch's optimizers; default all of the pipeline's.
        zero: the ZeRO stage, 0 to 3.
        early: update each stage as soon as its gradients are whole.
        clip: the norm that all gradients together may have.

    Attributes:
        param_groups: hyper-parameters, as torch's; they may be changed between steps.
        decision: about the last update; None before the first.
        zero: the ZeRO stage, 0 without replicas.
        given: the ZeRO stage that was asked for.
        early: as given.
        speculated: whether the last step of the pipeline has updated the weights, and `step` has not been called yet.
        buckets: the flat buffers.
        closed: whether `close` was called.

    Raises:
        ConfigError: an argument cannot be used, on every rank alike.
    """

    def __init__(
        self,
        pipe: Host,
        factory: Factory,
        params: Iterable[Any] | None = None,
        *,
        zero: int = 0,
        early: bool = False,
        clip: float | None = None,
    ) -> None:
        self._start(pipe, lambda: Elementwise(factory), params, {}, zero, early, clip)

    def _start(
        self,
        pipe: Host,
        rule: Callable[[], Rule],
        params: Iterable[Any] | None,
        defaults: dict[str, Any],
        zero: int,
        early: bool,
        clip: float | None,
    ) -> None:
        self._pipe, self._make_rule, self._given, self._given_defaults = pipe, rule, params, defaults
        self.given = zero
        self.zero, self.early, self.clip = 0, bool(early), clip
        self.buckets: list[Bucket] = []
        self.decision: Decision | None = None
        self._decided = False
        self._undo: dict[int, list[Callable[[], None]]] = {}
        self._stale, self._hyper = False, ""
        self.speculated = self.closed = False
        pipe.attach(self)

    def check(self) -> None:
        """Check the arguments that need no parameters; the pipeline calls it before `prepare`."""
        if type(self.given) is not int or self.given not in range(4):
            raise ConfigError(f"zero = {self.given!r} must be 0, 1, 2 or 3, a stage of ZeRO")
        if self.clip is not None:
            check_max_norm(self.clip)

    def prepare(self, entries: Sequence[Entry]) -> None:
        """Check the parameters and lay out the buffers; the pipeline calls it on every rank."""
        replicas = self._pipe.mesh.dp
        zero = self.given if replicas > 1 else 0
        try:
            groups = _groups(self._given, [entry.parameter for entry in entries])
            super().__init__(groups, self._given_defaults)
        except (TypeError, ValueError, KeyError) as error:
            raise ConfigError(
                f"params = {self._given!r:.60} cannot be used ({error}); give parameters, or groups "
                '{"params": [...], "lr": ...} of them, each parameter once'
            ) from error
        numbers = {id(p): i for i, group in enumerate(self.param_groups) for p in group["params"]}
        _check_parameters(entries, numbers)
        owner = [numbers.get(id(entry.parameter)) for entry in entries]
        self._rule = self._make_rule()
        self.buckets = make_buckets(entries, owner, zero, replicas, self._pipe.mesh.dp_group.rank)
        self.zero = zero
        self._rule.prepare(self.buckets, self.param_groups)

    def close(self) -> None:
        """Give the parameters back whole, with memory of their own; the pipeline may get another optimizer then.

        Gradients that are there are whole in ``.grad`` afterwards. Closing again does nothing.
        """
        if self.closed:
            return
        with self.gathered():
            whole = [(p, p.detach().clone()) for bucket in self.buckets for p in bucket.parameters]
        gradients = self.gradients()
        owners = [(entry.name, entry.parameter) for bucket in self.buckets for entry in bucket.entries]
        for parameter, weight in whole:
            parameter.data = weight
        for name, parameter in owners:
            parameter.grad = gradients[name]
        self._pipe.detach(self)
        self.buckets, self.closed = [], True

    def check_usable(self) -> None:
        """Refuse to go on where updates would be lost.

        Raises:
            ConfigError: the optimizer is closed, or somebody has given a parameter other memory.
        """
        if self.closed:
            raise ConfigError("the optimizer is closed; make another one of the pipeline, or torch's")
        moved = next((name for bucket in self.buckets for name in bucket.moved()), None)
        if moved is not None:
            raise ConfigError(
                f"the parameter {moved} is no longer where its optimizer updates it: a second optimizer, model.to(...) "
                "or load_state_dict(assign=True) has given it other memory; do such things before the optimizer is "
                "made, or after its close()"
            )

    # ---- the update ------------------------------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update the weights, or skip that, on all ranks alike. Every rank calls it.

        `decision` tells what happened. If `Pipeline.decide` was called for these gradients, it is what happens.

        Raises:
            ConfigError: there is a closure.
        """
        if closure is not None:
            raise ConfigError("step takes no closure: a pipeline computes its loss in pipe.step; call that before")
        self.check_usable()
        if self.speculated:
            self._validate()
        elif self._decided:
            self._pipe.update(Kind.STEP)
        else:
            self._pipe.update(Kind.NORM, Kind.STEP)
        self._decided = self._stale = False
        return None

    def _validate(self) -> None:
        """Keep the early update if it was right; else undo it, and do it again."""
        if not self._decided:
            self._pipe.update(Kind.NORM)
        assert self.decision is not None
        if not self.decision.apply:
            self._pipe.update(Kind.UNDO)
        elif self.decision.factor != 1.0 or self._stale or self._hyper != repr(self.groups()):
            self._pipe.update(Kind.UNDO, Kind.STEP)
        self._undo.clear()
        self.speculated = False

    def groups(self) -> list[dict[str, Any]]:
        """The hyper-parameters of each group."""
        no = ("params", "param_names")
        return [{key: value for key, value in group.items() if key not in no} for group in self.param_groups]

    def decide(self, max_norm: float | None = None) -> Decision:
        """Decide on the next update now; see `Pipeline.decide`."""
        if max_norm is not None:
            check_max_norm(max_norm)
        clip, self.clip = self.clip, max_norm if max_norm is not None else self.clip
        try:
            self._pipe.update(Kind.NORM)
        finally:
            self.clip = clip
        assert self.decision is not None
        self._decided = True
        return self.decision

    def decide_now(self) -> None:
        """What NORM does."""
        self.decision = self._pipe.loss_scale.decide(self.norm(), self.clip)

    def update(self, stage: int) -> None:
        """What STEP does: within a step's program as if nothing had to be clipped, afterwards what was decided."""
        mine = [bucket for bucket in self.buckets if bucket.stage == stage and bucket.group is not None]
        if self._speculating:
            self._undo[stage] = [self._rule.save(bucket) for bucket in mine if _has_gradients(bucket)]
            factor = 1.0
        else:
            assert self.decision is not None
            if not self.decision.apply:
                return
            factor = self.decision.factor
        with torch.no_grad():
            for bucket in mine:
                if factor != 1.0:
                    bucket.multiply(factor)
                assert bucket.group is not None
                self._rule.step(bucket, self.param_groups[bucket.group])

    def undo(self, stage: int) -> None:
        """What UNDO does."""
        with torch.no_grad():
            for restore in self._undo.pop(stage, ()):
                restore()

    _speculating = False

    @contextmanager
    def speculating(self) -> Iterator[None]:
        """Around a step of the pipeline: what STEP does in it may have to be undone."""
        self.settle()
        self._speculating, self._decided, self._hyper = self.early, False, repr(self.groups())
        try:
            yield
        finally:
            self._speculating = False

    def gradients_changed(self) -> None:
        """There are other gradients now than those that the early update was made with."""
        self._stale = True

    def settle(self) -> None:
        """Before anything else that computes with the weights: an early update without its `step` does not count."""
        if self.speculated:
            self._pipe.update(Kind.UNDO)
            self._undo.clear()
        self._stale = self.speculated = False

    # ---- gradients -------------------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Let go of all gradients; they are never kept as zeros, since what has none is left alone."""
        for bucket in self.buckets:
            bucket.zero_grad()

    def _absorb(self) -> None:
        """At stages 1 to 3: take what somebody has left in ``.grad``."""
        for bucket in self.buckets if self.zero else ():
            bucket.set_aside()

    def norm(self) -> float:
        """The norm of all gradients of the model. Every rank calls it."""
        self._absorb()
        return self._pipe.norm_of(self._squares())

    def _squares(self) -> list[tuple[int, float]]:
        """(order, sum of squares) of what this rank has of every counted parameter."""
        if not self.zero and self._pipe.mesh.dp_group.rank:
            return []  # the first replica has the same
        first = self._pipe.mesh.tp_group.rank == 0
        counted = [
            (bucket.entries[piece.parameter].order, gradient)
            for bucket in self.buckets
            for piece, whole in bucket.gradients()
            if bucket.entries[piece.parameter].counted
            for gradient in counted_part(bucket.parameters[piece.parameter], piece, whole, first)
        ]
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for _, gradient in counted]
        values = torch.stack(norms).tolist() if norms else []
        return [(order, value**2) for (order, _), value in zip(counted, values, strict=True)]

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """The gradients of this rank's parameters by name, whole. Every rank calls it."""
        self._absorb()
        found: dict[str, torch.Tensor | None] = {}
        for bucket in self.buckets:
            whole = None
            if bucket.zero and any(bucket.used):
                assert bucket.gradient is not None
                whole = self._whole(bucket, bucket.gradient)
            for number, (entry, view) in enumerate(zip(bucket.entries, bucket.views(whole), strict=True)):
                there = view if bucket.zero else entry.parameter.grad
                found[entry.name] = there if bucket.has_gradient(number) else None
        return found

    def _whole(self, bucket: Bucket, shard: torch.Tensor) -> torch.Tensor:
        flat = shard.new_empty(bucket.layout.padded)
        group = self._pipe.mesh.dp_group
        group.wait(group.iallgather(flat, shard), "gathering of shards")
        return flat

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Within it this rank's parameters are whole, also at stage 3. Do not change them. Every rank calls it."""
        self.settle()
        sharded = [bucket for bucket in self.buckets if bucket.zero == 3]
        for bucket in sharded:
            bucket.allocate()
        self._fetch(sharded)
        try:
            yield
        finally:
            for bucket in sharded:
                bucket.free()

    def _fetch(self, buckets: Iterable[Bucket]) -> None:
        """Fill buckets with the shards of all replicas."""
        group = self._pipe.mesh.dp_group
        for request in [group.iallgather(bucket.flat, bucket.shard) for bucket in buckets]:
            group.wait(request, "gathering of weights")

    # ---- state -----------------------------------------------------------------------------------------------------

    def memory(self) -> Memory:
        """Bytes of this rank, counted. Gradients are those of the last step."""
        weights = [bucket.shard if bucket.zero == 3 else bucket.flat for bucket in self.buckets]
        masters = [b.master for b in self.buckets if b.master is not None and b.master is not b.shard]
        whole = sum(p.grad.nbytes for b in self.buckets for p in b.parameters if p.grad is not None)
        taken = sum(bucket.taken for bucket in self.buckets) if self.zero == 1 else 0
        shards = nbytes(bucket.gradient for bucket in self.buckets)
        return Memory(
            parameters=nbytes(weights),
            gradients=max(whole + shards, taken),
            moments=nbytes(t for bucket in self.buckets for t in self._rule.tensors(bucket)),
            masters=nbytes(masters),
        )

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: moments, steps and masters by parameter name, in the parameters' shapes.

        Every rank calls it; each gets those of its own parameters, whole.
        """
        self.settle()
        groups = []
        names = {id(entry.parameter): entry.name for bucket in self.buckets for entry in bucket.entries}
        for group in self.param_groups:
            kept = {key: value for key, value in group.items() if key != "params"}
            groups.append({**kept, "params": [names[id(parameter)] for parameter in group["params"]]})
        state = gathered_states(self.buckets, self._rule, self._pipe.mesh.dp_group)
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`, of any layout and ZeRO stage.

        Parameters that it does not name keep no state. Weights must be loaded before, since masters without a saved one
        are made from them.

        Raises:
            ConfigError: it is of other groups or names, something is missing, or a tensor has another shape; on
                every rank, and nothing has changed.
        """
        self.settle()
        self._pipe.together(lambda: self._load(state_dict))
        if self.zero in (1, 2):
            self._fetch(self.buckets)

    def _load(self, state_dict: Mapping[str, Any]) -> None:
        """This rank's part of `load_state_dict`; everything is looked at before anything changes."""
        missing = [key for key in ("state", "param_groups") if key not in state_dict]
        if missing:
            raise ConfigError(f"a state without {' and '.join(missing)}; give what state_dict() returned")
        groups = state_dict["param_groups"]
        if len(groups) != len(self.param_groups):
            raise ConfigError(f"a state of {len(groups)} parameter groups for {len(self.param_groups)}")
        check_states([entry for bucket in self.buckets for entry in bucket.entries], self._rule, state_dict["state"])
        for group, kept in zip(self.param_groups, groups, strict=True):
            group.update({key: value for key, value in kept.items() if key not in ("params", "names")})
        load_states(self.buckets, self._rule, state_dict["state"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse groups once the buffers are laid out.

        Raises:
            ConfigError: always, after construction.
        """
        if self.buckets:
            raise ConfigError("parameter groups are fixed when the optimizer is made; give all of them to it then")
        super().add_param_group(param_group)


def counted_part(
    parameter: torch.nn.Parameter, piece: Piece, gradient: torch.Tensor, first: bool
) -> Iterator[torch.Tensor]:
    """Of a piece's gradient what totals count on this tensor-parallel rank; ``first`` if it is the first one.

    What all ranks have whole counts on the first, rows of shards that several hold on one of them.
    """
    shard = shard_of(parameter)
    if shard is None:
        yield from [gradient] if first else []
    elif not shard.shared:
        yield gradient
    else:
        counts = torch.zeros(parameter.shape, dtype=torch.bool, device=gradient.device)
        for start, stop in shard.counted:
            counts.narrow(shard.dim, start, stop - start).fill_(True)
        yield gradient[counts.reshape(-1)[piece.first : piece.first + len(gradient)]]


def _groups(params: Iterable[Any] | None, own: Sequence[torch.nn.Parameter]) -> list[dict[str, Any]]:
    """Parameter groups, at least one, each a dict; a group may be empty."""
    given = list(own if params is None else params)
    if given and all(isinstance(group, dict) for group in given):
        return [{**group, "params": list(group["params"])} for group in given]
    return [{"params": [p[1] if isinstance(p, tuple) else p for p in given]}]


def _check_parameters(entries: Sequence[Entry], numbers: Mapping[int, int]) -> None:
    own = {id(entry.parameter) for entry in entries}
    if not set(numbers) <= own:
        raise ConfigError("a group has a parameter that is not this rank's; use those of pipe.named_parameters()")
    for entry in entries:
        parameter = entry.parameter
        if parameter.untyped_storage().nbytes() < parameter.nbytes:
            raise ConfigError(f"{entry.name} is in shards of another optimizer (ZeRO stage 3); close() that one first")
        if parameter.requires_grad and id(parameter) not in numbers:
            raise ConfigError(f"no group has the trainable parameter {entry.name}; give it to one, or freeze it")
        if parameter.requires_grad and not accumulates_in(parameter).is_floating_point:
            raise ConfigError(f"{entry.name} is {parameter.dtype}; only floating-point parameters can be updated")


def _has_gradients(bucket: Bucket) -> bool:
    return any(map(bucket.has_gradient, range(len(bucket.entries))))
