"""The mesh: every rank's place along the pipeline, data and tensor axes, and a transport for each group."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, get_args

from pipert.comm.errors import MeshError, OptionError
from pipert.comm.mesh_shape import AXES, DEFAULT_ORDER, Axis, Coordinates, MeshShape
from pipert.comm.single import SingleTransport
from pipert.comm.transport import Transport

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

#: What may move tensors beside MPI.
Tensors = Literal["mpi", "rccl", "rccl-direction"]


@dataclass(frozen=True)
class Mesh:
    """A rank's view of a pp x dp x tp mesh. Make one with a ``from_`` method or `local`, the same call on every rank.

    All groups are made then, in the order pp, dp, tp, on every rank; nothing is made later. A group of one rank costs
    nothing. Meshes are equal when their shapes and ranks are.

    Attributes:
        shape: sizes and order.
        rank: this rank of the world.
        world: all ranks.
        pp_group: the ranks of this rank's pipeline, by pp coordinate.
        dp_group: the replicas of this rank's part of the model, by dp coordinate.
        tp_group: the ranks that share this rank's layers, by tp coordinate.
    """

    shape: MeshShape
    rank: int
    world: Transport = field(compare=False, repr=False)
    pp_group: Transport = field(compare=False, repr=False)
    dp_group: Transport = field(compare=False, repr=False)
    tp_group: Transport = field(compare=False, repr=False)
    _owns_world: bool = field(default=False, compare=False, repr=False)

    # ---- where ranks are -------------------------------------------------------------------------------------------

    @property
    def pp(self) -> int:
        """Ranks along the pipeline."""
        return self.shape.pp

    @property
    def dp(self) -> int:
        """Replicas."""
        return self.shape.dp

    @property
    def tp(self) -> int:
        """Ranks that share a layer."""
        return self.shape.tp

    @property
    def size(self) -> int:
        """Ranks of the world."""
        return self.shape.size

    @property
    def coordinates(self) -> Coordinates:
        """Where this rank is."""
        return self.shape.coordinates(self.rank)

    @property
    def pp_rank(self) -> int:
        """Where this rank is along the pipeline."""
        return self.coordinates.pp

    @property
    def dp_rank(self) -> int:
        """Which replica this rank belongs to."""
        return self.coordinates.dp

    @property
    def tp_rank(self) -> int:
        """Which part of each layer this rank has."""
        return self.coordinates.tp

    @property
    def device(self) -> torch.device:
        """Where the tensors are that the mesh moves: with RCCL this rank's GPU, else the CPU."""
        return self.world.device

    def rank_of(self, *, pp: int | None = None, dp: int | None = None, tp: int | None = None) -> int:
        """The rank of the world at these coordinates; those left out are this rank's own.

        Raises:
            MeshError: a coordinate outside the mesh.
        """
        own = self.coordinates
        return self.shape.rank_of(
            pp=own.pp if pp is None else pp, dp=own.dp if dp is None else dp, tp=own.tp if tp is None else tp
        )

    def __str__(self) -> str:
        own = self.coordinates
        return f"rank {self.rank} of {self.size}: pp {own.pp}/{self.pp}, dp {own.dp}/{self.dp}, tp {own.tp}/{self.tp}"

    # ---- making and closing ----------------------------------------------------------------------------------------

    @classmethod
    def from_transport(
        cls, transport: Transport, pp: int = 1, dp: int = 1, tp: int = 1, *, order: str = DEFAULT_ORDER
    ) -> Mesh:
        """Lay a mesh over the ranks of a transport. Collective. The transport remains the caller's to close.

        Args:
            transport: the world.
            pp: ranks along the pipeline.
            dp: replicas.
            tp: ranks that share a layer.
            order: the axes, fastest first.

        Raises:
            MeshError: the sizes do not fit the number of ranks, or ranks ask for different meshes; on every rank,
                before any group is made.
        """
        shape = MeshShape(pp, dp, tp, order)
        shape.check_ranks(transport.size)
        _check_agreement(shape, transport)
        groups = {axis: _make_group(shape, axis, transport) for axis in AXES}
        return cls(shape, transport.rank, transport, groups["pp"], groups["dp"], groups["tp"])

    @classmethod
    def _over_own_world(cls, transport: Transport, shape: MeshShape) -> Mesh:
        try:
            mesh = cls.from_transport(transport, shape.pp, shape.dp, shape.tp, order=shape.order)
        except MeshError:
            transport.close()
            raise
        return replace(mesh, _owns_world=True)

    @classmethod
    def from_mpi(
        cls,
        pp: int = 1,
        dp: int = 1,
        tp: int = 1,
        *,
        order: str = DEFAULT_ORDER,
        deadline: float | None = None,
        tensors: Tensors = "mpi",
    ) -> Mesh:
        """Lay a mesh over all ranks of the MPI job. Collective over the world; starts MPI if nobody has.

        Args:
            pp: ranks along the pipeline.
            dp: replicas.
            tp: ranks that share a layer.
            order: the axes, fastest first.
            deadline: seconds that a wait may last; None for the transport's default.
            tensors: what moves tensors between GPUs: ``rccl`` (on NVIDIA NCCL), with a communicator for each pair of
                pipeline ranks and exchanges in groups; ``rccl-direction``, with one for each direction of a pair; or
                ``mpi``, which moves the CPU's memory only. With RCCL each rank's GPU must be torch's current one.

        Raises:
            MeshError: as in `from_transport`. Sizes that are wrong in themselves are refused before MPI starts.
            OptionError: ``tensors`` is none of these.
            TransportError: there is no MPI, or its world is not the one that the launcher promised; with RCCL also, on
                every rank, where one of them has no library or no GPU.
        """
        shape = MeshShape(pp, dp, tp, order)
        if tensors not in get_args(Tensors):
            raise OptionError(f"tensors = {tensors!r} is unknown; use one of {', '.join(get_args(Tensors))}")
        from pipert.comm.mpi import MpiTransport

        world: Transport = MpiTransport.world(deadline)
        if tensors != "mpi":
            from pipert.comm.mixed import MixedTransport

            shape.check_ranks(world.size)
            world = MixedTransport.over(world, "direction" if tensors == "rccl-direction" else "pair")
        return cls._over_own_world(world, shape)

    @classmethod
    def from_torch_distributed(
        cls,
        group: ProcessGroup | None = None,
        pp: int = 1,
        dp: int = 1,
        tp: int = 1,
        *,
        order: str = DEFAULT_ORDER,
        deadline: float | None = None,
    ) -> Mesh:
        """Lay a mesh over an existing ``torch.distributed`` process group. Collective over the group.

        Args:
            group: whose ranks; None for the default group. It remains the caller's.
            pp: ranks along the pipeline.
            dp: replicas.
            tp: ranks that share a layer.
            order: the axes, fastest first.
            deadline: seconds that a wait may last; None for the transport's default.

        Raises:
            MeshError: as in `from_transport`.
            TransportError: ``torch.distributed`` is not initialised, or its backend is neither gloo nor nccl.
        """
        shape = MeshShape(pp, dp, tp, order)
        from pipert.comm.torch_distributed import TorchTransport

        return cls._over_own_world(TorchTransport.over(group, deadline), shape)

    @classmethod
    def local(cls, pp: int = 1, dp: int = 1, tp: int = 1, *, order: str = DEFAULT_ORDER) -> Mesh:
        """Lay a mesh over the ranks of the `run_ranks` call that this thread is one of; a world of one elsewhere.

        Raises:
            MeshError: as in `from_transport`.
        """
        from pipert.comm.local import current_transport

        return cls.from_transport(current_transport() or SingleTransport(), pp, dp, tp, order=order)

    def close(self) -> None:
        """Release the groups, and the world where the mesh has made it. Idempotent; the same call on every rank."""
        for group in (self.tp_group, self.dp_group, self.pp_group):
            group.close()
        if self._owns_world:
            self.world.close()


def _check_agreement(shape: MeshShape, transport: Transport) -> None:
    asked = [blob.decode() for blob in transport.exchange(str(shape).encode())]
    if len(set(asked)) > 1:
        other = next(rank for rank, text in enumerate(asked) if text != asked[0])
        raise MeshError(
            f"the ranks ask for different meshes: rank 0 for {asked[0]}, rank {other} for {asked[other]}; "
            "make the same call on every rank"
        )


def _make_group(shape: MeshShape, axis: Axis, transport: Transport) -> Transport:
    if shape.along(axis) == 1:
        return SingleTransport(transport)
    ranks = shape.group(axis, transport.rank)
    group = transport.split(color=ranks[0], key=ranks.index(transport.rank))
    if group is None:
        raise AssertionError("split returned no group for a rank that gave a color")
    return group
