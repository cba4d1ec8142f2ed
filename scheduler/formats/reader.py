"""The reader of the text format; the grammar is in `pipert.scheduler.formats.text`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, get_args

from pipert.scheduler.errors import LayoutError
from pipert.scheduler.formats.rows import Row, fail, read_row
from pipert.scheduler.placement import Placement
from pipert.scheduler.program import Program
from pipert.scheduler.row import ActionRow
from pipert.scheduler.schedule import Schedule
from pipert.scheduler.semantics import NAMED, Channel, Matching, Semantics
from pipert.scheduler.vocabulary import Vocabulary

VERSION = 1
SCHEDULE_HEADER, PROGRAM_HEADER = f"pipert-schedule {VERSION}", f"pipert-program {VERSION}"

_TO_END_OF_QUOTE = re.compile(r'[^"#]*"(?:[^"\\]|\\.)*"')
_TRAINED = (["embedding", "head"], ["embedding"], ["head"], ["frozen"])
_FLAG = {"no": False, "yes": True}
_OPTIONS: dict[str, dict[str, Any]] = {
    "buffered": _FLAG,
    "blocking": _FLAG,
    "matching": {value: value for value in get_args(Matching)},
    "channel": {value: value for value in get_args(Channel)},
    "grouped": _FLAG,
}


@dataclass
class _Contents:
    """What has been read so far."""

    is_program: bool
    last_line: int
    fields: dict[str, Any] = field(default_factory=dict)
    ties: list[tuple[int, ...]] = field(default_factory=list)
    rows: dict[str, dict[int, Row]] = field(default_factory=lambda: {"rank": {}, "schedule": {}})


def read(text: str) -> Schedule | Program:
    """Read a schedule or program.

    Raises:
        FormatError: the text is not in the format.
    """
    lines = _lines(text.removeprefix("\ufeff"))  # the mark that some editors put before a text
    header, first = next(lines, (1, ""))
    contents = _Contents(_is_program(header, first), header)
    for line, words in lines:
        contents.last_line = line
        _read_line(line, words, contents)
    return _build(contents)


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """The lines that say something, numbered from 1, without comments."""
    for line, words in enumerate(text.splitlines(), 1):
        quote = _TO_END_OF_QUOTE.match(words)
        quoted = quote.end() if quote else 0
        if said := (words[:quoted] + words[quoted:].partition("#")[0]).strip():
            yield line, said


def _is_program(line: int, words: str) -> bool:
    header = " ".join(words.split())
    if header not in (SCHEDULE_HEADER, PROGRAM_HEADER):
        problem = f"{words[:40]!r} is no header" if header else "there is nothing in it"
        fail(line, problem, f"begin the file with {SCHEDULE_HEADER!r} or {PROGRAM_HEADER!r}")
    return header == PROGRAM_HEADER


def _read_line(line: int, words: str, contents: _Contents) -> None:
    keyword, rest = (*words.split(None, 1), "")[:2]
    for_programs = ("transport", "trainable_from", "zero", "tie", "vocabulary", "schedule")
    known = ["name", "microbatches", "placement", "rank", *for_programs]
    if keyword not in known:
        near = get_close_matches(keyword, known, n=1)
        fail(line, f"unknown word {keyword[:40]!r}", f"did you mean {near[0]!r}?" if near else f"the words are {known}")
    if keyword in for_programs and not contents.is_program:
        fail(line, f"{keyword!r} belongs in a program", f"begin the file with {PROGRAM_HEADER!r}")
    if keyword in contents.rows:
        _add_row(line, keyword, rest, contents.rows[keyword])
    elif keyword == "tie":
        contents.ties.append(_numbers(line, rest, "the stages with a copy, for example: tie 0 3"))
    elif keyword in contents.fields:
        fail(line, f"{keyword!r} is there a second time", "keep one")
    else:
        contents.fields[keyword] = _FIELDS[keyword](line, rest)


def _add_row(line: int, keyword: str, rest: str, rows: dict[int, Row]) -> None:
    number, colon, actions = rest.partition(":")
    if not colon or not _is_number(number.strip()):
        fail(line, f"{rest[:40]!r} is no row", f"write the rank, a colon and actions: '{keyword} 0: 0F0 0B0'")
    rank = int(number)
    if rank in rows:
        fail(line, f"{keyword} {rank} is there a second time", f"keep one (the first is on line {rows[rank].line})")
    rows[rank] = read_row(line, actions)
    if keyword == "schedule" and rows[rank].groups:
        fail(line, "a group in a schedule", "only the 'rank' rows of a program have groups")


def _is_number(word: str) -> bool:
    return word.isascii() and word.isdigit() and len(word) <= 18


def _numbers(line: int, text: str, remedy: str) -> tuple[int, ...]:
    words = text.split()
    if not words or not all(map(_is_number, words)):
        fail(line, f"{text[:40]!r} is no list of numbers", f"write {remedy}")
    return tuple(map(int, words))


def _number(line: int, text: str) -> int:
    if not _is_number(text):
        fail(line, f"{text[:40]!r} is no number", "write one number")
    return int(text)


def _name(line: int, text: str) -> str:
    name, rest = _leading_name(line, text)
    if rest:
        fail(line, f"{rest[:40]!r} behind the name", 'write one word, or a JSON string: name "my schedule"')
    return name


def _leading_name(line: int, text: str) -> tuple[str, str]:
    """A word or JSON string, and what follows it."""
    if not text.startswith('"'):
        name, rest = (*text.split(None, 1), "", "")[:2]
        return (name, rest) if name else fail(line, "the name is missing", "write a word, or a JSON string")
    try:
        name, end = json.JSONDecoder().raw_decode(text)
    except json.JSONDecodeError as error:
        fail(line, f"{text[:40]} is no JSON string ({error.msg})", 'write it as in "my schedule"')
    return name, text[end:].strip()


def _placement(line: int, text: str) -> Placement:
    owners = _numbers(line, text, "the rank of every stage, for example: placement 0 1 2 3")
    try:
        return Placement(owners)
    except LayoutError as error:
        fail(line, "a rank without a stage", str(error))


def _transport(line: int, text: str) -> Semantics:
    name, rest = _leading_name(line, text)
    chosen = {}
    for option in rest.split():
        key, _, value = option.partition("=")
        if value not in _OPTIONS.get(key, {}):
            fail(line, f"{option!r} is no option", f"write key=value; there are {_spelled_options()}")
        chosen[key] = _OPTIONS[key][value]
    if not chosen and name not in NAMED:
        near = get_close_matches(name, NAMED, n=1, cutoff=0.3)
        hint = f"did you mean {near[0]!r}? " if near else ""
        fail(line, f"no transport is called {name!r}", f"{hint}there are {', '.join(NAMED)}, or give options")
    return Semantics(name, **chosen) if chosen else NAMED[name]


def _vocabulary(line: int, text: str) -> Vocabulary:
    trained = text.split()
    if trained not in _TRAINED:
        fail(line, f"{text[:40]!r} are no parts of a vocabulary", "write 'embedding', 'head', both, or 'frozen'")
    return Vocabulary("embedding" in trained, "head" in trained)


def _spelled_options() -> str:
    return ", ".join(f"{key}={'|'.join(values)}" for key, values in _OPTIONS.items())


_FIELDS: Mapping[str, Callable[[int, str], Any]] = {
    "name": _name,
    "microbatches": _number,
    "placement": _placement,
    "transport": _transport,
    "trainable_from": _number,
    "vocabulary": _vocabulary,
    "zero": _number,
}


def _build(contents: _Contents) -> Schedule | Program:
    fields, end = contents.fields, contents.last_line
    for needed in ("microbatches", "placement", *(("transport",) if contents.is_program else ())):
        if needed not in fields:
            fail(end, f"no {needed!r} in the file", f"add a line '{needed} …'")
    rows = _in_order(contents.rows["rank"], "rank", end, fields["placement"].num_ranks)
    actions = tuple(row.actions for row in rows)
    groups = tuple(row.groups for row in rows)
    name, placement, microbatches = fields.get("name", "unnamed"), fields["placement"], fields["microbatches"]
    if not contents.is_program:
        for row in rows:
            if row.groups:
                fail(row.line, "a group in a schedule", f"begin the file with {PROGRAM_HEADER!r} if it has messages")
        return Schedule(name, placement, microbatches, actions)
    made_from: tuple[ActionRow, ...] = tuple(row.computations() for row in actions)
    if contents.rows["schedule"]:
        made_from = tuple(
            row.actions for row in _in_order(contents.rows["schedule"], "schedule", end, placement.num_ranks)
        )
    schedule = Schedule(name, placement, microbatches, made_from)
    return Program(
        schedule,
        fields["transport"],
        actions,
        groups,
        fields.get("trainable_from", 0),
        tuple(contents.ties),
        vocabulary=fields.get("vocabulary"),
        zero=fields.get("zero", 0),
    )


def _in_order(rows: dict[int, Row], keyword: str, end: int, ranks: int) -> list[Row]:
    for rank in range(len(rows)):
        if rank not in rows:
            fail(end, f"{len(rows)} rows, but none for {keyword} {rank}", "number the ranks from 0 without gaps")
    if len(rows) != ranks:
        remedy = "give each rank one row, even an empty one; a file with fewer may have been cut off"
        fail(end, f"{len(rows)} {keyword!r} rows for a placement on {ranks} ranks", remedy)
    return [rows[rank] for rank in range(len(rows))]
