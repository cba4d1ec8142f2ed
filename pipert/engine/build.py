"""From a model to this rank's stages: trace, weigh, cut, build, and make every copy equal."""

from __future__ import annotations

import copy
import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from pipert.comm.mesh import Mesh
from pipert.comm.transport import Transport
from pipert.engine.halves import run_halves
from pipert.engine.kernels import prepare
from pipert.engine.loss import example_loss
from pipert.engine.parameters import ParameterBook, Tie, find_ties, ranks_of
from pipert.engine.refusals import together
from pipert.engine.settings import Settings
from pipert.engine.spread import SpreadModel
from pipert.engine.vocabulary_part import VocabularyPart
from pipert.errors import ConfigError
from pipert.graph.estimate import estimate
from pipert.graph.model_graph import ModelGraph
from pipert.graph.profile import profile
from pipert.graph.spare import keep_attributes
from pipert.graph.stage import StageBlock, StageModule, TracedModel, stage_module
from pipert.layers.materialise import materialise
from pipert.layers.shard import shard_of
from pipert.optim.precision import accumulate
from pipert.partition.check import check_stages
from pipert.scheduler.placement import Placement

Assignment = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, eq=False)
class Parts:
    """What one rank built.

    Attributes:
        graph: the whole model, with costs.
        assignment: for each stage the names of its blocks.
        modules: this rank's stages.
        book: this rank's parameters.
        ties: the parameters that several stages hold.
        tie_groups: for each tie the ranks that sum it; None where this rank holds no copy or has nobody to sum with.
        vocabulary: this rank's rows of a spread vocabulary; None where it is in stages.
    """

    graph: ModelGraph
    assignment: Assignment
    modules: Mapping[int, StageModule]
    book: ParameterBook
    ties: tuple[Tie, ...]
    tie_groups: tuple[Transport | None, ...]
    vocabulary: VocabularyPart | None = None


def weigh(traced: TracedModel, settings: Settings, mesh: Mesh, stages: int, halves: bool = False) -> ModelGraph:
    """The graph with costs: measured by rank 0 on its example, else estimated; the same on every rank.

    Its tensor-parallel partners measure, too: blocks that communicate run on all of them or on none.

    Args:
        traced: the model.
        settings: what the user said.
        mesh: all ranks.
        stages: how many there will be, at least.
        halves: whether the times of a backward's halves are wanted.

    Raises:
        ConfigError: the ranks were given different models or arguments.
    """
    device = settings.device or torch.device("cpu")
    first = mesh.pp_rank == mesh.dp_rank == 0

    def fill(module: nn.Module, prefix: str) -> object:
        return materialise(module, prefix.rstrip("."), device, settings.dtype, settings.seed)

    kernels = together(mesh.world, lambda: prepare(traced.model, settings.loss_fn, settings.device))

    def measure() -> ModelGraph:
        if first and settings.example is not None and stages > 1:
            return profile(
                traced,
                settings.example,
                materialise=fill,
                second_half=(lambda *call: run_halves(*call).second) if halves else None,
                loss=example_loss(settings.loss_fn),
            )
        return estimate(traced.graph)

    graph = together(mesh.world, measure)
    facts = {**settings.facts(), "PIPERT_KERNELS": kernels, "model": traced.graph.to_json()}
    blob = {"facts": facts, "graph": graph.to_json() if mesh.world.rank == 0 else None}
    answers = [json.loads(answer) for answer in mesh.world.exchange(json.dumps(blob).encode())]
    _check_alike([answer["facts"] for answer in answers])
    return ModelGraph.from_json(answers[0]["graph"])


def _check_alike(facts: list[dict[str, object]]) -> None:
    for rank, mine in enumerate(facts):
        for name, value in mine.items():
            if value != facts[0][name]:
                words = "" if name == "model" else f": {facts[0][name]!r} and {value!r}"
                raise ConfigError(
                    f"ranks 0 and {rank} were given different values of {name}{words}; pass the same to all"
                )


def build(
    traced: TracedModel,
    graph: ModelGraph,
    assignment: Assignment,
    placement: Placement,
    mesh: Mesh,
    settings: Settings,
    spread: SpreadModel | None = None,
) -> Parts:
    """Build this rank's stages, and make tied copies and replicas equal. Collective over the mesh.

    A model on the meta device gets memory for the blocks of these stages only.

    Args:
        traced: the model.
        graph: with costs.
        assignment: for each stage the names of its blocks.
        placement: the rank of every stage.
        mesh: all ranks.
        settings: what the user said.
        spread: the model without its vocabulary, where that is spread over all ranks.

    Raises:
        PartitionError: the stages' parameters do not add up to the model's.
        ConfigError: a block on the meta device cannot be initialised.
    """
    own, whole = placement.stages_of(mesh.pp_group.rank), graph
    if spread is not None:
        traced, graph = spread.rest, spread.graph
    blocks = [name for stage in own for name in assignment[stage]]
    traced = replace(traced, blocks={**traced.blocks, **_own_copies(traced, blocks, mesh.world)})

    def make() -> dict[int, StageModule]:
        for name in blocks:
            block = traced.blocks[name]
            materialise(block.module, block.prefix.rstrip("."), settings.device, settings.dtype, settings.seed)
        modules = {stage: stage_module(traced, stage, assignment) for stage in own}
        for module in modules.values():
            module.to(device=settings.device, dtype=settings.dtype)
            accumulate(module.parameters(), settings.precision)
        return modules

    modules = together(mesh.world, make)
    part = together(mesh.world, lambda: _part(spread, own[0], mesh, settings))
    ties = find_ties(graph, assignment)
    book = together(mesh.world, lambda: ParameterBook(graph, modules, ties, part, whole))
    groups = tuple(_tie_group(tie, placement, mesh) for tie in ties)
    _make_equal(modules, book, ties, groups, placement, mesh)
    _check_totals(graph, assignment, modules, mesh)
    return Parts(graph, assignment, modules, book, ties, groups, part)


def _part(spread: SpreadModel | None, home: int, mesh: Mesh, settings: Settings) -> VocabularyPart | None:
    return None if spread is None else spread.part(mesh.pp_group.rank, mesh.pp, home, settings)


def _own_copies(traced: TracedModel, blocks: list[str], world: Transport) -> dict[str, StageBlock]:
    """Copies of this rank's blocks where ranks are threads that were given one and the same model."""
    place = f"{socket.gethostname()} {os.getpid()}"
    places = [blob.decode() for blob in world.exchange(place.encode())]
    if len(set(places)) == len(places):
        return {}
    modules = {name: traced.blocks[name].module for name in blocks}
    mine = {id(part) for module in modules.values() for part in (*module.modules(), *_tensors(module))}
    answers = world.exchange(json.dumps(sorted(mine)).encode())
    lower = [rank for rank in range(world.rank) if places[rank] == place]
    if not any(mine.intersection(json.loads(answers[rank])) for rank in lower):
        return {}
    copies = copy.deepcopy(modules)
    for name, module in modules.items():
        keep_attributes(module, copies[name])
    return {name: replace(traced.blocks[name], module=copies[name]) for name in blocks}


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _tie_group(tie: Tie, placement: Placement, mesh: Mesh) -> Transport | None:
    """The ranks that hold a copy, on all replicas. Collective over the world; every rank takes part for every tie."""
    holders = ranks_of(tie, placement)
    mine = mesh.pp_group.rank in holders
    group = mesh.world.split(mesh.tp_group.rank if mine else None, mesh.world.rank)
    return group if group is not None and group.size > 1 else None


def _make_equal(
    modules: Mapping[int, StageModule],
    book: ParameterBook,
    ties: tuple[Tie, ...],
    groups: tuple[Transport | None, ...],
    placement: Placement,
    mesh: Mesh,
) -> None:
    """Everybody gets the first replica's weights, and a tied weight that of its first owner.

    What tensor-parallel ranks have whole they get from the first of them.
    """
    held = [*(t for module in modules.values() for t in _tensors(module)), *(entry.parameter for entry in book)]
    tensors = list({id(tensor): tensor for tensor in held}.values())
    if mesh.dp_group.size > 1:
        _broadcast(mesh.dp_group, tensors, 0)
    if mesh.tp_group.size > 1:
        _broadcast(mesh.tp_group, [tensor for tensor in tensors if shard_of(tensor) is None], 0)
    for entry in book:
        group = groups[entry.tie] if entry.tie is not None else None
        if group is not None and entry.tie is not None:
            first, *others = ranks_of(ties[entry.tie], placement)
            members = sorted(mesh.rank_of(pp=pp, dp=dp) for pp in (first, *others) for dp in range(mesh.dp))
            _broadcast(group, [entry.parameter], members.index(mesh.rank_of(pp=first, dp=0)))


@torch.no_grad()
def _broadcast(group: Transport, tensors: Sequence[torch.Tensor], root: int) -> None:
    memories = [tensor.detach().contiguous() for tensor in tensors]
    requests = [group.ibroadcast(memory, root) for memory in memories]
    for tensor, memory, request in zip(tensors, memories, requests, strict=True):
        group.wait(request, "the first broadcast of the weights", root)
        if memory.data_ptr() != tensor.data_ptr():
            tensor.copy_(memory)


def _check_totals(graph: ModelGraph, assignment: Assignment, modules: Mapping[int, StageModule], mesh: Mesh) -> None:
    """Nothing was lost, and nothing is there twice."""
    mine = {stage: {name: p.numel() for name, p in module.named_parameters()} for stage, module in modules.items()}
    built: dict[int, dict[str, int]] = {}
    for blob in mesh.pp_group.exchange(json.dumps(mine).encode()):
        built.update({int(stage): numels for stage, numels in json.loads(blob).items()})
    check_stages(graph, assignment, [built[stage] for stage in sorted(built)])
