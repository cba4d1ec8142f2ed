"""Record a module's ``forward`` as a torch.fx graph in which chosen submodules stay whole.

torch.fx's own tracer patches ``nn.Module.__call__`` for the whole process while it traces, which breaks other threads
that run modules meanwhile (ranks may be threads). Here ``forward`` runs on a *shadow* instead: shallow copies of the
modules, in which whole submodules record a call and parameters are stand-ins. The user's modules are neither changed
nor run.
"""

from __future__ import annotations

import dis
import inspect
import operator
import os
import sys
import traceback
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.fx.proxy import GraphAppendingTracer, Proxy, TraceError
from torch.utils._python_dispatch import TorchDispatchMode

from pipert.errors import GraphError

REMEDY = (
    "make the model an nn.Sequential, or give it a method blocks() that returns [(name, module), ...] to run in turn"
)

_ASSERTS = ("LOAD_ASSERTION_ERROR", "LOAD_COMMON_CONSTANT")  # the second from Python 3.14 on
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Value(Proxy):
    """A value that is not there yet; in-place operators are recorded as such."""

    def _in_place(self, function: Callable[..., Any], other: Any) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    def __iadd__(self, other: Any) -> Any:
        return self._in_place(operator.iadd, other)

    def __isub__(self, other: Any) -> Any:
        return self._in_place(operator.isub, other)

    def __imul__(self, other: Any) -> Any:
        return self._in_place(operator.imul, other)

    def __itruediv__(self, other: Any) -> Any:
        return self._in_place(operator.itruediv, other)


class _NoDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves its hooks for subclasses untyped
    """Refuses operations on tensors that draw random numbers; in this thread only."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise TraceError("random numbers drawn outside blocks would be the same in every step")
        return func(*args, **(kwargs or {}))


class Recorder(GraphAppendingTracer):
    """Collects the nodes. Knows which tensors belong to the model and refuses what would be recorded wrongly."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(fx.Graph())
        self.paths = {id(t): n for n, t in [*model.named_parameters(), *model.named_buffers()]}
        self.constants: dict[str, torch.Tensor] = {}
        self.mode = _grad_mode()

    def proxy(self, node: fx.Node) -> Proxy:
        """Stand for the value of a node."""
        return Value(node, self)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Record a node; refuse one under no_grad or autocast, which the graph would forget."""
        if _grad_mode() != self.mode:
            raise TraceError("no_grad or autocast around blocks would be lost")
        return super().create_node(*args, **kwargs)

    def create_arg(self, a: Any) -> Any:
        """Turn an argument into what a node may hold; tensors become attributes."""
        if not isinstance(a, torch.Tensor):
            return super().create_arg(a)
        path = self.paths.get(id(a))
        if path is None:
            if a.requires_grad:
                raise TraceError("a tensor computed from parameters alone would be frozen at its present value")
            path = f"_constant{len(self.constants)}"
            self.constants[path] = a
        return self.create_node("get_attr", path, (), {})

    def to_bool(self, obj: Proxy) -> bool:
        """Record an ``assert`` to be checked at run time; refuse every other branch on a value."""
        frame = inspect.currentframe()
        while frame is not None and frame.f_globals.get("__name__", "").startswith(("torch.fx", __name__)):
            frame = frame.f_back
        if frame is not None and _in_assert(frame.f_code, frame.f_lasti):
            text = f"assert in {frame.f_code.co_filename}:{frame.f_lineno} failed"
            self.create_node("call_function", torch._assert, (obj.node, text), {})
            return True
        raise TraceError("a branch or loop depends on the value or shape of a tensor")


class _Attributes(dict[str, Any]):
    """A module's parameters or buffers, handed out as stand-ins."""

    def __init__(self, tensors: Mapping[str, Any], path: str, recorder: Recorder) -> None:
        super().__init__(tensors)
        self.path = path
        self.recorder = recorder

    def __getitem__(self, name: str) -> Any:
        tensor = super().__getitem__(name)
        return None if tensor is None else self.recorder.create_proxy("get_attr", _join(self.path, name), (), {})


def record(model: nn.Module, whole: Callable[[str], bool], arguments: Sequence[str]) -> tuple[fx.Graph, dict[str, Any]]:
    """Record ``model.forward`` called with the named arguments only; the others keep their defaults.

    Args:
        model: the module; it is not run and not changed.
        whole: tells for a submodule's path whether it is recorded as one call.
        arguments: names of ``forward``'s arguments that will be given.

    Returns:
        The graph, and the constant tensors that its ``_constant*`` attributes name.

    Raises:
        GraphError: the forward cannot be recorded faithfully; says why, where, and what to do instead.
    """
    train, constants = _record(model, whole, arguments, training=True)
    evaluate, _ = _record(model, whole, arguments, training=False)
    if _text(train) != _text(evaluate):
        raise GraphError(
            f"{type(model).__name__}.forward differs between training and evaluation outside its blocks; move what "
            "depends on self.training into a module (nn.Dropout instead of F.dropout)"
        )
    return train, constants


def _record(
    model: nn.Module, whole: Callable[[str], bool], arguments: Sequence[str], training: bool
) -> tuple[fx.Graph, dict[str, Any]]:
    recorder = Recorder(model)
    shadow = _shadow(model, "", whole, recorder, training, {})
    states = [(m, dict(m.__dict__)) for m in shadow.modules()]
    try:
        bound = inspect.signature(model.forward).bind_partial()
        bound.arguments = OrderedDict((a, recorder.create_proxy("placeholder", a, (), {})) for a in arguments)
        with _NoDraws():  # type: ignore[no-untyped-call]
            result = shadow.forward(*bound.args, **bound.kwargs)
        recorder.create_node("output", "output", (recorder.create_arg(result),), {})
    except GraphError:
        raise
    except Exception as error:
        raise GraphError(
            f"{type(model).__name__}.forward cannot be traced{_where(error)}: {error}; {REMEDY}"
        ) from error
    changed = [k for m, state in states for k, v in m.__dict__.items() if k not in state or state[k] is not v]
    if changed:
        raise GraphError(f"{type(model).__name__}.forward assigns self.{changed[0]}, which a pipeline loses; {REMEDY}")
    return recorder.graph, dict(recorder.constants)


def _shadow(
    module: nn.Module,
    path: str,
    whole: Callable[[str], bool],
    recorder: Recorder,
    training: bool,
    done: dict[int, nn.Module],
    inside: bool = False,
) -> nn.Module:
    """A copy of the module tree that records instead of computing."""
    if id(module) in done:
        return done[id(module)]
    twin: nn.Module = module.__new__(type(module))
    done[id(module)] = twin
    inside = inside or whole(path)
    twin.__dict__.update(module.__dict__)
    twin.__dict__.update({name: OrderedDict() for name in HOOKS if name in module.__dict__})
    twin.__dict__["training"] = training
    twin.__dict__["_parameters"] = _Attributes(module._parameters, path, recorder)
    twin.__dict__["_buffers"] = _Attributes(module._buffers, path, recorder)
    twin.__dict__["_modules"] = {
        name: None if child is None else _shadow(child, _join(path, name), whole, recorder, training, done, inside)
        for name, child in module._modules.items()
    }
    if inside:
        twin.__dict__["forward"] = lambda *a, **k: recorder.create_proxy("call_module", path, a, k)
    return twin


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _grad_mode() -> tuple[bool, ...]:
    return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")


def _text(graph: fx.Graph) -> str:
    return "\n".join(f"{n.name} {n.op} {n.target} {n.args} {n.kwargs}" for n in graph.nodes)


def _in_assert(code: Any, position: int) -> bool:
    """Whether the jump at ``position`` skips the raise of an ``assert``."""
    rows = list(dis.get_instructions(code))
    names = [row.opname for row in rows if row.offset >= position and row.opname != "TO_BOOL"][:2]
    return len(names) == 2 and "JUMP" in names[0] and "IF_TRUE" in names[0] and names[1] in _ASSERTS


def _where(error: BaseException) -> str:
    """`` (file.py:12)``: the last line of the user's own code on the way to the error."""
    inner = (os.path.dirname(torch.__file__), os.path.dirname(__file__), sys.prefix + "/lib/python")
    rows = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(inner)]
    return f" ({rows[-1].filename}:{rows[-1].lineno}, `{rows[-1].line}`)" if rows else ""
