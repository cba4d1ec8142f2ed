"""Rows of the text format: actions and groups behind ``rank 0:``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from pipert.scheduler.action import MAX_STAGES, MICROBATCH_MASK, Action, Kind
from pipert.scheduler.errors import ActionError, FormatError
from pipert.scheduler.program import Span
from pipert.scheduler.row import ActionRow, Codes, pack

_ACTION = re.compile(r"(\d{1,12})([A-Z](?:[A-Z_]*[A-Z])?)(\d{0,12})", re.ASCII)
_KINDS = {kind.name: int(kind) for kind in Kind}
_NUMBERED = np.array([kind.has_microbatch for kind in Kind])
_BRACES = ("{", "}")
#: Words that are read at a time: enough to be fast, few enough to need little memory.
_BLOCK = 1 << 16


@dataclass(frozen=True)
class Row:
    """One row of a file.

    Attributes:
        line: the line it is on, from 1.
        actions: what it holds.
        groups: the spans in braces.
    """

    line: int
    actions: ActionRow
    groups: tuple[Span, ...] = ()


def fail(line: int, problem: str, remedy: str) -> NoReturn:
    """Refuse a line."""
    raise FormatError(f"line {line}: {problem}; {remedy}")


def read_row(line: int, text: str) -> Row:
    """Read what is behind the colon."""
    if "{" not in text and "}" not in text:
        return Row(line, _actions(line, text.split()))
    words = text.replace("{", " { ").replace("}", " } ").split()
    braces = [place for place, word in enumerate(words) if word in _BRACES]
    places = [place - before for before, place in enumerate(braces)]  # how many actions are before each brace
    for turn, place in enumerate(places):
        brace = words[braces[turn]]
        if brace != _BRACES[turn % 2] or (brace == "}" and place == places[turn - 1]):
            fail(line, f"a {brace!r} out of place behind {place} actions", "write groups as {0SEND_F1 0RECV_B0}")
    if len(places) % 2:
        fail(line, f"the group behind {places[-1]} actions has no end", "close it with '}'")
    groups = tuple(zip(places[0::2], places[1::2], strict=True))
    return Row(line, _actions(line, [word for word in words if word not in _BRACES]), groups)


def _actions(line: int, words: list[str]) -> ActionRow:
    """Read all actions at once; if one is wrong, say which."""
    row = packed(words)
    if row is not None:
        return row
    for place, word in enumerate(words):
        try:
            Action.parse(word)
        except ActionError as error:
            raise FormatError(f"line {line}, action {place}: {error}") from error
    raise AssertionError(f"line {line} is wrong although each of its actions is right")


def packed(words: list[str]) -> ActionRow | None:
    """What `Action.parse` reads from each word, all at once; None if it refuses one."""
    blocks = [np.empty(0, dtype=np.int64)]
    for begin in range(0, len(words), _BLOCK):
        codes = _codes(words[begin : begin + _BLOCK])
        if codes is None:
            return None
        blocks.append(codes)
    return ActionRow.from_codes(np.concatenate(blocks))


def _codes(words: list[str]) -> Codes | None:
    text = " ".join(words)
    parts = _ACTION.findall(text)
    if len(parts) != len(words) or sum(map(len, map("".join, parts))) + len(words) - 1 != len(text):
        return None
    stages = np.array([int(stage) for stage, _, _ in parts], dtype=np.int64)
    kinds = np.array([_KINDS.get(kind, -1) for _, kind, _ in parts], dtype=np.int64)
    numbers = np.array([int(number or -1) for _, _, number in parts], dtype=np.int64)
    right = (kinds >= 0) & (_NUMBERED[kinds] == (numbers >= 0)) & (stages < MAX_STAGES) & (numbers <= MICROBATCH_MASK)
    return pack(stages, kinds, np.maximum(numbers, 0)) if right.all() else None
