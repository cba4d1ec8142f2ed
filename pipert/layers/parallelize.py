"""Turn a model into one rank's part of it: pipert's GPT by itself, any other by a plan.

parallelize(model, mesh, plan={
    "layers.*.attention.[qkv]": Split("column", units=32),     # by heads
    "layers.*.attention.o": "row",
    "layers.*.up": "column",
    "layers.*.down": "row",
    "embed": "vocab",
    "lm_head": "vocab",
})
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, Protocol, get_args, runtime_checkable

import torch
from torch import nn

from pipert.comm.mesh import Mesh
from pipert.comm.transport import Transport
from pipert.errors import ConfigError
from pipert.layers.dropout import Dropout, Part
from pipert.layers.parallel_linear import ColumnParallelLinear, RowParallelLinear
from pipert.layers.shard import Tied
from pipert.layers.vocabulary import VocabParallelEmbedding, VocabParallelHead

Kind = Literal["column", "row", "vocab", "replicated"]
_DONE = "_pipert_parallel"


@runtime_checkable
class SharesOut(Protocol):
    """A model that knows how to become a rank's part of itself, such as pipert's GPT."""

    def check_tensor_parallel(self, ranks: int, *, sequence_parallel: bool = False) -> None:
        """Refuse a number of ranks that cannot share it."""
        ...

    def share_out(self, group: Transport, *, sequence_dim: int | None = None, overlap: bool = True) -> None:
        """Become this rank's part, in place."""
        ...


@dataclass(frozen=True)
class Split:
    """How a module of a plan is split. A plain string is a `Split` of that kind.

    Attributes:
        kind: ``column``: a linear layer's output features; ``row``: its input features; ``vocab``: the ids of an
            embedding, or of a head without bias, whose logits are gathered; ``replicated``: every rank has the whole
            module and computes the same.
        units: between which of the features may be cut: the number of heads, say. A column layer of fewer units than
            ranks has each unit on several ranks.
        pieces: (features, units) of each part of a fused column layer, such as query, key and value.
        whole: a column layer gives all features, a row layer takes all of them, instead of the rank's own.
        dim: for dropout between a column and a row layer (``column``): the dimension of the features in its input, of
            which each rank draws its part of the mask. Dropout elsewhere is ``replicated``: all ranks draw the same.
    """

    kind: Kind
    units: int | None = None
    pieces: tuple[tuple[int, int], ...] = ()
    whole: bool = False
    dim: int = 2

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ConfigError(f"a plan says {self.kind!r}, which is none of {', '.join(get_args(Kind))}")


Plan = Mapping[str, Split | Kind]


def parallelize(
    model: nn.Module,
    mesh: Mesh,
    *,
    sequence_parallel: bool = False,
    plan: Plan | None = None,
    overlap: bool = True,
) -> nn.Module:
    """Make a model this rank's part of it, in place, before `pipert.Pipeline` gets it. The same call on every rank.

    Best on the meta device, where nothing is allocated. Weights that are there already are those of the first
    tensor-parallel rank, of which every rank keeps its part.

    Args:
        model: pipert's GPT, or another one with a plan; every rank has its own.
        mesh: its ``tp_group`` shares the model.
        sequence_parallel: for pipert's GPT: what runs between the layers is shared out by positions, too.
        plan: for other models: how to split the modules whose path matches a pattern (`fnmatch`'s). What no pattern
            matches is replicated: every rank computes it alike. Of dropout layers the plan must say what they are.
        overlap: whether communication and computation overlap in the backward. The numbers are bitwise the same.

    Returns:
        the model.

    Raises:
        ConfigError: the model cannot be shared out so, and is as it was.
    """
    group = mesh.tp_group
    if plan is None:
        if not isinstance(model, SharesOut):
            raise ConfigError(
                f"{type(model).__name__} does not know how to share itself out among tp = {group.size} ranks; give "
                'parallelize(model, mesh, plan={"blocks.*.up": "column", "blocks.*.down": "row"})'
            )
        model.check_tensor_parallel(group.size, sequence_parallel=sequence_parallel)
        work = [lambda: model.share_out(group, sequence_dim=1 if sequence_parallel else None, overlap=overlap)]
    else:
        if sequence_parallel:
            raise ConfigError(
                "a plan says how to split layers, not where activations are shared out by positions; give the layers "
                "a sequence_dim in the model itself, or leave out sequence_parallel"
            )
        work = list(_conversions(model, group, plan, overlap))
    if group.size == 1:
        return model
    if model.__dict__.setdefault(_DONE, work) is not work:  # at once: ranks that are threads may share a model
        raise ConfigError("the model is a rank's part already; give every rank a whole model of its own, once")
    _make_equal(model.parameters(), group)
    for convert in work:
        convert()
    return model


def is_parallel(model: nn.Module) -> bool:
    """Whether `parallelize` was called on the model."""
    return hasattr(model, _DONE)


@torch.no_grad()
def _make_equal(parameters: Iterable[nn.Parameter], group: Transport) -> None:
    """Weights that are there already are those of the first rank."""
    for parameter in parameters:
        if not parameter.is_meta:
            memory = parameter.detach().contiguous()
            group.wait(group.ibroadcast(memory, 0), "the first broadcast of the weights", 0)
            if memory.data_ptr() != parameter.data_ptr():
                parameter.copy_(memory)


def _conversions(model: nn.Module, group: Transport, plan: Plan, overlap: bool) -> Iterable[Callable[[], None]]:
    """What is to be done; whatever cannot be is refused here."""
    used: set[str] = set()
    tied: Tied = {}
    for path, module in list(model.named_modules()):
        pattern = next((pattern for pattern in plan if fnmatchcase(path, pattern)), None)
        if pattern is None:
            if group.size > 1 and isinstance(module, _DROPOUT) and module.p:
                raise ConfigError(
                    f"the plan does not say what the dropout layer {path} is: "
                    f'{{"{path}": "column"}} between a column and a row layer, or "replicated"'
                )
            continue
        used.add(pattern)
        said = plan[pattern]
        split = said if isinstance(said, Split) else Split(said)
        if split.kind != "replicated":
            new = _part(path, module, split, group, overlap)
            yield lambda path=path, module=module, new=new: _replace(model, path, module, new, tied)  # type: ignore[misc]
    lost = [pattern for pattern in plan if pattern not in used]
    if lost:
        raise ConfigError(f"the plan's patterns {', '.join(lost)} match no module of {type(model).__name__}")


_Part = ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding | VocabParallelHead | Dropout
_DROPOUT = (nn.modules.dropout._DropoutNd, Dropout)


def _part(path: str, module: nn.Module, split: Split, group: Transport, overlap: bool) -> _Part:
    """What will take a module's place, on the meta device."""
    with torch.device("meta"):
        if split.kind == "vocab" and isinstance(module, nn.Embedding):
            if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
                raise ConfigError(f"{path} has max_norm, scale_grad_by_freq or sparse, which its parts cannot keep")
            size = module.num_embeddings, module.embedding_dim
            return VocabParallelEmbedding(*size, group=group, padding_idx=module.padding_idx)
        if split.kind == "column" and isinstance(module, (nn.Dropout, Dropout)):
            return Dropout(module.p, part=Part(split.dim, group.rank, group.size))
        if not isinstance(module, nn.Linear):
            raise ConfigError(f"{path} is a {type(module).__name__}, which cannot be split as {split.kind}")
        inputs, outputs, bias = module.in_features, module.out_features, module.bias is not None
        if split.kind == "vocab":
            if bias:
                raise ConfigError(f'{path} has a bias; split it as Split("column", whole=True)')
            return VocabParallelHead(inputs, outputs, group=group, overlap=overlap)
        if split.kind == "column":
            pieces = split.pieces or ((outputs, split.units or outputs),)
            return ColumnParallelLinear(
                inputs, outputs, group=group, pieces=pieces, bias=bias, gather_output=split.whole, overlap=overlap
            )
        return RowParallelLinear(inputs, outputs, group=group, units=split.units, bias=bias, scatter_input=split.whole)


def _replace(model: nn.Module, path: str, old: nn.Module, new: _Part, tied: Tied) -> None:
    if isinstance(new, Dropout):
        new.train(old.training)
    else:
        new.adopt(old, tied)
    parent, _, name = path.rpartition(".")
    model.get_submodule(parent).register_module(name, new)
