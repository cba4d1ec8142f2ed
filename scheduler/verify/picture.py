"""How a proof prints: the statement of what holds, or the picture of what does not."""

from __future__ import annotations

from collections.abc import Sequence

from pipert.scheduler.action import Kind
from pipert.scheduler.program import Program
from pipert.scheduler.row import ActionRow
from pipert.scheduler.schedule import Schedule
from pipert.scheduler.verify.fault import Check, Fault
from pipert.scheduler.verify.words import count

#: Actions shown on each side of a culprit, ranks shown, and further faults listed.
AROUND, RANKS, FURTHER = 3, 8, 5

#: What to do about a broken rule.
REMEDIES = {
    "bounds": "correct the number, or the placement and the micro-batches that it is compared with",
    "ownership": "move the action to the stage's rank, or place the stage on this rank",
    "uniqueness": "remove one of the two",
    "completeness": "add the missing action",
    "dependency": "put what it needs before it",
    "message": "add the other end, or remove this one",
    "group": "let a group span neighbouring messages, on a transport that has groups",
    "collective": "let every stage, and every rank of a tie, take part, in the same order everywhere",
    "vocabulary": "let every rank do each of its actions once for each micro-batch, in the same order everywhere",
    "weights": "let every computation stand between a GATHER and a FREE of its stage, alternating, numbered from 0",
    "update": "let each STEP stand behind everything that adds to its gradients, and each GATHER behind its STEP",
    "offload": "let forward, OFFLOAD, RELOAD and backward of a micro-batch follow one another",
    "swap": "receive in the order in which the peer sends, or match by tag",
    "deadlock": "put them in another order, issue crossing messages as a group and no others, or use buffered sends",
    "limit": "start fewer forwards before their backwards, or allow more",
}


def statement(target: Schedule | Program, checks: Sequence[Check]) -> str:
    """What is proved, one line a rule."""
    width = max(len(check.rule) for check in checks)
    lines = (f"  ✓ {check.rule:<{width}}  {check.statement}" for check in checks)
    return "\n".join([f"safe: {title(target)}", *lines])


def picture(target: Schedule | Program, faults: Sequence[Fault]) -> str:
    """The first fault with the actions around it, what to do, and the faults after it."""
    first = faults[0]
    lines = [f"unsafe: {title(target)}", f"  {first}", ""]
    grid = _grid(target, first)
    lines += [*(f"  {line}" for line in grid), ""] if grid else []
    lines.append(f"  remedy: {REMEDIES[first.rule]}")
    lines += [f"  also {fault}" for fault in faults[1 : 1 + FURTHER]]
    if len(faults) > 1 + FURTHER:
        lines.append(f"  and {len(faults) - 1 - FURTHER} or more others")
    return "\n".join(lines)


def title(target: Schedule | Program) -> str:
    """What a schedule or program is, in a few words."""
    schedule = target.schedule if isinstance(target, Program) else target
    sizes = (target.num_ranks, "rank"), (target.num_stages, "stage"), (target.microbatches, "micro-batch")
    transport = [f"for {target.semantics.name}"] if isinstance(target, Program) else []
    return ", ".join([schedule.name, *(count(number, noun) for number, noun in sizes), *transport])


def _grid(target: Schedule | Program, fault: Fault) -> list[str]:
    """The ranks at fault and their neighbours, each around its own culprit, with arrows at all that take part."""
    if fault.rank is None or fault.rank >= target.num_ranks:
        return []
    index = len(target.rows[fault.rank]) if fault.index is None else fault.index
    marked = {(fault.rank, index), *fault.along}
    centres = dict(reversed(fault.along)) | {fault.rank: index}
    ranks = _ranks(sorted(centres), target.num_ranks)
    table, arrows = [], []
    for rank in ranks:
        row = target.rows[rank]
        at = centres.get(rank, min(index, len(row)))
        shown = range(at - AROUND, at + AROUND + 1)
        cells = [_text(row, one) for one in shown]
        if fault.index is None and rank == fault.rank:
            cells[AROUND] = f"({fault.action}?)"
        table.append([f"rank {rank}", f"{max(at - AROUND, 0)}:", *cells])
        arrows.append(["", "", *("^" * len(cells[i]) if (rank, one) in marked else "" for i, one in enumerate(shown))])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for pair in zip(table, arrows, strict=True):
        for line in pair:
            padded = (f"{cell:<{width}}  " for cell, width in zip(line, widths, strict=True) if width)
            lines.append("".join(padded).rstrip())
    return [line for line in lines if line]


def _text(row: ActionRow, index: int) -> str:
    """An action of a row, nothing outside of it."""
    if not 0 <= index < len(row):
        return ""
    kind = int(row.kinds[index])
    return str(row[index]) if kind < len(Kind) else f"?{kind}"


def _ranks(marked: Sequence[int], num_ranks: int) -> list[int]:
    """The marked ranks and, while there is room, their neighbours."""
    shown = list(marked)[:RANKS]
    for near in (rank + step for rank in marked for step in (-1, 1)):
        if len(shown) < min(RANKS, len(marked) + 2) and 0 <= near < num_ranks and near not in shown:
            shown.append(near)
    return sorted(shown)
