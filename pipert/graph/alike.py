"""Which blocks are built alike, so that measuring one of them is enough."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import fx, nn


def alike(modules: Mapping[str, nn.Module]) -> dict[str, object]:
    """A key for each module; modules with equal keys differ in nothing that matters for cost.

    Equal are: classes, the text that ``repr`` shows of the modules (the block's own path in it apart), shapes, dtypes
    and trainability of parameters and buffers, which of them are one tensor, and the plain numbers among all
    attributes. A whole number that takes another value in every block of a kind is the block's index and does not
    count; a window size that alternates does.
    """
    groups: dict[object, list[str]] = defaultdict(list)
    for name, module in modules.items():
        groups[_build(name, module)].append(name)
    keys: dict[str, object] = {}
    for build, names in groups.items():
        numbers = {name: _numbers(modules[name]) for name in names}
        paths = {path for found in numbers.values() for path in found}
        settings = [p for p in sorted(paths) if not _is_index([numbers[name].get(p) for name in names])]
        keys.update({name: (build, tuple(numbers[name].get(p) for p in settings)) for name in names})
    return keys


def _build(name: str, module: nn.Module) -> object:
    inner = module
    code: object = None
    if isinstance(module, fx.GraphModule):
        inner, code = nn.ModuleList(_called(module)), _steps(module.graph)
    first: dict[int, int] = {}
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    shapes = tuple(
        (first.setdefault(id(t), i), tuple(t.shape), t.dtype, t.requires_grad) for i, (_, t) in enumerate(tensors)
    )
    classes = tuple(type(m) for m in inner.modules())
    text = re.sub(rf"(?<![\w.]){re.escape(name)}\.", "", repr(inner))
    return classes, text, shapes, code


def _called(module: fx.GraphModule) -> list[nn.Module]:
    return [module.get_submodule(str(n.target)) for n in module.graph.nodes if n.op == "call_module"]


def _steps(graph: fx.Graph) -> tuple[str, ...]:
    """The nodes with their names replaced by their positions."""
    place = {node: f"%{i}" for i, node in enumerate(graph.nodes)}
    named = ("call_module", "get_attr", "placeholder")
    return tuple(
        f"{node.op} {'' if node.op in named else node.target} {fx.node.map_arg(node.args, lambda n: place[n])} "
        f"{fx.node.map_arg(node.kwargs, lambda n: place[n])}"
        for node in graph.nodes
    )


def _numbers(module: nn.Module) -> dict[str, float]:
    """Plain numbers among the attributes of a module and the modules in it."""
    inner = nn.ModuleList(_called(module)) if isinstance(module, fx.GraphModule) else module
    return {
        f"{path}.{key}": value
        for path, part in inner.named_modules()
        for key, value in part.__dict__.items()
        if isinstance(value, (bool, int, float)) and not isinstance(value, torch.SymInt)
    }


def _is_index(values: list[float | None]) -> bool:
    return len(values) > 2 and all(type(v) is int for v in values) and len(set(values)) == len(values)
