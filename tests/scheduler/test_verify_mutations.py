"""The verifier against an executor that follows the rules one event at a time: they agree on every program.

Valid programs of every schedule and transport are changed a little, or not at all. What the executor cannot bring to
its end must be refused, what it can must be accepted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipert.scheduler import compiled
from pipert.scheduler.action import Kind
from pipert.scheduler.generators.registry import GENERATORS, generate
from pipert.scheduler.lower import lower
from pipert.scheduler.lower.updates import update_program
from pipert.scheduler.placement import Placement
from pipert.scheduler.program import Program
from pipert.scheduler.schedule import Schedule
from pipert.scheduler.semantics import Semantics
from pipert.scheduler.verify import Proof, verify
from pipert.scheduler.vocabulary import Vocabulary
from tests.scheduler.brute_force import run
from tests.scheduler.layouts import ALL_SEMANTICS, any_semantics, lowering_options, schedules, v_shaped
from tests.scheduler.mutations import MUTATIONS, WAITING, Mutation, mutated, regrouped


def wrong_sum(program: Program) -> bool:
    """What the executor cannot see, since it moves no numbers.

    A copy is left out of a tied weight's sum, or it is summed before the replicas' reduction here and after it there.
    """
    there = {(action.stage, action.microbatch) for row in program.rows for action in row if action.kind is Kind.TIE}
    for tie, stages in enumerate(program.ties):
        present = [(stage, tie) in there for stage in stages]
        if any(present) and not all(present):
            return True
        late = set()
        for row in program.rows:
            sums = [at for at, action in enumerate(row) if action.kind is Kind.TIE and action.microbatch == tie]
            if sums:
                own = (action.kind for action in row[: sums[-1]] if action.stage == row[sums[-1]].stage)
                late.add(any(kind in (Kind.REDUCE, Kind.SCATTER) for kind in own))
        if len(late) > 1:
            return True
    return False


def agree(program: Program, limits: list[int] | None = None) -> Proof:
    """Check that verifier and executor agree, and that the answer can be printed."""
    proof, failure = verify(program, limits=limits), run(program, limits)
    failed = failure is not None or wrong_sum(program)
    shown = f"{program}\nexecutor: {failure}\nverifier: {proof}"
    assert proof.ok is not failed, shown
    assert str(proof)
    for fault in proof.faults:
        if fault.index is not None and fault.rank is not None and fault.action is not None:
            assert program.rows[fault.rank][fault.index] == fault.action, shown
    return proof


small_schedules = schedules(ranks=4, chunks=3, microbatches=8)


@given(small_schedules, any_semantics, st.data())
@settings(max_examples=300)
def test_verifier_and_executor_agree_on_every_mutant(schedule: Schedule, rules: Semantics, data: st.DataObject) -> None:
    program = lower(schedule, rules, **data.draw(lowering_options(schedule, spread=True)))
    mutations = data.draw(st.lists(st.sampled_from(MUTATIONS), max_size=3))
    random = Random(data.draw(st.integers(0, 2**32)))
    limits = data.draw(st.none() | st.lists(st.integers(0, 9), min_size=len(program.rows), max_size=len(program.rows)))
    mutant = mutated(program, mutations, random)
    agree(regrouped(mutant, random) if rules.grouped and random.random() < 0.5 else mutant, limits)


@given(small_schedules, any_semantics, any_semantics, st.data())
@settings(max_examples=200)
def test_verifier_and_executor_agree_on_programs_run_on_another_transport(
    schedule: Schedule, made_for: Semantics, run_on: Semantics, data: st.DataObject
) -> None:
    """A program lowered for one transport and executed on another is the likeliest mistake, and often nearly right."""
    program = lower(schedule, made_for, **data.draw(lowering_options(schedule, spread=True)))
    agree(replace(program, semantics=run_on, groups=program.groups if run_on.grouped else ()))


def random_update(random: Random) -> Program:
    placement = random.choice((Placement.linear, Placement.v, lambda ranks: Placement.looped(ranks, 3)))
    parts = [kind for kind in (Kind.NORM, Kind.UNDO, Kind.STEP) if random.random() < 0.7]
    return update_program(
        placement(random.randint(1, 4)), random.choice(ALL_SEMANTICS), parts, zero=random.randint(0, 3)
    )


def random_program(random: Random) -> Program:
    if random.random() < 0.1:
        return random_update(random)
    name = random.choice([*GENERATORS, "v-shaped"])
    ranks, microbatches = random.randint(1, 4), random.randint(1, 8)
    chunks = random.randint(1, 3) if name != "v-shaped" and GENERATORS[name].chunked else 1
    schedule = v_shaped(ranks, microbatches) if name == "v-shaped" else generate(name, ranks, microbatches, chunks)
    stages = schedule.num_stages
    trainable_from = random.choice((0, 0, 0, stages, random.randint(0, stages)))
    spread = Vocabulary(trainable_from == 0 and random.random() < 0.7, random.random() < 0.7)
    vocabulary = spread if random.random() < 0.3 else None
    zero = random.choice((0, 0, 1, 2, 3) if vocabulary is None else (0, 1))
    copies = random.sample(range(trainable_from, stages), min(random.choice((0, 0, 2, 3)), stages - trainable_from))
    return lower(
        schedule,
        random.choice(ALL_SEMANTICS),
        trainable_from=trainable_from,
        ties=[copies] if len(copies) > 1 else [],
        vocabulary=vocabulary,
        reduce=zero > 0 or random.random() < 0.3,
        zero=zero,
        alike=random.random() < 0.7,
        early=random.random() < 0.5,
        offload={stage: random.randint(1, 2) for stage in range(stages) if random.random() < 0.4},
        meta=random.choice(((), (0,))),
        prefetch=random.randint(0, 2),
    )


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_no_mutant_of_any_kind_escapes_and_no_valid_one_is_refused(mutation: Mutation) -> None:
    random, outcomes = Random(mutation.__name__), Counter[bool]()
    for _ in range(150):
        outcomes[agree(mutated(random_program(random), [mutation], random)).ok] += 1
    assert outcomes[mutation.__name__ == "split_backward"] > 30  # the test tests something


def grouped_program(random: Random) -> Program:
    """A small program with groups, for rules under which messages wait; by tag, as most others are refused as swaps."""
    name = random.choice([*GENERATORS, "v-shaped"])
    ranks, microbatches = random.randint(2, 4), random.randint(1, 3)
    chunks = random.randint(1, 2) if name != "v-shaped" and GENERATORS[name].chunked else 1
    schedule = v_shaped(ranks, microbatches) if name == "v-shaped" else generate(name, ranks, microbatches, chunks)
    rules = Semantics(
        "drawn",
        buffered=random.random() < 0.2,
        blocking=random.random() < 0.5,
        matching=random.choice(("tag", "tag", "tag", "order")),
        channel=random.choice(("message", "pair", "direction", "rank", "rank")),
        grouped=True,
    )
    program = lower(schedule, rules, meta=random.choice(((), (), (0,))))
    return program if random.random() < 0.5 else regrouped(program, random)


@pytest.mark.parametrize("mutation", WAITING, ids=lambda mutation: mutation.__name__)
def test_groups_and_queues_that_hang_are_refused_and_no_others(mutation: Callable[[Program, Random], Program]) -> None:
    random, outcomes = Random(mutation.__name__), Counter[str]()
    for _ in range(100):
        program = mutation(grouped_program(random), random)
        for more in random.choices(WAITING, k=random.randint(1, 3)):
            program = more(program, random)
        proof = agree(program)
        outcomes["safe" if proof.ok else proof.faults[0].rule] += 1
    assert min(outcomes["deadlock"], outcomes["safe"]) >= 20, outcomes  # the test tests something


def test_compiled_and_plain_kernels_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    random = Random(1)
    programs = [mutated(random_program(random), random.choices(MUTATIONS[:5], k=2), random) for _ in range(400)]
    plain = [verify(program) for program in programs]
    monkeypatch.setattr(compiled, "WORTH_COMPILING", 0)
    assert [verify(program) for program in programs] == plain
    assert [verify(program.schedule) for program in programs] == [verify(program.schedule) for program in programs]
    assert {proof.faults[0].rule for proof in plain if not proof.ok} >= {"deadlock", "swap", "dependency"}
