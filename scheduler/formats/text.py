"""The text format of schedules and programs, version 1. Writing and reading again gives an equal value.

::

    file      = header { line }
    header    = ( "pipert-schedule" | "pipert-program" ) "1"
    line      = [ field | row ] [ comment ]
    field     = "name" name
              | "microbatches" number
              | "placement" number { number }            the rank of every stage
              | "transport" name { option "=" value }    program: the message rules it is for
              | "trainable_from" number                  program: the first stage with a backward (0)
              | "zero" number                            program: the ZeRO stage over its replicas (0)
              | "tie" number { number }                  program: the stages with a copy of one weight
              | "vocabulary" ( [ "embedding" ] [ "head" ] | "frozen" )
                                                         program: spread over all ranks, and what of it is trained
    row       = "rank" number ":" { action | group }     what the rank does, in order
              | "schedule" number ":" { action }         program: the rank's row of the schedule it was made from
    group     = "{" { action } "}"                       program: messages issued together
    action    = number kind [ number ]                   as `Action.parse` reads it: 2F0, 1SEND_B3, 2STEP
    name      = a word, or a JSON string
    comment   = "#" and the rest of the line

A transport without options is one of `semantics.NAMED`; the options are the fields of `Semantics`. A program without
``schedule`` rows was made from the computations in its own rows. Every rank of the placement has a row, if only an
empty one, so that a file that was cut off is not read as another schedule. A file may hold a schedule that makes no
sense, such as a stage on two ranks: reading tells only whether it is written in this format, `verify` whether it is
right.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import numpy as np

from pipert.scheduler.action import NUMBERLESS, Kind
from pipert.scheduler.errors import FormatError
from pipert.scheduler.formats.reader import VERSION, read
from pipert.scheduler.placement import Placement
from pipert.scheduler.program import Program, Span
from pipert.scheduler.row import ActionRow
from pipert.scheduler.schedule import Schedule
from pipert.scheduler.semantics import NAMED, Semantics

_PLAIN_NAME = re.compile(r"[\w.+-]+", re.ASCII)


def loads(text: str) -> Schedule | Program:
    """Read a schedule or program.

    Raises:
        FormatError: the text is not in this format; the message has the line, and what to write instead.
    """
    return read(text)


def load(path: str | Path) -> Schedule | Program:
    """Read a file.

    Raises:
        FormatError: as `loads`, with the file's name; or it is not text.
        OSError: there is no such file.
    """
    try:
        return read(Path(path).read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise FormatError(
            f"{path} is no UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8"
        ) from error
    except FormatError as error:
        raise FormatError(f"{path}, {error}") from error


def dumps(value: Schedule | Program) -> str:
    """Write a schedule or program as text.

    Raises:
        FormatError: the value has something that cannot be spelled, such as overlapping groups.
    """
    return "\n".join(_program(value) if isinstance(value, Program) else _schedule(value)) + "\n"


def dump(value: Schedule | Program, path: str | Path) -> None:
    """Write a file; see `dumps`."""
    Path(path).write_text(dumps(value), encoding="utf-8")


def _schedule(schedule: Schedule) -> Iterator[str]:
    yield f"pipert-schedule {VERSION}"
    yield from _head(schedule)
    for rank, row in enumerate(schedule.rows):
        yield f"rank {rank}: {' '.join(_words(row, rank))}".rstrip()


def _program(program: Program) -> Iterator[str]:
    if program.groups and len(program.groups) != len(program.rows):
        raise FormatError(f"groups for {len(program.groups)} ranks in a program of {len(program.rows)}")
    _check_count(program, program.placement)
    yield f"pipert-program {VERSION}"
    yield from _head(program.schedule)
    yield f"transport {_transport(program.semantics)}"
    if program.trainable_from < 0 or not all(tie and min(tie) >= 0 for tie in program.ties):
        numbers = f"trainable_from {program.trainable_from}, ties {program.ties}"
        raise FormatError(f"{numbers} have no text form; stages are numbered from 0, and a tie has some")
    if program.zero:
        yield f"zero {program.zero}"
    if program.trainable_from:
        yield f"trainable_from {program.trainable_from}"
    for tie in program.ties:
        yield f"tie {' '.join(map(str, tie))}"
    if program.vocabulary is not None:
        yield f"vocabulary {' '.join(program.vocabulary.trained) or 'frozen'}"
    for rank, row in enumerate(program.rows):
        yield f"rank {rank}: {' '.join(_grouped(_words(row, rank), program.spans(rank), rank))}".rstrip()
    if program.schedule.rows != tuple(row.computations() for row in program.rows):
        for rank, row in enumerate(program.schedule.rows):
            yield f"schedule {rank}: {' '.join(_words(row, rank))}".rstrip()


def _head(schedule: Schedule) -> Iterator[str]:
    if schedule.microbatches < 0:
        raise FormatError(f"microbatches = {schedule.microbatches} has no text form; a step has at least one")
    _check_count(schedule, schedule.placement)
    yield f"name {_name(schedule.name)}"
    yield f"microbatches {schedule.microbatches}"
    yield f"placement {schedule.placement}"


def _check_count(value: Schedule | Program, placement: Placement) -> None:
    if len(value.rows) != placement.num_ranks:
        rows = f"{len(value.rows)} rows for a placement on {placement.num_ranks} ranks"
        raise FormatError(f"{rows} have no text form; give each rank one, which may be empty")


def _name(name: str) -> str:
    return name if _PLAIN_NAME.fullmatch(name) else json.dumps(name)


def _transport(semantics: Semantics) -> str:
    if NAMED.get(semantics.name) == semantics:
        return semantics.name
    options = {field.name: getattr(semantics, field.name) for field in fields(semantics) if field.name != "name"}
    spelled = {True: "yes", False: "no"}
    return " ".join([_name(semantics.name), *(f"{key}={spelled.get(value, value)}" for key, value in options.items())])


def _words(row: ActionRow, rank: int) -> list[str]:
    """The actions of a row as text."""
    kinds = row.kinds
    numbered = np.isin(kinds, list(NUMBERLESS)) & (row.microbatches != 0)
    odd = np.flatnonzero((row.codes < 0) | (kinds >= len(Kind)) | numbered)
    if len(odd):
        raise FormatError(f"rank {rank}, action {odd[0]}: the code {row.codes[odd[0]]} has no text form")
    return row.words()


def _grouped(words: list[str], spans: tuple[Span, ...], rank: int) -> list[str]:
    """Put braces around the groups."""
    free = 0
    for start, stop in spans:
        if not free <= start < stop <= len(words):
            raise FormatError(f"rank {rank}: group [{start}, {stop}) is empty, overlaps another or leaves the row")
        words[start] = "{" + words[start]
        words[stop - 1] += "}"
        free = stop
    return words
