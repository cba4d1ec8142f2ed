"""The property-test kit: on pipert's own generators, on PyTorch's, and on ones that are wrong."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipert.scheduler import testing
from pipert.scheduler.action import Action, Kind
from pipert.scheduler.costs import Costs
from pipert.scheduler.errors import LayoutError
from pipert.scheduler.formats import torch_csv
from pipert.scheduler.generators.one_f_one_b import one_f_one_b
from pipert.scheduler.generators.registry import GENERATORS, generate
from pipert.scheduler.lower import lower
from pipert.scheduler.program import Program
from pipert.scheduler.schedule import Schedule
from pipert.scheduler.semantics import MPI, NCCL_PAIR, Semantics
from pipert.scheduler.simulate import simulate
from pipert.scheduler.testing import assert_schedule_ok
from tests.scheduler.torch_schedules import CLASSES, as_csv, make

# ---- pipert's own ----


@pytest.mark.parametrize("name", GENERATORS)
def test_every_generator_is_safe_on_every_layout_and_named_transport(name: str) -> None:
    assert_schedule_ok(name, in_order=True, most_ranks=16, most_microbatches=40, most_chunks=4, examples=25)


@pytest.mark.parametrize(("name", "limit"), [("1f1b", 1), ("zb-h1", 1), ("zb-v", 2)])
def test_a_limit_may_depend_on_the_layout(name: str, limit: int) -> None:
    assert_schedule_ok(name, transport="mpi", limits=lambda ranks, _: limit * ranks)
    with pytest.raises(AssertionError, match=r"^ranks = 3, microbatches = 3\nunsafe: .*\n  limit at rank 0"):
        assert_schedule_ok(name, transport="mpi", limits=lambda ranks, _: limit * ranks - (ranks == 3))


def test_sums_in_another_order_are_found_if_that_is_asked() -> None:
    def last_two_exchanged(ranks: int, microbatches: int) -> Schedule:
        made = one_f_one_b(ranks, microbatches)
        other = {microbatches - 1: microbatches - 2, microbatches - 2: microbatches - 1} if microbatches > 1 else {}
        rows = [[a._replace(microbatch=other.get(a.microbatch, a.microbatch)) for a in row] for row in made.rows]
        return Schedule.of("exchanged", made.placement, microbatches, rows)

    assert_schedule_ok(last_two_exchanged)
    with pytest.raises(
        AssertionError, match=r"^ranks = 1, microbatches = 2\nrank 0: .* weight gradient of micro-batch 1"
    ):
        assert_schedule_ok(last_two_exchanged, in_order=True)


# ---- PyTorch's ----


def torch_program(name: str, *, defer: bool) -> Callable[[int, int], Schedule | Program]:
    """Torch's program with its messages, by ranks and micro-batches."""

    def generator(ranks: int, microbatches: int) -> Schedule | Program:
        made = make(name, ranks, microbatches, defer=defer)
        return torch_csv.loads(as_csv(made.pipeline_order_with_comms), name=name).value

    return generator


@pytest.mark.parametrize("name", CLASSES)
def test_torch_s_default_placement_of_receives_is_safe(name: str) -> None:
    transports = ("mpi", "gloo", "nccl-pair", "nccl-direction", "nccl-rank")
    assert_schedule_ok(torch_program(name, defer=False), transport=transports, most_ranks=6, most_microbatches=12)


@pytest.mark.parametrize("name", ["ZBVZeroBubble", "InterleavedZeroBubble", "DualPipeV"])
def test_torch_s_deferred_receives_swap_messages_where_these_are_matched_by_order(name: str) -> None:
    with pytest.raises(AssertionError, match=r"swap at rank 1, .* nccl-direction matches by order"):
        assert_schedule_ok(torch_program(name, defer=True), transport="nccl-direction", most_ranks=4)


@pytest.mark.parametrize("name", CLASSES)
def test_torch_s_deferred_receives_deadlock_with_one_channel_a_rank(name: str) -> None:
    with pytest.raises(
        AssertionError, match=r"ranks = 2, microbatches = [24]\nunsafe: .*\n  deadlock at rank 0"
    ) as found:
        assert_schedule_ok(torch_program(name, defer=True), transport="nccl-rank", most_ranks=4)
    assert "is queued behind SEND" in str(found.value)


@pytest.mark.parametrize("name", CLASSES)
def test_torch_s_deferred_receives_are_safe_where_messages_have_tags(name: str) -> None:
    assert_schedule_ok(torch_program(name, defer=True), transport=["mpi", "gloo"], most_ranks=4)


# ---- wrong ones ----


def late(ranks: int, microbatches: int) -> Schedule:
    """1F1B whose last rank does its second micro-batch's backward before the forward, from 3 ranks and 5 on."""
    made = one_f_one_b(ranks, microbatches)
    if ranks < 3 or microbatches < 5:
        return made
    rows = [list(row) for row in made.rows]
    here = rows[-1].index(Action(ranks - 1, Kind.F, 1))
    rows[-1][here : here + 2] = rows[-1][here : here + 2][::-1]
    return Schedule.of("late", made.placement, microbatches, rows)


def test_a_failure_is_shrunk_to_the_smallest_layout_with_the_picture() -> None:
    with pytest.raises(
        AssertionError, match=r"^ranks = 3, microbatches = 5\nunsafe: late, 3 ranks, .*\n  dependency at rank 2"
    ):
        assert_schedule_ok(late)


def test_stages_a_rank_are_tried_where_the_generator_has_a_third_argument() -> None:
    def broken(ranks: int, microbatches: int, chunks: int) -> Schedule:
        made = generate("interleaved", ranks, microbatches, chunks)
        return made if chunks < 2 else Schedule(made.name, made.placement, microbatches + 1, made.rows)

    with pytest.raises(AssertionError, match=r"^ranks = 1, microbatches = 1, chunks = 2\n.*\n  completeness"):
        assert_schedule_ok(broken)


def test_schedules_and_programs_are_judged_as_they_are() -> None:
    program = lower(generate("interleaved", 2, 4, 2), MPI, prefetch=0)
    assert_schedule_ok(program, transport="mpi")
    with pytest.raises(AssertionError, match=r"^unsafe: interleaved, .* for nccl-pair"):
        assert_schedule_ok(program, transport=NCCL_PAIR)
    assert_schedule_ok(one_f_one_b(4, 8), limits=4)
    with pytest.raises(AssertionError, match=r"^unsafe: 1f1b, "):
        assert_schedule_ok(one_f_one_b(4, 8), limits=[4, 3, 2, 0])


def test_layouts_that_a_generator_refuses_are_left_out_unless_it_refuses_all() -> None:
    def even(ranks: int, microbatches: int) -> Schedule:
        if microbatches % 2:
            raise LayoutError("an even number, please")
        return one_f_one_b(ranks, microbatches)

    def none(ranks: int, microbatches: int) -> Schedule:
        raise ValueError("no")

    assert_schedule_ok(even, transport="mpi")
    with pytest.raises(LayoutError, match=r"the generator refuses every layout up to \(8, 16, 1\)"):
        assert_schedule_ok(none)
    with pytest.raises(LayoutError, match=r"no schedule is called '1f1c'.* 1f1b"):
        assert_schedule_ok("1f1c")
    with pytest.raises(LayoutError, match="no transport to test for"):
        assert_schedule_ok("1f1b", transport=[])
    with pytest.raises(LayoutError, match="3 makes no schedule; give a schedule, a program, a name, or a function"):
        assert_schedule_ok(3)  # type: ignore[arg-type]


def test_a_generator_that_returns_something_else_is_told_so_with_the_layout() -> None:
    def rows(ranks: int, microbatches: int) -> Any:
        return None if ranks < 2 else one_f_one_b(ranks, microbatches)

    with pytest.raises(AssertionError, match=r"^ranks = 1, microbatches = 1\nthe generator returns None; return a Sch"):
        assert_schedule_ok(rows)


# ---- strategies ----


@given(testing.transports(matching="order"), testing.transports())
def test_transports_can_be_chosen_by_their_rules(by_order: Semantics, any_one: Semantics) -> None:
    assert by_order.matching == "order"
    assert isinstance(any_one, Semantics)


@given(st.data())
def test_costs_fit_the_stages_that_they_are_for(data: st.DataObject) -> None:
    made = data.draw(testing.schedules(most_ranks=4, most_microbatches=6, most_chunks=2))
    costs = data.draw(testing.costs(made.num_stages))
    assert costs.table(made.num_stages).min() >= 0
    assert simulate(made, costs).makespan >= 0


def test_smallest_examples_are_the_smallest_layouts() -> None:
    from hypothesis import find

    assert find(testing.schedules(["zb-v"]), lambda _: True) == generate("zb-v", 1, 1)
    assert find(testing.ranks(), lambda count: count > 3) == 4
    assert find(testing.microbatches(), lambda _: True) == find(testing.chunks(), lambda _: True) == 1
    assert isinstance(find(testing.costs(2), lambda _: True), Costs)


def test_hypothesis_is_imported_only_when_it_is_used() -> None:
    code = "import sys, pipert.scheduler.testing; sys.exit('hypothesis' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


# ---- documentation ----

PAGE = (Path(__file__).parents[2] / "docs" / "testing-schedules.md").read_text(encoding="utf-8")


def test_the_page_s_examples_pass_and_fail_as_it_says() -> None:
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(code, "testing-schedules.md", "exec"), names)
    failures = []
    for name, test in list(names.items()):
        if name.startswith("test_"):
            try:
                test()
            except AssertionError as error:
                failures.append(str(error).partition("\nFailing test case")[0])
    assert failures == [text.rstrip() for text in re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)]
