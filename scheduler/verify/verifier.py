"""`verify`: all rules over a schedule or a program."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from pipert.scheduler.errors import LayoutError
from pipert.scheduler.index import index
from pipert.scheduler.placement import is_whole
from pipert.scheduler.program import Program
from pipert.scheduler.schedule import Schedule
from pipert.scheduler.verify.actions import ACTION_RULES
from pipert.scheduler.verify.collectives import COLLECTIVE_RULES
from pipert.scheduler.verify.fault import Check, Fault
from pipert.scheduler.verify.limits import LIMIT
from pipert.scheduler.verify.messages import MESSAGE_RULES
from pipert.scheduler.verify.offload import OFFLOAD_RULE
from pipert.scheduler.verify.order import ORDER_RULES
from pipert.scheduler.verify.proof import Proof
from pipert.scheduler.verify.rule import Rule, Subject
from pipert.scheduler.verify.transport import DEADLOCK, SWAP
from pipert.scheduler.verify.update import UPDATE_RULES
from pipert.scheduler.verify.vocabulary import VOCABULARY
from pipert.scheduler.verify.weights import WEIGHT_RULES

#: What has to hold of a program whose actions are right one by one.
PROGRAM_RULES = (*MESSAGE_RULES, *ORDER_RULES, *COLLECTIVE_RULES, *WEIGHT_RULES, *UPDATE_RULES, OFFLOAD_RULE)

#: Of each rule at most this many faults are reported.
MAX_FAULTS = 20


def verify(target: Schedule | Program, *, limits: int | Sequence[int] | None = None) -> Proof:
    """Prove a schedule or program safe, or find out why it is not.

    A schedule: every action is known, in range, on its stage's rank and done once; nothing is missing; each rank's
    order respects the dependencies, and no ranks wait for one another in a cycle. A program also: every
    message has its other end, stands after what it sends and before what it feeds; groups and collectives are well
    formed; weights and activations are there wherever they are used, and weights are updated once their gradients are
    whole; no message can reach another's receive; and everything happens under the program's own semantics, whatever
    the timing (each wait is for *all* of a fixed set of events, so one run decides for every run).

    Args:
        target: the schedule, or the program (lowered for its semantics).
        limits: how many micro-batches of a rank's stages may be live at once (forward done, last backward part not);
            one number, or one for each rank.

    Returns:
        The proof; print it, ask `Proof.ok`, or call `Proof.require`.

    Raises:
        LayoutError: `limits` does not fit the ranks, or has something that is no count.
    """
    subject = Subject(index(target), _per_rank(limits, target))
    faults: list[Fault] = []
    checks: list[Check] = []
    is_program = isinstance(target, Program)
    for rule in ACTION_RULES:
        _judge(rule, subject, faults, checks)
    if subject.index.sparse:  # something is missing, so that is already a fault
        return Proof(target, tuple(faults), tuple(checks))
    for rule in PROGRAM_RULES if is_program else ORDER_RULES:
        _judge(rule, subject, faults, checks)
    if isinstance(target, Program) and target.vocabulary is not None:
        _judge(VOCABULARY, subject, faults, checks)
    if not faults:  # else nobody knows which message meets which
        for rule in (SWAP, DEADLOCK) if is_program else (DEADLOCK,):
            _judge(rule, subject, faults, checks)
    if limits is not None:
        _judge(LIMIT, subject, faults, checks)
    return Proof(target, tuple(faults), tuple(checks))


def _judge(rule: Rule, subject: Subject, faults: list[Fault], checks: list[Check]) -> None:
    found = list(islice(rule.find(subject), MAX_FAULTS))
    faults += found
    if not found:
        checks.append(Check(rule.name, rule.describe(subject)))


def _per_rank(limits: int | Sequence[int] | None, target: Schedule | Program) -> tuple[int, ...] | None:
    if limits is None:
        return None
    each = tuple(limits) if isinstance(limits, Iterable) else (limits,) * target.num_ranks
    strange = [limit for limit in each if not is_whole(limit) or limit < 0]
    if strange:
        raise LayoutError(
            f"limits = {limits!r} has {strange[0]!r}; a limit is a number of micro-batches, an integer >= 0"
        )
    if len(each) != target.num_ranks:
        raise LayoutError(f"{len(each)} limits for {target.num_ranks} ranks; give one number, or one for each rank")
    return each
