"""A vocabulary spread over all ranks: every program is proved, what is wrong with one is found, and it pays."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipert.scheduler.action import VOCABULARY_COLLECTIVES, Action, Kind
from pipert.scheduler.costs import Costs
from pipert.scheduler.difference import Difference
from pipert.scheduler.draw.svg import svg
from pipert.scheduler.draw.text import text
from pipert.scheduler.errors import FormatError, LayoutError
from pipert.scheduler.formats.text import dumps, loads
from pipert.scheduler.generators.registry import generate
from pipert.scheduler.lower import lower
from pipert.scheduler.lower.delay import delay_backwards
from pipert.scheduler.program import Program
from pipert.scheduler.row import ActionRow
from pipert.scheduler.schedule import Schedule
from pipert.scheduler.semantics import MPI, MPI_SYNCHRONOUS, NCCL_RANK, Semantics
from pipert.scheduler.simulate import simulate
from pipert.scheduler.trace import chrome_trace
from pipert.scheduler.verify import verify
from pipert.scheduler.vocabulary import Vocabulary, home_stages
from tests.scheduler.brute_force import run
from tests.scheduler.layouts import any_semantics, lowering_options, schedules

COSTS = Costs(12, 24, logits=2, head_gradient=1, embedding_gradient=1, broadcast=1, statistics=1, total=1)


def spread(name: str = "1f1b", ranks: int = 3, microbatches: int = 4, rules: Semantics = MPI, lag: int = 1) -> Program:
    chunks = 2 if name == "interleaved" else 1
    schedule = delay_backwards(generate(name, ranks, microbatches, chunks), lag)
    return lower(schedule, rules, vocabulary=Vocabulary())


@given(schedules(ranks=8, chunks=3, microbatches=20), any_semantics, st.integers(0, 4), st.data())
@settings(max_examples=80)
def test_every_schedule_is_proved_for_every_transport(
    schedule: Schedule, rules: Semantics, lag: int, data: st.DataObject
) -> None:
    options = data.draw(lowering_options(schedule, spread=True))
    program = lower(delay_backwards(schedule, lag), rules, **options)
    proof = verify(program)
    assert proof.ok, proof
    if program.vocabulary is not None and program.vocabulary.head:
        assert any("at most 1 micro-batch" in str(c) or "at most 2 micro-batches" in str(c) for c in proof.checks)


@given(schedules(ranks=4, chunks=2, microbatches=5), any_semantics, st.integers(0, 2))
@settings(max_examples=40)
def test_an_executor_that_follows_the_rules_gets_to_the_end(schedule: Schedule, rules: Semantics, lag: int) -> None:
    assert run(lower(delay_backwards(schedule, lag), rules, vocabulary=Vocabulary())) is None


def test_one_micro_batch_on_two_ranks_as_it_is_drawn() -> None:
    """Embedding, forward, hidden state to all, logits, statistics, gradient to the last stage; and back."""
    rows = spread(ranks=2, microbatches=1).rows
    assert str(rows[0]) == ("0SUM_E0 0F0 0SEND_F0 0CAST_H0 0S0 0STATS0 0SUM_H0 0RECV_B0 0T0 0B0 0CAST_E0 0G0")
    assert str(rows[1]) == ("1RECV_F0 1SUM_E0 1F0 1CAST_H0 1S0 1STATS0 1SUM_H0 1T0 1B0 1SEND_B0 1CAST_E0 1G0")


def test_an_evaluation_computes_logits_and_no_gradient() -> None:
    program = lower(generate("1f1b", 2, 2), MPI, trainable_from=2, vocabulary=Vocabulary(False, False))
    assert verify(program).ok
    kinds = {action.kind for row in program.rows for action in row}
    assert kinds == {Kind.F, Kind.SEND_F, Kind.RECV_F, Kind.SUM_E, Kind.CAST_H, Kind.S, Kind.STATS}


def test_every_rank_of_a_v_does_its_part_at_its_first_stage() -> None:
    program = lower(generate("zb-v", 3, 4), MPI, vocabulary=Vocabulary())
    assert home_stages(program.placement) == (0, 1, 2)
    for rank, row in enumerate(program.rows):
        assert {a.stage for a in row if a.kind is Kind.S} == {rank}


# ---- what is wrong is found ----------------------------------------------------------------------------------------


def edited(program: Program, rank: int, edit: Callable[[list[Action]], object]) -> Program:
    rows = [list(row) for row in program.rows]
    edit(rows[rank])
    return replace(program, rows=tuple(map(ActionRow, rows)))


def swap(one: Action, other: Action) -> Callable[[list[Action]], object]:
    def edit(row: list[Action]) -> None:
        a, b = row.index(one), row.index(other)
        row[a], row[b] = row[b], row[a]

    return edit


MUTANTS: dict[str, tuple[Callable[[list[Action]], object], str]] = {
    "dropped S": (lambda row: row.remove(Action(1, Kind.S, 2)), "rank 1 never does its part of S for micro-batch 2"),
    "dropped T": (lambda row: row.remove(Action(1, Kind.T, 0)), "never does its part of T for micro-batch 0"),
    "dropped collective": (lambda row: row.remove(Action(1, Kind.SUM_H, 1)), "its part of SUM_H for micro-batch 1"),
    "T before its statistics": (swap(Action(1, Kind.T, 0), Action(1, Kind.STATS, 0)), "1T0 waits for 1STATS0"),
    "statistics before S": (swap(Action(1, Kind.STATS, 1), Action(1, Kind.S, 1)), "1STATS1 uses 1S1"),
    "S before the hidden state": (swap(Action(1, Kind.S, 0), Action(1, Kind.CAST_H, 0)), "1S0 waits for 1CAST_H0"),
    "G before its gradient": (swap(Action(1, Kind.G, 0), Action(1, Kind.CAST_E, 0)), "1G0 waits for 1CAST_E0"),
    "swapped collectives": (swap(Action(1, Kind.CAST_H, 0), Action(1, Kind.SUM_E, 3)), "is 1CAST_H0, that of rank 0"),
    "twice": (lambda row: row.append(Action(1, Kind.T, 0)), "a second 1T0"),
    "of another micro-batch": (lambda row: row.append(Action(1, Kind.T, 9)), "micro-batch 9 of 4"),
    "on another's stage": (lambda row: row.append(Action(2, Kind.T, 0)), "stage 2 is on rank 2"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_program_is_refused_in_words(name: str) -> None:
    edit, words = MUTANTS[name]
    proof = verify(edited(spread(), 1, edit))
    assert not proof.ok
    assert any(words in str(fault) for fault in proof.faults), proof


def test_the_first_and_the_last_stage_wait_for_their_collectives() -> None:
    program = spread(ranks=2)
    early = edited(program, 0, swap(Action(0, Kind.SUM_E, 0), Action(0, Kind.F, 0)))
    assert "0F0 waits for 0SUM_E0" in str(verify(early))
    early = edited(program, 1, swap(Action(1, Kind.SUM_H, 0), Action(1, Kind.B, 0)))
    assert "1B0 waits for 1SUM_H0" in str(verify(early))
    early = edited(program, 1, swap(Action(1, Kind.CAST_H, 0), Action(1, Kind.F, 0)))
    assert "1CAST_H0 takes what is made by 1F0" in str(verify(early))


def test_a_wait_cycle_of_a_collective_and_a_message_is_found_where_operations_hold_their_rank() -> None:
    """Rank 0 first sends, rank 1 first takes part in the collective: only blocking operations meet crosswise."""

    def before(one: Action, other: Action) -> Callable[[list[Action]], object]:
        def edit(row: list[Action]) -> None:
            row.remove(one)
            row.insert(row.index(other), one)

        return edit

    program = spread(ranks=2, microbatches=2, rules=MPI_SYNCHRONOUS)
    assert verify(program).ok
    crossed = edited(program, 0, before(Action(0, Kind.SEND_F, 0), Action(0, Kind.SUM_E, 1)))
    crossed = edited(crossed, 0, before(Action(0, Kind.F, 0), Action(0, Kind.SEND_F, 0)))
    crossed = edited(crossed, 1, before(Action(1, Kind.SUM_E, 1), Action(1, Kind.RECV_F, 0)))
    proof = verify(crossed)
    assert proof.faults[0].rule == "deadlock", proof
    assert "SUM_E1" in proof.faults[0].message
    assert "SEND 0F0" in proof.faults[0].message
    assert run(crossed) is not None
    assert verify(replace(crossed, semantics=MPI)).ok


def test_an_embedding_that_no_gradient_reaches_is_refused() -> None:
    with pytest.raises(LayoutError, match="trainable_from = 1 lets no gradient get below"):
        lower(generate("1f1b", 2, 2), MPI, trainable_from=1, vocabulary=Vocabulary())
    whole = lower(generate("1f1b", 2, 2), MPI, trainable_from=1, vocabulary=Vocabulary(embedding=False))
    assert "no gradient gets below stage 1" in str(verify(replace(whole, vocabulary=Vocabulary())))


def test_actions_of_a_spread_vocabulary_in_a_program_without_one_are_refused() -> None:
    assert "belongs to a spread vocabulary, which this program has not" in str(
        verify(replace(spread(), vocabulary=None))
    )


# ---- values, pictures, times ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("trained", [(True, True), (True, False), (False, True), (False, False)])
def test_it_goes_through_text_and_back(trained: tuple[bool, bool]) -> None:
    program = lower(generate("zb-h1", 3, 4), NCCL_RANK, vocabulary=Vocabulary(*trained))
    assert loads(dumps(program)) == program
    with pytest.raises(FormatError, match=r"'hat' are no parts of a vocabulary"):
        loads(dumps(program).replace(next(w for w in dumps(program).splitlines() if "vocab" in w), "vocabulary hat"))


def test_it_is_drawn_traced_and_compared() -> None:
    program = spread()
    timeline = simulate(program, COSTS)
    assert "+" in text(simulate(program, replace(COSTS, logits=6)))
    assert "1S0" in svg(timeline)
    names = {event["name"]: event for event in json.loads(chrome_trace(timeline))["traceEvents"]}
    assert names["1S0"]["ph"] == "X"
    assert names["1CAST_H0"]["ph"] in "be"
    assert "vocabulary is" in str(Difference(program, replace(program, vocabulary=None)))
    assert sum(timeline.busy) == 3 * 4 * (12 + 24 + 2 + 1 + 1)


def test_a_backward_is_delayed_by_as_many_forwards() -> None:
    schedule = generate("1f1b", 2, 4)
    assert str(schedule.rows[0]) == "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3"
    assert str(delay_backwards(schedule, 1).rows[0]) == "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3"
    assert delay_backwards(schedule, 0) == schedule
    with pytest.raises(LayoutError, match="lag = -1 must be an integer >= 0"):
        delay_backwards(schedule, -1)


@given(schedules(ranks=6, chunks=3, microbatches=20), st.integers(0, 5))
@settings(max_examples=50)
def test_a_delayed_schedule_does_the_same_and_keeps_no_more_than_the_lag(schedule: Schedule, lag: int) -> None:
    later = delay_backwards(schedule, lag)
    assert verify(later).ok
    assert [sorted(row) for row in later.rows] == [sorted(row) for row in schedule.rows]
    costs = Costs(1, 2)
    for before, after in zip(simulate(schedule, costs).peaks, simulate(later, costs).peaks, strict=True):
        assert after <= before + lag


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "gpipe"])
def test_where_the_head_weighs_as_much_as_layers_spreading_it_is_faster_than_the_best_cut(name: str) -> None:
    """32 layers on 8 ranks and a head of 2.4 layers: whatever the cut, the heaviest stage has 5 or 2 + 2.4."""
    ranks, head = 8, 2.4
    schedule = generate(name, ranks, 32)
    costs = Costs(4, 8, logits=2 * head / ranks, head_gradient=head / ranks, broadcast=0.02, total=0.02)
    program = lower(delay_backwards(schedule, 2), MPI, vocabulary=Vocabulary())
    best_cut = [4, 4, 4, 4, 4, 5, 5, 2 + head]
    cut = simulate(schedule, Costs(best_cut, [2 * time for time in best_cut])).makespan
    assert simulate(program, costs).makespan < 0.92 * cut


def test_collectives_of_a_micro_batch_follow_one_another_alike_on_all_ranks() -> None:
    program = spread("interleaved", 4, 8, NCCL_RANK, 2)
    orders = {tuple(a[1:] for a in row if a.kind in VOCABULARY_COLLECTIVES) for row in program.rows}
    assert len(orders) == 1
    assert len(orders.pop()) == 5 * 8
