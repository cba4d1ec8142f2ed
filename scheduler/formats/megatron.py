"""The (micro-batch, model chunk) table by which Megatron-LM orders interleaved 1F1B.

::

    file   = { "ranks" number | "warmup" number { number } | pair | column }
    pair   = number number                 micro-batch and model chunk, in brackets and with commas or without
    column = ( "microbatch_id" | "model_chunk_id" | "virtual_microbatch_id" ) "|" number { number }

The columns are the two halves of the pairs, as Megatron's comments draw them. A ``:`` or ``=`` may stand behind the
first two words, and ``schedule_table =`` before the pairs.

All ranks do the forwards of their own chunks in the table's order, and the backwards in the same order with the chunks
reversed. Rank r of p does ``warmup`` forwards, then forward and backward in turn. Left out, the warm-up is Megatron's:
2(p − r − 1) + (v − 1)·g with v > 1 chunks and g the pairs before the chunk first changes; p − r − 1 with one chunk.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from pipert.scheduler.action import MAX_STAGES, Kind
from pipert.scheduler.errors import FormatError
from pipert.scheduler.formats.imported import Imported
from pipert.scheduler.generators.alternate import alternate
from pipert.scheduler.placement import Placement, positive
from pipert.scheduler.row import distinct, pack
from pipert.scheduler.schedule import Schedule

_NUMBERS = re.compile(r"[\d\s,()\[\]]*", re.ASCII)
_FIELD = re.compile(
    r"(ranks|warmup)\b\s*[:=]?|(?:(schedule_table)\s*=)|((?:virtual_)?microbatch_id|model_chunk_id)\s*\|", re.ASCII
)


def from_table(
    table: Sequence[tuple[int, int]], ranks: int, warmup: Sequence[int] | None = None, *, name: str = "megatron"
) -> Schedule:
    """Make the schedule that a table describes; stage s is on rank s modulo `ranks`.

    Args:
        table: micro-batch and model chunk of every virtual micro-batch.
        ranks: the number of pipeline ranks, ≥ 1.
        warmup: for each rank the forwards before its first backward; Megatron's if left out.
        name: what to call it.

    Raises:
        FormatError: the table is empty, its numbers have gaps, or `warmup` is not for so many ranks.
        LayoutError: `ranks` is below 1.
    """
    if not table:
        raise FormatError("the table has no entry; give (micro-batch, chunk) pairs")
    batch, chunk = np.array(table, dtype=np.int64).T
    chunks = len(distinct(chunk))
    if positive("ranks", ranks) * chunks > MAX_STAGES:
        raise FormatError(f"{ranks} ranks of {chunks} chunks are more than {MAX_STAGES} stages; use fewer")
    if chunk.min() < 0 or chunk.max() != chunks - 1:
        raise FormatError(f"chunks up to {chunk.max()}, but {chunks} different ones; number them from 0 without gaps")
    if batch.min() < 0 or batch.max() >= len(table):
        raise FormatError(f"micro-batch {batch.max()} in a table of {len(table)}; number them from 0 without gaps")
    if warmup is None:
        group = int(np.argmax(chunk != chunk[0])) or len(chunk)
        behind = range(ranks - 1, -1, -1)
        warmup = [after if chunks == 1 else 2 * after + (chunks - 1) * group for after in behind]
    if len(warmup) != ranks:
        raise FormatError(f"warmup has {len(warmup)} numbers for {ranks} ranks; give each rank one")
    rows = (
        alternate(
            pack(chunk * ranks + rank, Kind.F, batch),
            pack((chunks - 1 - chunk) * ranks + rank, Kind.B, batch),
            warmup[rank],
        )
        for rank in range(ranks)
    )
    return Schedule(name, Placement.looped(ranks, chunks), int(batch.max()) + 1, tuple(rows))


def loads(text: str, *, name: str = "megatron") -> Imported:
    """Read a table with its number of ranks.

    Raises:
        FormatError: the text is not in this format; the message has the line, and what to write instead.
    """
    pairs: list[int] = []
    fields: dict[str, list[int]] = {}
    for line, words in enumerate(text.splitlines(), 1):
        said = words.partition("#")[0].strip()
        match = _FIELD.match(said)
        rest = said[match.end() :] if match else said
        if not _NUMBERS.fullmatch(rest):
            raise FormatError(f"line {line}: {said[:40]!r} is no pair; write micro-batch and chunk, as in (0, 1)")
        numbers = [int(number) for number in re.findall(r"\d{1,9}", rest)]
        if match and not match[2]:
            fields[match[1] or match[3]] = numbers
        elif len(numbers) % 2:
            raise FormatError(f"line {line}: {len(numbers)} numbers; each pair has two, micro-batch and chunk")
        else:
            pairs += numbers
    ranks = fields.get("ranks", [])
    if len(ranks) != 1:
        raise FormatError("the table says not for how many ranks it is; add a line 'ranks 4'")
    batches, chunks = (fields.get(column, []) for column in ("microbatch_id", "model_chunk_id"))
    if len(batches) != len(chunks):
        raise FormatError(f"{len(batches)} micro-batches and {len(chunks)} chunks; give as many of one as of the other")
    table = [*zip(pairs[0::2], pairs[1::2], strict=True), *zip(batches, chunks, strict=True)]
    return Imported(from_table(table, ranks[0], fields.get("warmup"), name=name))
