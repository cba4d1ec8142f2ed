"""Zero-bubble and V-shaped schedules: drawings, closed forms of idle time, memory, and the published bubbles."""

from __future__ import annotations

import csv
from collections.abc import Callable
from inspect import cleandoc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipert.scheduler.action import Kind
from pipert.scheduler.costs import Costs
from pipert.scheduler.draw.text import text as draw
from pipert.scheduler.generators.dual_pipe_v import dual_pipe_v
from pipert.scheduler.generators.one_f_one_b import one_f_one_b
from pipert.scheduler.generators.registry import GENERATORS, generate
from pipert.scheduler.generators.v_shape import v_half, v_min
from pipert.scheduler.generators.zb_v import zb_v
from pipert.scheduler.generators.zero_bubble import zb_h1, zb_h2, zero_bubble
from pipert.scheduler.placement import Placement
from pipert.scheduler.schedule import Schedule
from pipert.scheduler.simulate import simulate
from pipert.scheduler.timeline import Timeline
from pipert.scheduler.verify import verify

PUBLISHED = Path(__file__).resolve().parents[3] / "shared" / "data" / "zero_bubble_table.csv"

FLAT = (zb_h1, zb_h2)
V_SHAPED = (zb_v, v_half, v_min, dual_pipe_v)

ranks_, microbatches_ = st.integers(1, 16), st.integers(1, 40)
#: F, I and W take the same time.
EQUAL = Costs(1, 2)


def own_idle(timeline: Timeline) -> float:
    """The most that a rank idles between its own first and last action."""
    return max(timeline.idle_within)


ZB_H1 = """
rank 0 │F0─F1─F2─F3─·········I0═W0~F4─I1═W1~F5─I2═W2~F6─I3═W3~F7─I4═W4~I5═W5~I6═W6~I7═W7~│
rank 1 │···F0─F1─F2─······I0═F3─I1═W0~F4─I2═W1~F5─I3═W2~F6─I4═W3~F7─I5═W4~I6═W5~I7═W6~W7~│
rank 2 │······F0─F1─···I0═F2─I1═F3─I2═W0~F4─I3═W1~F5─I4═W2~F6─I5═W3~F7─I6═W4~I7═W5~W6~W7~│
rank 3 │·········F0─I0═F1─I1═F2─I2═F3─I3═W0~F4─I4═W1~F5─I5═W2~F6─I6═W3~F7─I7═W4~W5~W6~W7~│
        0                                                                              27
"""

ZB_H2 = """
rank 0 │F0─F1─F2─F3─F4─F5─F6─I0═W0~F7─I1═I2═W1~W2~I3═I4═W3~W4~I5═I6═W5~W6~I7═W7~·········│
rank 1 │···F0─F1─F2─F3─F4─I0═F5─I1═F6─I2═W0~F7─I3═I4═W1~W2~I5═I6═W3~W4~I7═W5~W6~W7~······│
rank 2 │······F0─F1─F2─I0═F3─I1═F4─I2═F5─I3═F6─I4═W0~F7─I5═I6═W1~W2~I7═W3~W4~W5~W6~W7~···│
rank 3 │·········F0─I0═F1─I1═F2─I2═F3─I3═F4─I4═F5─I5═F6─I6═W0~F7─I7═W1~W2~W3~W4~W5~W6~W7~│
        0                                                                              27
"""

ZB_V = """
rank 0 │F0F1F2F3F4F0I0W0F1I1W1F2I2W2F5I0W0F3I3W3I1W1F4I4W4I2W2F5I5I3W5I4W3I5W4W5····│
rank 1 │··F0F1F2F0F3F1I0W0F2I1W1F4I0W0F3I2W2F5I1W1F4I3W3I2W2F5I4I3I5I4W4I5W3W5W4W5··│
rank 2 │····F0F0F1F1F2F2I0W0F3I0W0F3I1W1F4I1W1F4I2W2F5I2W2F5I3I3I4I4I5I5W3W3W4W4W5W5│
        0                                                                         38
"""

V_HALF = """
rank 0 │F0F1··········F0I0F2W0··F1I1F3W1··F2I2F4I0W2W0F3I3F5I1W3W1F4I4I2W4W2F5I5I3W5W3··I4W4I5W5│
rank 1 │··F0F1······F0····I0F2F1W0··I1F3F2W1I0I2F4W0F3W2I1I3F5W1F4W3I2I4W2F5W4I3I5W3W5I4W4I5W5··│
rank 2 │····F0····F0F1····F1I0F2W0··F2I1F3I0W1W0F3I2F4I1W2W1F4I3F5I2W3W2F5I4I3W4W3I5I4W5I5W4W5··│
rank 3 │······F0F0····F1F1····I0F2F2I0W0I1F3W0F3I1W1I2F4W1F4I2W2I3F5W2F5I3W3I4I4W3W4I5I5W4W5W5··│
        0                                                                                     44
"""

V_MIN = """
rank 0 │F0F1··········F0I0F2W0····F1I1I0W1F3W0F2I2I1W2F4W1F3I3I2W3F5W2F4I4I3W4W3··F5I5I4W5W4······I5W5│
rank 1 │··F0········F0F1··I0W0··F1F2I0I1W0W1F2F3I1I2W1W2F3F4I2I3W2W3F4F5I3I4W3W4F5··I4I5W4W5····I5W5··│
rank 2 │····F0····F0····F1··I0F1W0I0F2W0I1F2W1I1F3W1I2F3W2I2F4W2I3F4W3I3F5W3I4F5W4I4W4··I5W5··I5W5····│
rank 3 │······F0F0········F1F1I0I0W0W0F2F2I1I1W1W1F3F3I2I2W2W2F4F4I3I3W3W3F5F5I4I4W4W4····I5I5W5W5····│
        0                                                                                           47
"""

DUAL_PIPE_V = """
rank 0 │F0─F1─F2─F0─I0═W0~F1─F3─B1━━━━F2─B0━━━━B2━━━━F3─···B1━━━━B3━━━━I2═W2~I3═W3~│
rank 1 │···F0─F0─F1─F1─F2─B0━━━━F2─B0━━━━F3─B1━━━━F3─B1━━━━B2━━━━B2━━━━I3═I3═W3~W3~│
        0                                                                        25
"""


@pytest.mark.parametrize(
    ("make", "numbers", "drawing"),
    [
        (zb_h1, (4, 8), ZB_H1),
        (zb_h2, (4, 8), ZB_H2),
        (zb_v, (3, 6), ZB_V),
        (v_half, (4, 6), V_HALF),
        (v_min, (4, 6), V_MIN),
        (dual_pipe_v, (2, 4), DUAL_PIPE_V),
    ],
)
def test_a_schedule_looks_as_its_docstring_draws_it(
    make: Callable[..., Schedule], numbers: tuple[int, ...], drawing: str
) -> None:
    drawn = draw(simulate(make(*numbers), EQUAL), width=105)
    assert drawn == drawing.strip("\n")
    assert drawn in cleandoc(make.__doc__ or "").replace("\n    ", "\n")


@given(st.sampled_from([*FLAT, *V_SHAPED]), ranks_, microbatches_)
def test_any_layout_is_proved_and_has_its_stages_in_place(
    make: Callable[[int, int], Schedule], ranks: int, microbatches: int
) -> None:
    made = make(ranks, microbatches)
    verify(made).require()
    assert made.placement == (Placement.v(ranks) if make in V_SHAPED else Placement.linear(ranks))


@given(st.sampled_from([*FLAT, *V_SHAPED]), ranks_, microbatches_)
def test_every_weight_accumulates_its_microbatches_in_order(
    make: Callable[[int, int], Schedule], ranks: int, microbatches: int
) -> None:
    for row in make(ranks, microbatches).rows:
        for stage in set(row.stages.tolist()):
            for kinds in ({Kind.F}, {Kind.B, Kind.I}, {Kind.B, Kind.W}):
                order = [action.microbatch for action in row if action.stage == stage and action.kind in kinds]
                assert order == list(range(microbatches))


# ---- idle time ----


def test_zb_h1_idles_3_where_1f1b_idles_9() -> None:
    assert simulate(one_f_one_b(4, 8), EQUAL).idle == (9, 9, 9, 9)
    assert simulate(zb_h1(4, 8), EQUAL).idle == (3, 3, 3, 3)


@given(ranks_, microbatches_, st.integers(1, 5), st.integers(0, 5), st.integers(0, 5))
def test_the_flat_ones_idle_as_in_the_paper_where_w_is_the_shortest(
    ranks: int, extra: int, weight: int, more_f: int, more_i: int
) -> None:
    forward, inputs = weight + more_f, weight + more_i
    costs = Costs(forward, inputs + weight, inputs, weight)
    h1, h2 = zb_h1(ranks, ranks + extra), zb_h2(ranks, 2 * ranks - 2 + extra)
    assert simulate(h1, costs).idle == ((ranks - 1) * (forward + inputs - weight),) * ranks
    assert own_idle(simulate(h2, costs)) == (ranks - 1) * (forward + inputs - 2 * weight)


@given(ranks_, microbatches_)
def test_zb_v_has_no_bubble_with_equal_times_and_enough_microbatches(ranks: int, extra: int) -> None:
    timeline = simulate(zb_v(ranks, 2 * ranks - 2 + extra), EQUAL)
    assert own_idle(timeline) == 0
    assert timeline.idle == (ranks - 1,) * ranks  # one rank starts after the other: nobody can do better


@given(st.integers(2, 16), microbatches_)
def test_v_half_and_v_min_idle_less_than_1f1b(ranks: int, extra: int) -> None:
    """1F1B idles 6 (ranks − 1) in these units: a sixth of what a rank does for a micro-batch."""
    m = ranks + extra
    half, least = simulate(v_half(ranks, m), EQUAL).idle[0], simulate(v_min(ranks, m), EQUAL).idle[0]
    assert half == (3 if ranks == 2 else 3 * ranks - (5 if ranks % 2 else 4))
    assert least == 4 * ranks - (5 if ranks % 3 else 3)
    assert half <= 6 * (ranks - 1) / 2 + 2
    assert simulate(one_f_one_b(ranks, m), Costs(2, 4)).idle[0] == 6 * (ranks - 1)


@given(ranks_, microbatches_)
def test_dual_pipe_v_idles_for_the_first_passage(ranks: int, extra: int) -> None:
    assert simulate(dual_pipe_v(ranks, 2 * ranks - 1 + extra), EQUAL).idle == (ranks - 1,) * ranks


@pytest.mark.skipif(not PUBLISHED.exists(), reason="the published measurements are not here")
def test_the_published_bubbles() -> None:
    """Qi et al. 2024 (arXiv 2401.10241): bubble rates from profiled times and one hop of communication."""
    for row in csv.DictReader(PUBLISHED.open()):
        f, i, w, hop = (float(row[f"t_{name}_ms"]) for name in ("f", "b", "w", "comm"))
        p, m = int(row["stages"]), int(row["microbatches"])
        work, costs = m * (f + i + w), Costs(f, i + w, i, w, comm=hop)
        closed = {"zb_h1": (p - 1) * (f + i - w + 4 * hop), "zb_h2": (p - 1) * (f + i - 2 * w + 2 * hop)}
        v = {"1.5B": 3, "6.2B": 4, "14.6B": 3, "28.3B": 2}[row["model"]]  # layers a rank, one a chunk
        closed["interleaved"] = (p - 1) * (f + i + w) / v + (2 * p * v - p - 2) * hop
        interleaved = closed["interleaved"] / (closed["interleaved"] + work)
        assert interleaved == pytest.approx(float(row["bubble_interleaved"]), abs=2e-4)
        for name, make in (("zb_h1", zb_h1), ("zb_h2", zb_h2)):
            published = pytest.approx(float(row[f"bubble_{name}"]), abs=2e-4)
            assert closed[name] / (closed[name] + work) == published
            idle = own_idle(simulate(make(p, m), costs))
            assert idle / (idle + work) == published


# ---- memory ----


@given(ranks_, microbatches_)
def test_peak_activations_of_the_flat_ones(ranks: int, microbatches: int) -> None:
    for make, peak in ((zb_h1, ranks), (zb_h2, 2 * ranks - 1)):
        peaks = simulate(make(ranks, microbatches), EQUAL).peaks
        assert max(peaks) == min(microbatches, peak)


@given(ranks_, st.integers(1, 32), microbatches_)
def test_a_flat_zero_bubble_schedule_keeps_to_any_limit(ranks: int, limit: int, microbatches: int) -> None:
    made = zero_bubble("mine", ranks, microbatches, limit)
    verify(made, limits=max(limit, ranks)).require()


@given(ranks_, st.integers(2, 40), st.integers(1, 8))
def test_more_memory_never_makes_a_flat_schedule_slower(ranks: int, microbatches: int, more: int) -> None:
    few, many = (zero_bubble("mine", ranks, microbatches, limit) for limit in (ranks, ranks + more))
    assert own_idle(simulate(many, EQUAL)) <= own_idle(simulate(few, EQUAL))


@given(ranks_, microbatches_)
def test_peak_activations_of_the_v_shaped_ones_in_single_stages(ranks: int, microbatches: int) -> None:
    """Two of one stage are as much as one of a flat schedule, whose stages are twice as large."""
    limits = {zb_v: 2 * ranks, v_half: ranks + 2, v_min: 2 * ((ranks + 4) // 3), dual_pipe_v: 2 * ranks + 1}
    for make, limit in limits.items():
        peaks = simulate(make(ranks, microbatches), EQUAL).peaks
        assert max(peaks) <= limit
        if microbatches > 3 * ranks and ranks > 1:
            assert max(peaks) == limit


# ---- speed ----


@pytest.mark.parametrize("name", [name for name, entry in GENERATORS.items() if not entry.chunked])
def test_64_ranks_and_1024_microbatches_are_generated(name: str) -> None:
    generate(name, 64, 128)  # compiles, once a machine
    made = generate(name, 64, 1024)
    assert made.microbatches == 1024
