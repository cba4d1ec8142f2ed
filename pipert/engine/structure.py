"""Nested values taken apart into tensors and a structure, and put together again on another rank.

The structure is a tree of plain tuples. It compares and hashes exactly (``True`` is not ``1``, ``1`` is not ``1.0``),
and goes through JSON; nothing is ever pickled. A tensor that occurs twice has the same index twice, so that the
receiver gets one object twice, as it would in one process. Its nodes::

    ("tensor", 0)                       the tensor with this index
    ("none",) ("bool", True) ("int", 3) ("float", "0x1.8p+0") ("str", "x") ("dtype", "float32")
    ("tuple", child, …) ("list", child, …) ("dict", (key, child), …)
    ("namedtuple", "module:Class", child, …)
    ("dataclass", "module:Class", ("field", child), …)
    ("registered", "collections.OrderedDict", context, child, …)    other containers that torch's pytree knows
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pipert.errors import BoundaryError

Structure = tuple[Any, ...]

_PLAIN: dict[type, Callable[[Any], Structure]] = {
    type(None): lambda value: ("none",),
    bool: lambda value: ("bool", value),
    int: lambda value: ("int", value),
    float: lambda value: ("float", value.hex()),
    str: lambda value: ("str", value),
    torch.dtype: lambda value: ("dtype", str(value).removeprefix("torch.")),
}


def flatten(value: object) -> tuple[list[torch.Tensor], Structure]:
    """Take a value apart.

    Returns:
        its tensors, each object once, in the order in which they occur; and its structure.

    Raises:
        BoundaryError: a leaf is neither a tensor nor plain data, or a class could not be found again by its name.
    """
    if isinstance(value, torch.Tensor):  # by far the most frequent
        return [value], ("tensor", 0)
    taker = _Taker()
    structure = taker.take(value)
    return taker.tensors, structure


class _Taker:
    """Walks over a value and collects its tensors."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.index: dict[int, int] = {}

    def take(self, value: Any) -> Structure:
        if isinstance(value, torch.Tensor):
            index = self.index.setdefault(id(value), len(self.tensors))
            if index == len(self.tensors):
                self.tensors.append(value)
            return ("tensor", index)
        kind = type(value)
        if kind in _PLAIN:
            return _PLAIN[kind](value)
        if kind is tuple:
            return ("tuple", *map(self.take, value))
        if kind is list:
            return ("list", *map(self.take, value))
        if kind is dict:
            return ("dict", *((_PLAIN[type(key)](key), self.take(child)) for key, child in self.checked(value).items()))
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return ("namedtuple", _address(kind), *map(self.take, value))
        if kind in pytree.SUPPORTED_NODES:
            return self.take_registered(value, kind)
        if dataclasses.is_dataclass(value):
            fields = ((field.name, self.take(getattr(value, field.name))) for field in dataclasses.fields(value))
            return ("dataclass", _address(kind), *fields)
        raise BoundaryError(
            f"a {kind.__module__}.{kind.__qualname__} cannot cross a stage boundary; pass tensors and plain data (int, "
            "float, str, bool, None) in tuples, lists, dicts, named tuples or dataclasses, or register the class with "
            "torch.utils._pytree under a serialized_type_name"
        )

    def checked(self, value: dict[Any, Any]) -> dict[Any, Any]:
        for key in value:
            if type(key) not in _PLAIN:
                raise BoundaryError(f"the dict key {key!r} cannot cross a stage boundary; use str or int keys")
        return value

    def take_registered(self, value: Any, kind: type) -> Structure:
        serial = pytree.SUPPORTED_SERIALIZED_TYPES.get(kind)
        name = serial.serialized_type_name if serial else ""
        if serial is None or pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE.get(name) is not kind:
            raise BoundaryError(
                f"{kind.__qualname__} is registered with torch.utils._pytree without a name, so the next stage could "
                "not build it; give its registration a serialized_type_name"
            )
        children, context = pytree.SUPPORTED_NODES[kind].flatten_fn(value)
        dump = serial.to_dumpable_context or json.dumps
        return ("registered", name, dump(context), *map(self.take, children))


def unflatten(structure: Structure, tensors: Sequence[torch.Tensor]) -> Any:
    """Put a value together again: the inverse of `flatten`."""
    kind, *rest = structure
    if kind == "tensor":
        return tensors[rest[0]]
    if kind in _MAKERS:
        return _MAKERS[kind](*rest)
    if kind == "tuple":
        return tuple([unflatten(child, tensors) for child in rest])
    if kind == "list":
        return [unflatten(child, tensors) for child in rest]
    if kind == "dict":
        return {unflatten(key, ()): unflatten(child, tensors) for key, child in rest}
    if kind == "namedtuple":
        return _find(rest[0])._make([unflatten(child, tensors) for child in rest[1:]])
    if kind == "dataclass":
        return _make_dataclass(_find(rest[0]), {name: unflatten(child, tensors) for name, child in rest[1:]})
    return _make_registered(rest[0], rest[1], [unflatten(child, tensors) for child in rest[2:]])


_MAKERS: dict[str, Callable[..., Any]] = {
    "none": lambda: None,
    "bool": bool,
    "int": int,
    "float": float.fromhex,
    "str": str,
    "dtype": lambda name: getattr(torch, name),
}


def _make_dataclass(kind: type[Any], values: dict[str, Any]) -> Any:
    """A copy of the sender's object: its fields, without running ``__post_init__`` a second time."""
    made = object.__new__(kind)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


def _make_registered(name: str, context: str, children: list[Any]) -> Any:
    kind = pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE.get(name)
    if kind is None:
        raise BoundaryError(f"{name} is registered with torch.utils._pytree on another rank only; register it on all")
    serial = pytree.SUPPORTED_SERIALIZED_TYPES[kind]
    load = serial.from_dumpable_context or json.loads
    return pytree.SUPPORTED_NODES[kind].unflatten_fn(children, load(context))


def _address(kind: type) -> str:
    """Where another rank finds the class."""
    address = f"{kind.__module__}:{kind.__qualname__}"
    try:
        found = _find(address)
    except (AttributeError, ImportError):
        found = None
    if found is not kind:
        raise BoundaryError(
            f"the class {kind.__module__}.{kind.__qualname__} cannot cross a stage boundary, because other ranks could "
            "not find it by this name; define it at the top level of a module"
        )
    return address


def _find(address: str) -> Any:
    module, _, path = address.partition(":")
    found: Any = import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return found


def freeze(node: Any) -> Any:
    """JSON's lists as the tuples they were."""
    return tuple(map(freeze, node)) if isinstance(node, list) else node
