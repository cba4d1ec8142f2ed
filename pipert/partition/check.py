"""Before a run starts: do the stages that were built hold exactly the model's parameters?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipert.errors import PartitionError
from pipert.graph.model_graph import ModelGraph


def check_stages(graph: ModelGraph, assignment: Sequence[Sequence[str]], built: Sequence[Mapping[str, int]]) -> None:
    """Compare what stages hold with what the model has.

    Every block is in one stage and every stage holds each parameter of its blocks once, under one of its names. So the
    counts of the stages add up to the model's, plus one copy of a tied parameter for every further stage that uses it.

    Args:
        graph: the model.
        assignment: names of the blocks of each stage.
        built: for each stage its parameters' names and numbers of elements, as ``named_parameters`` of the built
            `StageModule` gives them (collected from all ranks).

    Raises:
        PartitionError: a stage lacks a parameter, has one too many (also a tied one twice) or one of another size. The
            message gives stage, names and counts.
    """
    if len(built) != len(assignment):
        raise PartitionError(f"{len(built)} built stages for a partition into {len(assignment)}; build each stage once")
    flat = [name for names in assignment for name in names]
    if sorted(flat) != sorted(graph.index):
        wrong = sorted(set(flat) ^ set(graph.index)) or sorted({name for name in flat if flat.count(name) > 1})
        raise PartitionError(f"every block must be in exactly one stage; not so: {', '.join(wrong)}")
    for s, (names, found) in enumerate(zip(assignment, built, strict=True)):
        wanted: dict[str, tuple[set[str], int]] = {}
        for name in names:
            for p in graph.blocks[graph.index[name]].parameters:
                wanted.setdefault(p.identity, (set(), p.numel))[0].add(p.name)
        _check_stage(s, wanted, found, graph.numel)


def _check_stage(s: int, wanted: Mapping[str, tuple[set[str], int]], found: Mapping[str, int], whole: int) -> None:
    """``wanted``: for each parameter the names it may have in this stage, and its size."""
    identity = {name: key for key, (names, _) in wanted.items() for name in names}
    holders: dict[str, list[str]] = {}
    for name in found:
        if name in identity:
            holders.setdefault(identity[name], []).append(name)
    faults = {
        "lacks": sorted(set(wanted) - set(holders)),
        "does not own": sorted(set(found) - set(identity)),
        "holds twice": [" and ".join(sorted(names)) for names in holders.values() if len(names) > 1],
        "has in another size": [
            name for name in found if name in identity and found[name] != wanted[identity[name]][1]
        ],
    }
    for fault, names in faults.items():
        if names:
            raise PartitionError(
                f"stage {s} {fault}: {', '.join(names[:5])}; it holds {sum(found.values()):,} parameters, not "
                f"{sum(numel for _, numel in wanted.values()):,} of the model's {whole:,}; build each stage from its "
                "partition and keep tied parameters one object"
            )
