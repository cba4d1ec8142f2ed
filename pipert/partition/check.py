"""Before a run starts: do the stages that were built hold exactly the model's parameters?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipert.errors import PartitionError
from pipert.graph.model_graph import ModelGraph


def check_stages(graph: ModelGraph, assignment: Sequence[Sequence[str]], built: Sequence[Mapping[str, int]]) -> None:
    """Compare what stages hold with what the model has: counts add up to the model's, tied duplicates counted once.

    Args:
        graph: the model.
        assignment: names of the blocks of each stage.
        built: for each stage its parameters' names and numbers of elements, as ``named_parameters`` of the built
            `StageModule` gives them (collected from all ranks).

    Raises:
        PartitionError: a stage lacks a parameter, has one too many (also a tied one twice) or one of another size. The
            message gives stage, names and both totals.
    """
    if len(built) != len(assignment):
        raise PartitionError(f"{len(built)} built stages for a partition into {len(assignment)}; build each stage once")
    flat = [name for names in assignment for name in names]
    if sorted(flat) != sorted(graph.index):
        wrong = sorted(set(flat) ^ set(graph.index)) or sorted({name for name in flat if flat.count(name) > 1})
        raise PartitionError(f"every block must be in exactly one stage; not so: {', '.join(wrong)}")
    total, duplicates = 0, 0
    met: set[str] = set()
    for s, (names, found) in enumerate(zip(assignment, built, strict=True)):
        wanted: dict[str, tuple[set[str], int]] = {}
        for name in names:
            for p in graph.blocks[graph.index[name]].parameters:
                wanted.setdefault(p.identity, (set(), p.numel))[0].add(p.name)
        _check_stage(s, wanted, found, graph)
        total += sum(found.values())
        duplicates += sum(numel for identity, (_, numel) in wanted.items() if identity in met)
        met.update(wanted)
    if total - duplicates != graph.numel:
        raise PartitionError(
            f"the stages hold {total:,} parameters, {duplicates:,} of them tied duplicates; the model has "
            f"{graph.numel:,}; build each stage from its partition"
        )


def _check_stage(
    s: int, wanted: Mapping[str, tuple[set[str], int]], found: Mapping[str, int], graph: ModelGraph
) -> None:
    allowed = {name: identity for identity, (names, _) in wanted.items() for name in names}
    strange = sorted(set(found) - set(allowed))
    holders: dict[str, list[str]] = {}
    for name in found:
        if name in allowed:
            holders.setdefault(allowed[name], []).append(name)
    missing = sorted(set(wanted) - set(holders))
    twice = [" and ".join(sorted(names)) for names in holders.values() if len(names) > 1]
    sizes = [name for name in found if name in allowed and found[name] != wanted[allowed[name]][1]]
    for fault, names in (
        ("lacks", missing),
        ("has unknown", strange),
        ("has a tied", twice),
        ("has another size of", sizes),
    ):
        if names:
            raise PartitionError(
                f"stage {s} {fault} parameter{'s' * (len(names) > 1)} {', '.join(names[:5])}"
                f"{' as two parameters' if names is twice else ''}: it holds {sum(found.values()):,} parameters, not "
                f"{sum(numel for _, numel in wanted.values()):,} of the model's {graph.numel:,}; build each stage "
                "from its partition and keep tied parameters one object"
            )
