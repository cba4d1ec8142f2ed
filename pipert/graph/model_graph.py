"""A model as a value: blocks with their costs, and the tensors that run between them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any

from pipert.errors import GraphError

if TYPE_CHECKING:
    import networkx

INPUT = "<input>"
"""Source of the edges that carry what the model is called with."""
OUTPUT = "<output>"
"""Target of the edges that carry what the model returns."""


@dataclass(frozen=True)
class TensorSpec:
    """What is known of a tensor without its values.

    Attributes:
        shape: its sizes.
        dtype: torch's name without the prefix, ``"bfloat16"``.
        itemsize: bytes per element.
        requires_grad: whether a gradient flows back through it.
    """

    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    requires_grad: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return prod(self.shape) * self.itemsize


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter as one block sees it.

    Attributes:
        name: its path in the user's model, through this block: ``"head.weight"``.
        shape: its sizes.
        dtype: torch's name without the prefix.
        itemsize: bytes per element.
        identity: the first path of the same parameter in the user's model. Two blocks that hold one identity are tied.
        trainable: whether it wants a gradient.
        lookup: whether rows are picked from it (an embedding) instead of multiplied with it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    identity: str
    trainable: bool = True
    lookup: bool = False

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.numel * self.itemsize


@dataclass(frozen=True)
class Block:
    """The smallest piece that a stage is made of.

    Attributes:
        name: unique in the graph, usually the module's path in the user's model.
        kind: name of the module's class.
        parameters: each parameter once.
        buffer_bytes: bytes of buffers (BatchNorm's statistics, tables).
        forward: seconds of one micro-batch's forward, None while unknown.
        backward: seconds of one micro-batch's backward, None while unknown.
        activation_bytes: bytes that one micro-batch's forward keeps for its backward, None while unknown.
        weight_gradient: seconds of the backward that can be put off: the second half; None while unknown.
    """

    name: str
    kind: str = ""
    parameters: tuple[ParameterSpec, ...] = ()
    buffer_bytes: int = 0
    forward: float | None = None
    backward: float | None = None
    activation_bytes: int | None = None
    weight_gradient: float | None = None

    @cached_property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(p.numel for p in self.parameters)

    @cached_property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(p.nbytes for p in self.parameters)

    @property
    def cost(self) -> float | None:
        """Seconds of one micro-batch, forward and backward; None while unknown."""
        return None if self.forward is None or self.backward is None else self.forward + self.backward


@dataclass(frozen=True)
class Edge:
    """Values that one block hands to another; `INPUT` and `OUTPUT` stand for the outside.

    ``tensors`` is None while the model has not been run on an example.
    """

    source: str
    target: str
    tensors: tuple[TensorSpec, ...] | None = None

    @property
    def nbytes(self) -> int | None:
        """Bytes of one micro-batch on this edge, None while unknown."""
        return None if self.tensors is None else sum(t.nbytes for t in self.tensors)

    def __str__(self) -> str:
        return f"{self.source} -> {self.target}"


@dataclass(frozen=True)
class TiedGroup:
    """One parameter that several blocks use, each under a name of its own."""

    identity: str
    numel: int
    nbytes: int
    blocks: tuple[str, ...]
    names: tuple[str, ...]


@dataclass(frozen=True)
class ModelGraph:
    """Blocks in a topological order, and edges between them, skip edges included.

    Attributes:
        blocks: in the order in which one process runs them.
        edges: every edge runs forward in that order. Edges from `INPUT` and to `OUTPUT` are listed too when they skip
            blocks, that is when another block than the first reads the input or another than the last feeds the output.
        costs: where times come from: ``"none"``, ``"measured"``, ``"given"`` or ``"estimated"`` (then times are only
            comparable with each other).

    Raises:
        GraphError: no block, a name twice, an edge to an unknown block or against the order.
    """

    blocks: tuple[Block, ...]
    edges: tuple[Edge, ...]
    costs: str = "none"

    def __post_init__(self) -> None:
        if not self.blocks:
            raise GraphError("a model graph of 0 blocks; at least one block is needed")
        if len(self.index) != len(self.blocks):
            twice = sorted({b.name for b in self.blocks if [c.name for c in self.blocks].count(b.name) > 1})
            raise GraphError(f"blocks named twice: {', '.join(twice)}; every block needs a name of its own")
        for edge in self.edges:
            source = -1 if edge.source == INPUT else self.index.get(edge.source)
            target = len(self.blocks) if edge.target == OUTPUT else self.index.get(edge.target)
            if source is None or target is None:
                raise GraphError(f"edge {edge} names a block that the graph does not have")
            if source >= target:
                raise GraphError(f"edge {edge} runs against the order of the blocks; give them in topological order")

    @classmethod
    def chain(cls, blocks: Iterable[Block], costs: str = "given") -> ModelGraph:
        """A graph in which each block feeds only the next one, as in ``nn.Sequential``."""
        row = tuple(blocks)
        return cls(row, tuple(Edge(a.name, b.name) for a, b in pairwise(row)), costs)

    @cached_property
    def index(self) -> Mapping[str, int]:
        """Position of each block in `blocks`."""
        return {block.name: i for i, block in enumerate(self.blocks)}

    @cached_property
    def is_chain(self) -> bool:
        """Whether each block feeds the next one and nothing else."""
        want = pairwise(self.blocks)
        return len(self.edges) == len(self.blocks) - 1 and all(
            (e.source, e.target) == (a.name, b.name) for e, (a, b) in zip(self.edges, want, strict=True)
        )

    @cached_property
    def network(self) -> networkx.DiGraph[str]:
        """The same as a frozen networkx graph: nodes carry ``block``, edges carry ``edge``; without the outside."""
        import networkx

        graph: networkx.DiGraph[str] = networkx.DiGraph()
        for block in self.blocks:
            graph.add_node(block.name, block=block)
        for edge in self.edges:
            if edge.source != INPUT and edge.target != OUTPUT:
                graph.add_edge(edge.source, edge.target, edge=edge)
        return networkx.freeze(graph)

    @cached_property
    def tied(self) -> tuple[TiedGroup, ...]:
        """Parameters that more than one block uses, in the order of their first use."""
        members: dict[str, list[tuple[str, ParameterSpec]]] = {}
        for block in self.blocks:
            for spec in block.parameters:
                members.setdefault(spec.identity, []).append((block.name, spec))
        return tuple(
            TiedGroup(
                key, uses[0][1].numel, uses[0][1].nbytes, tuple(b for b, _ in uses), tuple(s.name for _, s in uses)
            )
            for key, uses in members.items()
            if len(uses) > 1
        )

    @cached_property
    def numel(self) -> int:
        """Parameters of the model, tied ones counted once."""
        return sum({p.identity: p.numel for b in self.blocks for p in b.parameters}.values())

    def in_dtype(self, dtype: str, itemsize: int) -> ModelGraph:
        """The same graph with its floating-point parameters in another type.

        Args:
            dtype: torch's name without the prefix.
            itemsize: bytes per element.
        """
        blocks = []
        for block in self.blocks:
            specs = (
                replace(spec, dtype=dtype, itemsize=itemsize) if "float" in spec.dtype else spec
                for spec in block.parameters
            )
            blocks.append(replace(block, parameters=tuple(specs)))
        return replace(self, blocks=tuple(blocks))

    def with_costs(self, forward: Sequence[float], backward: Sequence[float], costs: str = "given") -> ModelGraph:
        """The same graph with other times.

        Args:
            forward: seconds of each block's forward.
            backward: seconds of each block's backward.
            costs: where they come from.

        Raises:
            GraphError: not one time per block.
        """
        if not len(forward) == len(backward) == len(self.blocks):
            raise GraphError(f"{len(forward)} forward and {len(backward)} backward times for {len(self.blocks)} blocks")
        rows = zip(self.blocks, forward, backward, strict=True)
        return replace(self, blocks=tuple(replace(b, forward=f, backward=w) for b, f, w in rows), costs=costs)

    def to_json(self) -> str:
        """The graph as text; `from_json` gives an equal graph back."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ModelGraph:
        """Read what `to_json` wrote.

        Raises:
            GraphError: the text is no graph.
        """
        try:
            data = json.loads(text)
            edges = tuple(Edge(e["source"], e["target"], _tensors(e["tensors"])) for e in data["edges"])
            blocks, costs = tuple(_block(b) for b in data["blocks"]), data["costs"]
        except (ValueError, KeyError, TypeError) as error:
            raise GraphError(
                f"this text is not a model graph ({error!r}); write one with ModelGraph.to_json"
            ) from error
        return cls(blocks, edges, costs)


def _block(data: dict[str, Any]) -> Block:
    parameters = (ParameterSpec(**{**p, "shape": tuple(p["shape"])}) for p in data["parameters"])
    return Block(**{**data, "parameters": tuple(parameters)})


def _tensors(data: list[dict[str, Any]] | None) -> tuple[TensorSpec, ...] | None:
    return None if data is None else tuple(TensorSpec(**{**t, "shape": tuple(t["shape"])}) for t in data)
