"""Split a recorded graph into blocks: each whole submodule, and with it some of the loose operations around it."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from pipert.errors import GraphError
from pipert.graph.stage import Slot, StageBlock, Wire, Wiring

_IN_PLACE: tuple[Callable[..., Any], ...] = (operator.iadd, operator.isub, operator.imul, operator.itruediv)


def split(
    model: nn.Module,
    graph: fx.Graph,
    constants: Mapping[str, torch.Tensor],
    arguments: Sequence[str],
    signature: inspect.Signature,
) -> tuple[list[StageBlock], Wiring]:
    """Make blocks that can be run one after another, and the wiring between them.

    Args:
        model: the recorded module.
        graph: its nodes (see `symbolic.record`).
        constants: tensors that the graph names and the model does not hold.
        arguments: the arguments it was recorded with.
        signature: the signature of its forward.

    Raises:
        GraphError: no submodule is called, a parameter is returned, or a value is changed in place under one name and
            read under another.
    """
    calls = [node for node in graph.nodes if node.op == "call_module"]
    if not calls:
        raise GraphError(f"{type(model).__name__}.forward calls no submodule; there is nothing to cut into stages")
    result = next(node for node in graph.nodes if node.op == "output")
    bare = [str(node.target) for node in result.all_input_nodes if node.op == "get_attr"]
    if bare:
        raise GraphError(f"{type(model).__name__}.forward returns {bare[0]} itself; return what a block makes of it")
    _refuse_stale_names(graph)
    owners = _owners(graph, calls)
    names = _names(calls)
    blocks, wires = [], {}
    for place, (name, call) in enumerate(zip(names, calls, strict=True)):
        inside = [node for node in graph.nodes if owners.get(node) == place]
        wire, part = _part(inside)
        wires[name] = wire
        root = _attributes(model, constants, part)
        kind = type(_member(model, str(call.target))).__name__
        blocks.append(StageBlock(name, fx.GraphModule(root, part, kind), prefix=""))
    inputs = tuple(node.name for node in graph.nodes if node.op == "placeholder")
    outputs = tuple(node.name for node in result.all_input_nodes)
    template = _template(result.args[0])
    return blocks, Wiring(wires, inputs, tuple(arguments), signature, outputs, template)


def _owners(graph: fx.Graph, calls: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """Which block computes each node; -1 for the model's inputs. Attributes have no owner: every block has its own.

    A loose operation (a residual, a sum with a skip edge) joins the block that made its inputs where that brings no new
    value into that block; otherwise the first block that needs it, as does one without inputs (a table scaled by a
    number). Where something changes in place, order matters and each joins the block called last before it.
    """
    place = {call: i for i, call in enumerate(calls)}
    needed = _first_need(graph, place)
    ordered = any(_changes(node) for node in graph.nodes)
    owners: dict[fx.Node, int] = {}
    entering = [set(call.all_input_nodes) for call in calls]
    latest = 0
    for node in graph.nodes:
        if node.op in ("get_attr", "output"):
            continue
        if node.op == "placeholder":
            owners[node] = -1
            continue
        sources = [s for s in node.all_input_nodes if s.op != "get_attr"]
        producer = max([0, *(owners[s] for s in sources)])  # the first block may use the model's inputs
        brings_nothing = all(owners[s] == producer or s in entering[producer] for s in sources)
        if node in place:
            owner = latest = place[node]
        elif ordered:
            owner = latest
        elif not sources:
            owner = needed.get(node, len(calls) - 1)
        elif node not in needed or brings_nothing:
            owner = producer
        else:
            owner = needed[node]
        owners[node] = owner
        entering[owner].update(s for s in sources if owners[s] != owner)
    return owners


def _first_need(graph: fx.Graph, place: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
    """The first block that depends on each node; nodes that only the output depends on are missing."""
    needed = dict(place)
    for node in reversed(graph.nodes):
        if node not in place:
            users = [needed[user] for user in node.users if user in needed]
            if users:
                needed[node] = min(users)
    return needed


def _part(nodes: Sequence[fx.Node]) -> tuple[Wire, fx.Graph]:
    """The nodes of one block as a graph of its own: the values it reads in, a tuple of those that others need out."""
    inside = set(nodes)
    sources = [s for node in nodes for s in node.all_input_nodes if s not in inside]
    reads = list(dict.fromkeys(s for s in sources if s.op != "get_attr"))
    writes = [node for node in nodes if any(user not in inside for user in node.users)]
    part = fx.Graph()
    copies = {node: part.placeholder(node.name) for node in reads}
    for node in dict.fromkeys(s for s in sources if s.op == "get_attr"):
        copies[node] = part.node_copy(node)
    for node in nodes:
        copies[node] = part.node_copy(node, lambda n: copies[n])
    part.output(tuple(copies[node] for node in writes))
    return Wire(tuple(n.name for n in reads), tuple(n.name for n in writes)), part


def _attributes(model: nn.Module, constants: Mapping[str, torch.Tensor], part: fx.Graph) -> dict[str, Any]:
    """The modules and tensors that a graph names, by path: the user's own objects."""
    paths = [str(node.target) for node in part.nodes if node.op in ("call_module", "get_attr")]
    return {path: constants[path] if path in constants else _member(model, path) for path in paths}


def _member(model: nn.Module, path: str) -> Any:
    """The submodule, parameter or buffer at a path, even where a method of the same name hides it."""
    found: Any = model
    for name in path.split("."):
        found = next(m[name] for m in (found._modules, found._parameters, found._buffers) if name in m)
    return found


def _names(calls: Sequence[fx.Node]) -> list[str]:
    """The path of each called submodule; later calls of the same one get ``#2``, ``#3``."""
    count: dict[str, int] = {}
    names = []
    for call in calls:
        path = str(call.target)
        count[path] = count.get(path, 0) + 1
        names.append(path if count[path] == 1 else f"{path}#{count[path]}")
    return names


def _changes(node: fx.Node) -> bool:
    """Whether a node changes its first input in place."""
    if node.op == "call_method":
        return str(node.target).endswith("_") and not str(node.target).endswith("__")
    return node.op == "call_function" and (node.target in _IN_PLACE or bool(node.kwargs.get("inplace")))


def _refuse_stale_names(graph: fx.Graph) -> None:
    """Two names of one changed tensor may end up in different stages, where the change would not show."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in filter(_changes, graph.nodes):
        old = node.all_input_nodes[0] if node.all_input_nodes else None
        late = [] if old is None or not node.users else [user for user in old.users if order[user] > order[node]]
        if late:
            raise GraphError(
                f"`{node.target}` changes {old} in place and {late[0].name} uses the old name afterwards; "
                "write x = x + y instead of x += y"
            )


def _template(argument: object) -> object:
    """The output's structure in plain containers, with a slot per value."""
    if isinstance(argument, fx.Node):
        return Slot(argument.name)
    if isinstance(argument, dict):
        return {key: _template(item) for key, item in argument.items()}
    if isinstance(argument, tuple) and hasattr(argument, "_fields"):
        rebuild: Callable[..., object] = type(argument)
        return rebuild(*(_template(item) for item in argument))
    if isinstance(argument, tuple):
        return tuple(_template(item) for item in argument)
    if isinstance(argument, list):
        return [_template(item) for item in argument]
    return argument
