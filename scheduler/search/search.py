"""`search`: a schedule for given costs, memory and transport."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pipert.scheduler.action import Kind
from pipert.scheduler.bounds import bound_of
from pipert.scheduler.costs import Costs
from pipert.scheduler.errors import LayoutError
from pipert.scheduler.instance import Instance, Limits
from pipert.scheduler.lower import lower
from pipert.scheduler.placement import Placement, positive
from pipert.scheduler.row import ActionRow, Codes
from pipert.scheduler.schedule import Schedule
from pipert.scheduler.search.dispatch import dispatch, rules
from pipert.scheduler.search.found import Found
from pipert.scheduler.search.improve import improve
from pipert.scheduler.search.periodic import extend, fewer
from pipert.scheduler.search.starts import known
from pipert.scheduler.semantics import Semantics
from pipert.scheduler.simulate import simulate
from pipert.scheduler.timeline import Timeline
from pipert.scheduler.verify import verify

#: Actions to visit: some tenths of a second of compiled code.
EFFORT = 20_000_000

#: How many different schedules the local search begins with.
STARTS = 4

#: How many visits of an action its dispatching and simulation count for.
DISPATCH = 12

#: The share by which sums of times may differ for the order of their terms.
ROUNDING = 1e-12


class Candidate(NamedTuple):
    """Rows and how long they take."""

    makespan: float
    rows: list[Codes]


def search(
    costs: Costs,
    ranks: int,
    microbatches: int,
    *,
    chunks: int = 1,
    placement: Placement | None = None,
    limits: Limits = None,
    semantics: Semantics | None = None,
    effort: int = EFFORT,
    seed: int = 0,
) -> Found:
    """Look for the schedule with the least makespan.

    Backwards are in halves, I and W; micro-batches keep their order at every stage. It begins with all known schedules
    that fit and with list scheduling by many rules, and improves the best of them by tabu search, until `lower_bound`
    is reached or the effort is spent. For many micro-batches it also repeats the steady state of a schedule for
    fewer. The answer is never worse than a known schedule with the same placement and memory, and the same for the
    same arguments.

    Args:
        costs: how long F, I, W and hand-overs take at every stage.
        ranks: the pipeline's.
        microbatches: of a step.
        chunks: stages a rank, placed as interleaved schedules have them.
        placement: the rank of every stage, in place of `chunks`.
        limits: the most (stage, micro-batch) pairs whose activations a rank may keep, from F to the end of W: one
            number, or one for each rank; None for no limit.
        semantics: the message rules of a transport. The schedule is then chosen, among the best and the known ones, by
            what its program takes there; a known one with whole backwards keeps them where it is faster so.
        effort: how many actions to visit in all.
        seed: of the random choices.

    Raises:
        LayoutError: a number is out of range, the placement is for other ranks, or a limit is too small for one
            micro-batch.
        CostError: the costs are for another number of stages.
    """
    placement = placement or Placement.looped(ranks, chunks)
    if placement.num_ranks != ranks:
        raise LayoutError(f"the placement is on {placement.num_ranks} ranks, not ranks = {ranks}; give one for them")
    instance = Instance.of(costs, placement, microbatches, limits)
    bound = bound_of(instance)
    best = [candidate.rows for candidate in _search(instance, costs, bound, positive("effort", effort), seed)]
    if semantics is None:
        return _answer(instance, costs, best[0], bound)
    # Messages of whole backwards may stand in another order than those of halves, and in a better one.
    wholes = known(instance, halves=False) if _are_no_faster_whole(instance, costs) else ()
    options = [_answer(instance, costs, rows, bound, semantics) for rows in (*best, *known(instance), *wholes)]
    return min(options, key=lambda found: found.makespan)


def _are_no_faster_whole(instance: Instance, costs: Costs) -> bool:
    """Whether backwards take no less whole than in halves, which the bound is about."""
    whole = costs.table(instance.num_stages)[Kind.B]
    return bool((whole >= (instance.inputs + instance.weights) * (1 - ROUNDING)).all())


def _answer(
    instance: Instance, costs: Costs, rows: list[Codes], bound: float, semantics: Semantics | None = None
) -> Found:
    """The rows as they are given out: verified, and for a transport lowered."""
    schedule = _schedule(instance, rows)
    verify(schedule, limits=instance.limits.tolist()).require()
    if semantics is None:
        return Found(schedule, simulate(schedule, costs).makespan, bound)
    program = lower(schedule, semantics)
    return Found(schedule, simulate(program, costs).makespan, bound, program)  # simulating a program verifies it


def _search(instance: Instance, costs: Costs, bound: float, effort: int, seed: int) -> list[Candidate]:
    """The best candidates, best first."""
    enough = bound * (1 + ROUNDING)
    pool = [Candidate(_timeline(instance, costs, rows).makespan, rows) for rows in known(instance)]
    starts = _starts(instance, costs, effort, seed)
    spent = 0
    while not any(candidate.makespan <= enough for candidate in pool) and not (pool and spent > effort // 2):
        rows = next(starts, None)
        if rows is None:
            break
        pool.append(Candidate(_timeline(instance, costs, rows).makespan, rows))
        spent += DISPATCH * instance.num_actions
    pool = _distinct(pool)
    if pool[0].makespan <= enough:
        return pool
    many = max(1, min(len(pool), (effort - spent) // (100 * instance.num_actions)))
    for number, candidate in enumerate(pool[:many]):
        share = (effort - spent) // many
        better, span = improve(instance, candidate.rows, seed=seed + number, effort=share, bound=enough)
        pool.append(Candidate(span, better))
        if span <= enough:
            break
    return _distinct(pool)


def _distinct(pool: list[Candidate]) -> list[Candidate]:
    """The best few with different makespans, best first."""
    ordered = sorted(pool, key=lambda candidate: candidate.makespan)
    return list({candidate.makespan: candidate for candidate in reversed(ordered)}.values())[::-1][:STARTS]


def _starts(instance: Instance, costs: Costs, effort: int, seed: int) -> Iterator[list[Codes]]:
    """Rows to begin with, beside known ones: repeated ones, and those of every rule."""
    count = fewer(instance)
    if count < instance.microbatches:
        small = instance.with_microbatches(count)
        for candidate in _search(small, costs, bound_of(small), effort // 4, seed):
            timeline = _timeline(small, costs, candidate.rows)
            begins = [timeline.lane(rank).starts for rank in range(timeline.num_ranks)]
            rows = extend(small, candidate.rows, begins, instance.microbatches - count)
            if rows is not None:
                yield rows
    for rule in rules(instance):
        yield dispatch(instance, rule)


def _schedule(instance: Instance, rows: list[Codes]) -> Schedule:
    return Schedule("auto", instance.placement, instance.microbatches, tuple(map(ActionRow.from_codes, rows)))


def _timeline(instance: Instance, costs: Costs, rows: list[Codes]) -> Timeline:
    return simulate(_schedule(instance, rows), costs)
