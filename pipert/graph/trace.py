"""nn.Module -> graph of blocks, and the blocks as callables."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from pipert.errors import GraphError
from pipert.graph.model_graph import INPUT, OUTPUT, Block, Edge, ModelGraph, ParameterSpec, TensorSpec
from pipert.graph.stage import StageBlock, TracedModel, Wiring, call_arguments
from pipert.graph.symbolic import HOOKS, REMEDY, record
from pipert.graph.wiring import split


def trace(model: nn.Module, example: object = None) -> TracedModel:
    """Find the blocks of a model and how values run between them. Runs nothing and changes nothing.

    * a module with a method ``blocks()`` returning ``[(name, module), ...]``: those, one after another;
    * an ``nn.Sequential``: its children, one after another;
    * any other module is recorded with torch.fx; blocks are the children of its ``nn.ModuleList`` and every other
      submodule that ``forward`` calls. What is computed between them becomes part of a block; skip edges become edges.

    Args:
        model: parameters may be on ``meta``.
        example: an input like the ones to come (a tuple is ``*args``, a dict ``**kwargs``). Only its structure is read,
            and only by the last form: without it, arguments of ``forward`` that have defaults keep them.

    Raises:
        GraphError: there are no blocks, the forward cannot be recorded, a parameter belongs to no block, or there are
            hooks on a module that never runs as a whole.
    """
    if not isinstance(model, nn.Module):
        raise GraphError(f"the model is a {type(model).__name__}, not an nn.Module; {REMEDY}")
    if isinstance(model, torch.jit.ScriptModule) or "_orig_mod" in model._modules:  # the latter by torch.compile
        raise GraphError("the model is compiled as a whole; give the model itself, and compile its blocks if you like")
    listed = _listed_blocks(model)
    _refuse_lost_hooks(model, {""} if listed is not None else _opened(model))
    if listed is not None:
        blocks, wiring = [_chain_block(model, name, module) for name, module in listed], None
    else:
        blocks, wiring = _record_blocks(model, example)
    _check_parameters(model, blocks)
    identities = {id(p): name for name, p in model.named_parameters()}
    nodes = tuple(_describe(block, identities) for block in blocks)
    if wiring is None:
        graph = ModelGraph.chain(nodes, costs="none")
    else:
        graph = ModelGraph(nodes, tuple(_edges([b.name for b in blocks], wiring)))
    return TracedModel(model, graph, {block.name: block for block in blocks}, wiring)


def tensor_specs(value: object) -> tuple[TensorSpec, ...]:
    """Specs of the tensors in a value of any nesting, in pytree order."""
    from torch.utils._pytree import tree_leaves

    return tuple(
        TensorSpec(tuple(t.shape), str(t.dtype).removeprefix("torch."), t.element_size(), t.requires_grad)
        for t in tree_leaves(value)
        if isinstance(t, torch.Tensor)
    )


def _listed_blocks(model: nn.Module) -> list[tuple[str, nn.Module]] | None:
    """The chain that the model itself names; None when it names none."""
    method = getattr(model, "blocks", None)
    if callable(method) and not isinstance(method, nn.Module):
        listed: Any = method()
        rows = list(listed) if isinstance(listed, Iterable) else [listed]
        if not all(isinstance(r, tuple) and len(r) == 2 and isinstance(r[1], nn.Module) for r in rows):
            raise GraphError(f"{type(model).__name__}.blocks() must return [(name, module), ...], not {listed!r:.80}")
    elif isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward:
        rows = [(name, child) for name, child in model._modules.items() if child is not None]
    else:
        return None
    if not rows:
        raise GraphError(f"{type(model).__name__} has no blocks; at least one is needed")
    return [(str(name), module) for name, module in rows]


def _record_blocks(model: nn.Module, example: object) -> tuple[list[StageBlock], Wiring]:
    if type(model).forward is nn.Module.forward or isinstance(model, (nn.ModuleList, nn.ModuleDict)):
        raise GraphError(f"{type(model).__name__} has no forward, so the order of its blocks is unknown; {REMEDY}")
    signature = inspect.signature(model.forward)
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if example is not None:
        arguments = list(call_arguments(signature, example))
    else:
        arguments = [n for n, a in signature.parameters.items() if a.default is a.empty and a.kind not in variable]
    if any(signature.parameters[a].kind in variable for a in arguments):
        raise GraphError(f"forward{signature} is called with values for * or ** arguments; {REMEDY}")
    opened = _opened(model)
    graph, constants = record(model, lambda path: path not in opened, arguments)
    return split(model, graph, constants, arguments, signature)


def _opened(model: nn.Module) -> set[str]:
    """Paths of the modules whose forward is recorded instead of kept whole: lists of blocks and all that hold them.

    Without any ModuleList, the Sequential children of the model are opened, so that they can be cut.
    """
    lists: list[str] = []
    for path, module in model.named_modules():
        inside_a_block = any(path.startswith(f"{other}.") for other in lists)
        if isinstance(module, nn.ModuleList) and not inside_a_block:
            lists.append(path)
    if not lists:
        lists = [name for name, child in model.named_children() if isinstance(child, nn.Sequential)]
    namespaces = [path for path, module in model.named_modules() if isinstance(module, nn.ModuleDict)]
    parts = [path.split(".") for path in lists]
    return {"", *namespaces, *(".".join(part[:i]) for part in parts for i in range(1, len(part) + 1))}


def _chain_block(model: nn.Module, name: str, module: nn.Module) -> StageBlock:
    """A listed block. Where its name is not its path in the model, its tensors are looked up in the model."""
    try:
        if model.get_submodule(name) is module:
            return StageBlock(name, module, f"{name}.")
    except AttributeError:
        pass
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    paths = {id(t): path for path, t in reversed(tensors)}
    own = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return StageBlock(name, module, f"{name}.", {local: paths[id(t)] for local, t in own if id(t) in paths})


def _describe(block: StageBlock, identities: dict[int, str]) -> Block:
    module = block.module
    parts = dict(module.named_modules(remove_duplicate=False))
    parameters = []
    for local, p in module.named_parameters():
        owner = parts[local.rpartition(".")[0]]
        lookup = isinstance(owner, (nn.Embedding, nn.EmbeddingBag)) or "Embedding" in type(owner).__name__
        dtype, name = str(p.dtype).removeprefix("torch."), block.path(local)
        parameters.append(
            ParameterSpec(name, tuple(p.shape), dtype, p.element_size(), identities[id(p)], p.requires_grad, lookup)
        )
    buffers = sum(b.numel() * b.element_size() for b in module.buffers())
    return Block(block.name, type(module).__name__, tuple(parameters), buffers)


def _edges(names: list[str], wiring: Wiring) -> Iterable[Edge]:
    """An edge wherever a block reads a value of another, or of the input; and to the output."""
    maker = dict.fromkeys(wiring.inputs, INPUT)
    for i, name in enumerate(names):
        wire = wiring.wires[name]
        for source in dict.fromkeys(maker[value] for value in wire.reads):
            if source != INPUT or i:
                yield Edge(source, name)
        maker.update((value, name) for value in wire.writes)
    for source in dict.fromkeys(maker[value] for value in wiring.outputs):
        if source != names[-1]:
            yield Edge(source, OUTPUT)


def _refuse_lost_hooks(model: nn.Module, opened: set[str]) -> None:
    """Modules that are cut are never called, so their hooks would silently not run; those on blocks do."""
    for path, module in model.named_modules():
        hooks = [name for name in HOOKS if path in opened and getattr(module, name, None)]
        if hooks:
            what = f"its module {path}" if path else "the model itself"
            kind = hooks[0].strip("_").replace("_", " ")
            raise GraphError(
                f"{type(model).__name__}: {what} has {kind}, which would not run: blocks are called one by one; "
                "register them on blocks, or remove them"
            )


def _check_parameters(model: nn.Module, blocks: list[StageBlock]) -> None:
    """Every parameter of the model has a shape and is in some block, and the other way round."""
    lazy = [name for name, p in model.named_parameters() if isinstance(p, nn.UninitializedParameter)]
    if lazy:
        raise GraphError(f"parameters without a shape yet: {', '.join(lazy[:5])}; run lazy modules once on an example")
    owned = {id(p) for block in blocks for p in block.module.parameters()}
    whole = {id(p) for p in model.parameters()}
    lost = [name for name, p in model.named_parameters() if id(p) not in owned]
    if lost:
        raise GraphError(
            f"{len(lost)} parameters belong to no block: {', '.join(lost[:5])}; use them in the forward or remove them"
        )
    strange = [b.path(n) for b in blocks for n, p in b.module.named_parameters() if id(p) not in whole]
    if strange:
        raise GraphError(
            f"blocks hold parameters that the model does not: {', '.join(strange[:5])}; register them in it"
        )
