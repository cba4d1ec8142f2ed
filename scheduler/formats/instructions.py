"""Instruction streams as DeepSpeed's pipeline engine runs them.

::

    file         = { rank { instruction } }
    rank         = ( "rank" | "stage" | "stage_id" ) [ "=" ] number [ ":" ]      one stage a rank: they are the same
    instruction  = name "(" [ [ "buffer_id=" ] number ] ")"
    name         = "LoadMicroBatch" | "ForwardPass" | "BackwardPass"
                 | "SendActivation" | "RecvActivation" | "SendGrad" | "RecvGrad"
                 | "ReduceTiedGrads" | "ReduceGrads" | "OptimizerStep"

White space, commas, brackets and ``step 3:`` between instructions mean nothing (so a printed Python list of them can be
pasted), and ``#`` begins a comment.

Instructions name buffers, not micro-batches. A buffer's micro-batch is the one that was last loaded into it
(LoadMicroBatch on the first stage, RecvActivation on the others; the n-th of them brings micro-batch n). So a stream
that overwrites a buffer too early reads as work done twice or never, and `verify` says so.
"""

from __future__ import annotations

import re
from collections import Counter

from pipert.scheduler.action import Action, Kind
from pipert.scheduler.errors import FormatError
from pipert.scheduler.formats.imported import Imported, assembled, notice
from pipert.scheduler.row import ActionRow
from pipert.scheduler.semantics import NCCL_PAIR, Semantics

#: The instructions that become actions of the buffer's micro-batch.
ACTIONS: dict[str, Kind] = {
    "ForwardPass": Kind.F,
    "BackwardPass": Kind.B,
    "SendActivation": Kind.SEND_F,
    "RecvActivation": Kind.RECV_F,
    "SendGrad": Kind.SEND_B,
    "RecvGrad": Kind.RECV_B,
}
#: Those that say nothing about order between ranks, or about one step.
LEFT_OUT = ("ReduceTiedGrads", "OptimizerStep")

_WORD = re.compile(
    r"\s*(?:(?i:rank|stage|stage_id)\s*=?\s*(?P<rank>\d{1,9})\s*:?|(?P<name>[A-Za-z_]\w*)\s*\((?P<buffer>[^()]*)\)"
    r"|(?i:step)\s*\d+\s*:|[\s,\[\]]+)",
    re.ASCII,
)
_BUFFER = re.compile(r"(?:buffer_id\s*=\s*)?(\d{1,9})", re.ASCII)


class _Stage:
    """The stream of one stage, read so far."""

    def __init__(self, stage: int) -> None:
        self.stage, self.actions = stage, list[Action]()
        self.loaded: dict[int, int] = {}
        self.loads = 0

    def add(self, name: str, buffer: int | None, line: int) -> None:
        """Add one instruction."""
        if name == ("LoadMicroBatch" if self.stage == 0 else "RecvActivation"):
            self.loaded[self._number(name, buffer, line)] = self.loads
            self.loads += 1
        if name == "ReduceGrads":
            self.actions.append(Action(self.stage, Kind.REDUCE))
        elif name in ACTIONS:
            number = self._number(name, buffer, line)
            if number not in self.loaded:
                loader = "LoadMicroBatch" if self.stage == 0 else "RecvActivation"
                raise FormatError(f"line {line}: {name} of buffer {number}, which is empty; {loader} it before")
            self.actions.append(Action(self.stage, ACTIONS[name], self.loaded[number]))

    def _number(self, name: str, buffer: int | None, line: int) -> int:
        if buffer is None:
            raise FormatError(f"line {line}: {name} names no buffer; write {name}(buffer_id=0)")
        return buffer


def loads(text: str, *, name: str = "deepspeed", semantics: Semantics = NCCL_PAIR) -> Imported:
    """Read the streams of all ranks as a program.

    Args:
        text: the file's content.
        name: what to call it; the file has no name.
        semantics: the transport that the program is for.

    Raises:
        FormatError: the text is not in this format; the message has the line, and what to write instead.
    """
    stages: dict[int, _Stage] = {}
    left_out: Counter[str] = Counter()
    stage: _Stage | None = None
    for line, words in enumerate(text.splitlines(), 1):
        said, at = words.partition("#")[0].rstrip(), 0
        while at < len(said):
            match = _WORD.match(said, at)
            if match is None:
                raise FormatError(f"line {line}: {said[at:][:40]!r} is no instruction; write ForwardPass(buffer_id=0)")
            at = match.end()
            if match["rank"] is not None:
                stage = stages.setdefault(int(match["rank"]), _Stage(int(match["rank"])))
            elif match["name"] is not None:
                _add(stage, match["name"], match["buffer"].strip(), line, left_out)
    absent = set(range(len(stages))) - stages.keys()
    if absent:
        raise FormatError(f"no rank {min(absent)} among {len(stages)}; number the ranks from 0 without gaps")
    rows = [ActionRow(stages[number].actions) for number in sorted(stages)]
    return Imported(assembled(name, rows, semantics), notice(left_out, "they are no part of a schedule"))


def _add(stage: _Stage | None, name: str, buffer: str, line: int, left_out: Counter[str]) -> None:
    if stage is None:
        raise FormatError(f"line {line}: {name} before any rank; begin with 'rank 0:'")
    known = (*ACTIONS, "LoadMicroBatch", "ReduceGrads", *LEFT_OUT)
    if name not in known:
        raise FormatError(f"line {line}: {name} is no instruction; there are {', '.join(known)}")
    number = _BUFFER.fullmatch(buffer)
    if buffer and number is None:
        raise FormatError(f"line {line}: {buffer[:40]!r} is no buffer; write {name}(buffer_id=0)")
    if name in LEFT_OUT:
        left_out[name] += 1
    stage.add(name, int(number[1]) if number else None, line)
