"""A model and its loss as one rank's part of them, before the pipeline cuts the model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from torch import nn

from pipert.comm.mesh import Mesh
from pipert.comm.transport import Transport
from pipert.engine.loss import LossFunction
from pipert.errors import ConfigError
from pipert.graph.stage import TracedModel
from pipert.layers.parallelize import SharesOut, is_parallel, parallelize
from pipert.layers.shard import is_partial, shard_of
from pipert.layers.vocabulary import VocabParallelHead


@runtime_checkable
class OverVocabulary(Protocol):
    """A loss that can do with logits which are shared out among ranks, such as `pipert.models.CausalLMLoss`."""

    def over_vocabulary(self, group: Transport, vocabulary: int) -> LossFunction:
        """The same loss for this rank's logits."""
        ...


def check_model(model: nn.Module, mesh: Mesh) -> None:
    """Refuse a model that the mesh's tensor-parallel ranks cannot share.

    Raises:
        ConfigError: it does not know how to be shared out, or was shared out over other ranks, or replicas have it in
            shards.
    """
    if not isinstance(model, nn.Module):
        return  # refused when it is traced
    for name, parameter in model.named_parameters():
        if not parameter.is_meta and parameter.untyped_storage().nbytes() < parameter.nbytes:
            raise ConfigError(
                f"{name} is in shards of an optimizer (ZeRO stage 3) of another pipeline; close() that one first"
            )
        shard = shard_of(parameter)
        if shard is not None and (shard.parts, shard.index) != (mesh.tp, mesh.tp_rank):
            raise ConfigError(
                f"{name} is part {shard.index} of {shard.parts}, but this is rank {mesh.tp_rank} of tp = {mesh.tp}; "
                "parallelize the model on the mesh that the pipeline gets"
            )
    if is_parallel(model) and not any(shard_of(parameter) or is_partial(parameter) for parameter in model.parameters()):
        raise ConfigError(
            f"the parameters of {type(model).__name__} no longer say what they are parts of, as after copy.deepcopy; "
            "copy the model before it is parallelized"
        )
    if mesh.tp == 1 or _is_shared_out(model):
        return
    if not isinstance(model, SharesOut):
        raise ConfigError(
            f"tp = {mesh.tp}, but {type(model).__name__} has no tensor-parallel layers, so all ranks would compute the "
            'same; call pipert.parallelize(model, mesh, plan={"blocks.*.up": "column", "blocks.*.down": "row"}) '
            "first, or use tp = 1 and more pp or dp"
        )
    model.check_tensor_parallel(mesh.tp)


def shared_out(model: nn.Module, mesh: Mesh) -> nn.Module:
    """This rank's part of the model: the model itself where it is one, else made from a copy of its structure."""
    if mesh.tp == 1 or not isinstance(model, nn.Module) or _is_shared_out(model):
        return model
    return parallelize(copy.deepcopy(model, {id(p): p for p in model.parameters()}), mesh)


def _is_shared_out(model: nn.Module) -> bool:
    return is_parallel(model) or any(shard_of(parameter) is not None for parameter in model.parameters())


def over_vocabulary(traced: TracedModel, loss_fn: LossFunction) -> tuple[LossFunction, Callable[[Any], Any] | None]:
    """The loss for what the model's last block gives, and what makes a whole output of it.

    Where the last block is a shared-out head and the loss can do with its own logits, they are not gathered.
    """
    last = list(traced.blocks.values())[-1].module
    if not isinstance(last, VocabParallelHead) or last.group.size == 1 or not isinstance(loss_fn, OverVocabulary):
        return loss_fn, None
    last.gather_output = False
    return loss_fn.over_vocabulary(last.group, last.vocabulary), last.gather
