"""ZeRO on one rank: what the actions SCATTER, GATHER, FREE, STEP and UNDO, and REDUCE and TIE of shards, do.

From ZeRO stage 1 on a REDUCE is a reduce-scatter: each replica gets its shard of the sum of all the stage's gradients.
A TIE then sums the shards of a tied weight over the ranks that hold a copy; since all copies lie alike in buckets of
their own, so do their shards. From stage 2 on SCATTERs do the same for each micro-batch, so that of the gradients only
shards, and what the micro-batch at work has added, are there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from pipert.comm.mesh import Mesh
from pipert.comm.transport import Request, Transport
from pipert.engine.build import Parts
from pipert.engine.partial import sum_partial
from pipert.errors import ConfigError
from pipert.optim.bucket import Bucket
from pipert.scheduler.placement import Placement


class Optimizer(Protocol):
    """What the engine asks of an optimizer whose steps are actions.

    Attributes:
        speculated: set when a step's program has updated the weights.
    """

    speculated: bool

    @property
    def zero(self) -> int:
        """The ZeRO stage; 0 without replicas."""
        ...

    @property
    def early(self) -> bool:
        """Whether stages are updated within the step's program."""
        ...

    @property
    def buckets(self) -> Sequence[Bucket]:
        """This rank's."""
        ...

    @property
    def clip(self) -> float | None:
        """The norm that all gradients together may have."""
        ...

    def groups(self) -> list[dict[str, Any]]:
        """The hyper-parameters of each group."""
        ...

    def decide_now(self) -> None:
        """NORM: decide on the update. Waits for all ranks."""
        ...

    def update(self, stage: int) -> None:
        """STEP."""
        ...

    def undo(self, stage: int) -> None:
        """UNDO."""
        ...

    def gradients_changed(self) -> None:
        """There are other gradients now than those that an early update was made with."""
        ...


class ShardSum:
    """A REDUCE or SCATTER: sums what is in ``.grad`` over the replicas into shards.

    Args:
        buckets: the stage's.
        transport: the replicas.
        tensor: the tensor-parallel ranks, which sum first where each has a part of a gradient.
        last: whether it is the last one of the step; then it also finds out which untied weights had gradients.
    """

    def __init__(self, buckets: Sequence[Bucket], transport: Transport, tensor: Transport, last: bool) -> None:
        self.transport = transport
        self._tensor = tensor
        self._all, self._last = buckets, last
        self._parts: list[tuple[Bucket, torch.Tensor, torch.Tensor]] = []
        self._complete: list[Bucket] = []
        self._flags = torch.empty(0)

    def start(self) -> list[Request]:
        """Start summing."""
        active = [bucket for bucket in self._all if bucket.trainable]
        requests = []
        sum_partial((parameter for bucket in active for parameter in bucket.parameters), self._tensor)
        for bucket in active:
            flat = bucket.take()
            part = flat.new_empty(bucket.layout.shard)
            self._parts.append((bucket, flat, part))
            requests.append(self.transport.ireduce_scatter(part, flat))
        self._complete = [bucket for bucket in active if self._last and bucket.tie is None]
        if self._complete:
            self._flags = torch.cat([bucket.flags() for bucket in self._complete])
            requests.append(self.transport.iallreduce(self._flags))
        return requests

    def finish(self) -> None:
        """Add the sums to what earlier micro-batches brought; the last one completes the gradients."""
        for bucket, _, part in self._parts:
            bucket.add(part)
        sizes = [len(bucket.entries) for bucket in self._complete]
        for bucket, counts in zip(self._complete, torch.split(self._flags, sizes), strict=bool(sizes)):
            bucket.commit(counts.tolist())
        self._parts, self._complete = [], []


class TieShardSum:
    """A TIE of shards.

    Args:
        bucket: the tied weight's.
        copies: the ranks of this replica that hold a copy; None if that is one rank.
        everybody: the ranks of all replicas that do.
    """

    def __init__(self, bucket: Bucket, copies: Transport | None, everybody: Transport) -> None:
        self.transport = everybody
        self._bucket, self._copies = bucket, copies
        self._flags = torch.empty(0)

    def start(self) -> list[Request]:
        """Start summing what the replicas have summed."""
        bucket = self._bucket
        assert bucket.incoming is not None
        self._flags = bucket.flags()
        requests = [self.transport.iallreduce(self._flags)]
        if self._copies is not None:
            requests.append(self._copies.iallreduce(bucket.incoming))
        return requests

    def finish(self) -> None:
        """The gradient is complete."""
        self._bucket.commit(self._flags.tolist())


class _Whole:
    """Which buckets are whole at ZeRO stage 3, for how many stages, and the request that made each so.

    A tied weight is there while any of its stages on this rank is whole.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._users: dict[Bucket, int] = {}
        self._requests: dict[Bucket, Request] = {}

    def start(self, bucket: Bucket) -> Request:
        """Fetch a bucket, unless that has been started for another stage."""
        if not self._users.get(bucket):
            bucket.allocate()
            self._requests[bucket] = self.transport.iallgather(bucket.flat, bucket.shard)
        self._users[bucket] = self._users.get(bucket, 0) + 1
        return self._requests[bucket]

    def free(self, bucket: Bucket) -> None:
        """Free it, unless another stage uses it."""
        self._users[bucket] -= 1
        if not self._users[bucket]:
            del self._requests[bucket]
            bucket.free()


class ShardGather:
    """A GATHER: fetches the other replicas' shards of the stage's weights, at stage 3 into memory for a while."""

    def __init__(self, buckets: Sequence[Bucket], whole: _Whole) -> None:
        self.transport = whole.transport
        self._buckets, self._whole = buckets, whole

    def start(self) -> list[Request]:
        """Start fetching."""
        return [
            self._whole.start(bucket) if bucket.zero == 3 else self.transport.iallgather(bucket.flat, bucket.shard)
            for bucket in self._buckets
        ]

    def finish(self) -> None:
        """The parameters are whole."""


class Sharding:
    """An optimizer's actions on this rank. Collective to make.

    Args:
        mesh: all ranks.
        parts: what this rank built.
        placement: the rank of every stage.
        optimizer: has the buckets.
    """

    def __init__(self, mesh: Mesh, parts: Parts, placement: Placement, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._mesh, self._parts = mesh, parts
        used = {stage: set(map(id, module.parameters())) for stage, module in parts.modules.items()}
        self._of_stage = {stage: [b for b in optimizer.buckets if b.stage == stage] for stage in used}
        self._used_by = {s: [b for b in optimizer.buckets if id(b.parameters[0]) in used[s]] for s in used}
        self._whole = _Whole(mesh.dp_group)
        self._copies = [self._holders(tie.stages, placement) for tie in parts.ties] if optimizer.zero else []

    def _holders(self, stages: Sequence[int], placement: Placement) -> Transport | None:
        """The ranks of this replica that hold a copy of a tied weight. Every rank takes part for every tie."""
        holders = {placement.owners[stage] for stage in stages}
        mesh = self._mesh
        mine = mesh.pp_group.rank in holders and len(holders) > 1
        color = mesh.dp_group.rank * mesh.tp + mesh.tp_group.rank
        return mesh.world.split(color if mine else None, mesh.world.rank)

    def begin(self, scale: float) -> None:
        """Before a step with this loss scale: set gradients aside that are there."""
        for bucket in self.optimizer.buckets:
            bucket.set_aside(scale)

    def reduce(self, stage: int) -> ShardSum:
        """What a REDUCE does."""
        return ShardSum(self._of_stage[stage], self._mesh.dp_group, self._mesh.tp_group, last=True)

    def scatter(self, stage: int, last: bool) -> ShardSum:
        """What a SCATTER does. Weights that other stages of this rank use too go with the SCATTERs of each."""
        return ShardSum(self._used_by[stage], self._mesh.dp_group, self._mesh.tp_group, last)

    def tie(self, number: int) -> TieShardSum | None:
        """What the last TIE of a rank does; None where this rank holds no copy."""
        bucket = next((bucket for bucket in self.optimizer.buckets if bucket.tie == number), None)
        everybody = self._parts.tie_groups[number]
        return None if bucket is None or everybody is None else TieShardSum(bucket, self._copies[number], everybody)

    def gather(self, stage: int) -> ShardGather:
        """What a GATHER does."""
        zero = self.optimizer.zero
        return ShardGather(self._used_by[stage] if zero == 3 else self._of_stage[stage], self._whole)

    def free(self, stage: int) -> None:
        """What a FREE does."""
        for bucket in self._used_by[stage]:
            self._whole.free(bucket)


def check_same(mesh: Mesh, optimizer: Optimizer) -> None:
    """Refuse optimizers that differ from rank to rank, or whose groups do between ranks that have the same stages."""
    mine = {"zero": optimizer.zero, "early": optimizer.early, "clip": optimizer.clip, "groups": optimizer.groups()}
    told = [json.loads(blob) for blob in mesh.world.exchange(json.dumps([mesh.pp_rank, mine], default=repr).encode())]
    first: dict[int, tuple[int, Any]] = {}
    for rank, (stages, theirs) in enumerate(told):
        other, known = first.setdefault(stages, (rank, theirs))
        shapes = [(one["zero"], one["early"], one["clip"], len(one["groups"])) for one in (told[0][1], theirs)]
        if shapes[0] != shapes[1]:
            other, known = 0, told[0][1]
        elif known == theirs:
            continue
        raise ConfigError(
            f"ranks {other} and {rank} made different optimizers: {json.dumps(known)}, {json.dumps(theirs)}; give the "
            "same arguments on all"
        )
