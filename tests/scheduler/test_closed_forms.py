"""Memory and idle time of every schedule as its paper gives them, counted by their definitions, for all layouts.

Other tests hold the simulator to the same figures; here neither it nor anything but the generators is asked.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipert.scheduler.action import Kind
from pipert.scheduler.generators.registry import GENERATORS, generate
from tests.scheduler.by_definition import idle, peaks

PUBLISHED = Path(__file__).resolve().parents[3] / "shared" / "data" / "zero_bubble_table.csv"

EQUAL = {Kind.F: 1.0, Kind.B: 2.0, Kind.I: 1.0, Kind.W: 1.0}
#: Whole numbers, so that sums are exact; W is the shortest.
UNEQUAL = {Kind.F: 5.0, Kind.B: 7.0, Kind.I: 4.0, Kind.W: 3.0}
WORK = UNEQUAL[Kind.F] + UNEQUAL[Kind.B]


def layouts(least: Callable[[int], int] = lambda p: 1) -> Iterator[tuple[int, int]]:
    """1 to 16 ranks p with every number of micro-batches m ≥ `least` about which schedules change, and 40."""
    for p in range(1, 17):
        for m in sorted({1, 2, p - 1, p, p + 1, 2 * p - 2, 2 * p - 1, 2 * p, 2 * p + 1, 40 if p in (1, 5, 16) else p}):
            if max(1, least(p)) <= m <= 40:
                yield p, m


# ---- memory ----

#: Activations of one stage that each rank r keeps. In a V two of them are one of a schedule with one stage a rank: so
#: V-Half keeps p/2 + 1, V-Min about p/3 and DualPipeV p + 1/2.
PEAKS: dict[str, Callable[[int, int, int], int]] = {
    "gpipe": lambda p, m, r: m,
    "looped-bfs": lambda p, m, r: 2 * m,
    "1f1b": lambda p, m, r: min(m, p - r),
    "1f1b-eager": lambda p, m, r: min(m, 2 * (p - r) - 1),
    "zb-h1": lambda p, m, r: min(m, p),
    "zb-h2": lambda p, m, r: min(m, 2 * p - 1),
}
MOST_IN_A_V: dict[str, Callable[[int], int]] = {
    "zb-v": lambda p: 2 * p,
    "v-half": lambda p: p + 2,
    "v-min": lambda p: 2 * ((p + 4) // 3),
    "dual-pipe-v": lambda p: 2 * p + 1,
}


@pytest.mark.parametrize("name", PEAKS)
def test_every_rank_keeps_as_much_as_published(name: str) -> None:
    for p, m in layouts():
        made = generate(name, p, m, 2 if GENERATORS[name].chunked else 1)
        assert peaks(made) == [PEAKS[name](p, m, rank) for rank in range(p)], (p, m)


@pytest.mark.parametrize("name", MOST_IN_A_V)
def test_the_fullest_rank_of_a_v_keeps_as_much_as_published(name: str) -> None:
    for p, m in layouts():
        assert max(peaks(generate(name, p, m))) == min(2 * m, MOST_IN_A_V[name](p)), (p, m)


# ---- idle time ----


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_first_and_last_passage_are_idle(name: str) -> None:
    for p, m in layouts():
        assert idle(generate(name, p, m), UNEQUAL)[0] == [(p - 1) * WORK] * p, (p, m)


@pytest.mark.parametrize("chunks", [2, 3])
def test_interleaving_divides_the_idle_time_and_adds_messages(chunks: int) -> None:
    """WORK and the times are of one stage here; a rank's are `chunks` times as long."""
    for p, m in layouts(lambda p: p):
        if m <= 16:
            made = generate("interleaved", p, m, chunks)
            assert idle(made, UNEQUAL)[0] == [(p - 1) * WORK] * p, (p, m)
            if m % p == 0 and p > 1:
                assert max(idle(made, UNEQUAL, 1)[0]) == (p - 1) * WORK + 2 * p * chunks - 2, (p, m)


def test_zb_h1_idles_p_minus_1_times_f_plus_i_minus_w() -> None:
    for p, m in layouts(lambda p: p):
        made = generate("zb-h1", p, m)
        assert idle(made, UNEQUAL)[0] == [(p - 1) * (5 + 4 - 3)] * p, (p, m)
        if m > p:
            assert max(idle(made, UNEQUAL, 1)[1]) == (p - 1) * (5 + 4 - 3 + 4), (p, m)


def test_zb_h2_idles_p_minus_1_times_f_plus_i_minus_2_w() -> None:
    for p, m in layouts(lambda p: 2 * p - 1):
        made = generate("zb-h2", p, m)
        assert max(idle(made, UNEQUAL)[1]) == (p - 1) * (5 + 4 - 2 * 3), (p, m)
        assert max(idle(made, UNEQUAL, 1)[1]) == (p - 1) * (5 + 4 - 2 * 3 + 2), (p, m)


def test_zb_v_and_dual_pipe_v_idle_only_while_the_first_micro_batch_is_on_its_way() -> None:
    for p, m in layouts(lambda p: 2 * p - 1):
        whole, own = idle(generate("zb-v", p, m), EQUAL)
        assert (whole, max(own)) == ([p - 1] * p, 0), (p, m)
        if m >= 2 * p:
            assert idle(generate("dual-pipe-v", p, m), EQUAL)[0] == [p - 1] * p, (p, m)


def test_v_half_and_v_min_idle_a_half_and_two_thirds_of_1f1b() -> None:
    """1F1B idles 6 (p − 1) in these units: a sixth of what a rank does for a micro-batch."""
    for p, m in layouts(lambda p: p):
        half = {1: 0, 2: 3}.get(p, 3 * p - (5 if p % 2 else 4))
        least = 4 * p - (5 if p % 3 else 3) if p > 1 else 0
        assert idle(generate("v-half", p, m), EQUAL)[0] == [half] * p, (p, m)
        assert idle(generate("v-min", p, m), EQUAL)[0] == [least] * p, (p, m)


@pytest.mark.skipif(not PUBLISHED.exists(), reason="the published measurements are not here")
def test_the_published_bubbles() -> None:
    """Qi et al. 2024 (arXiv 2401.10241): bubble rates from profiled times and one hop of communication."""
    for row in csv.DictReader(PUBLISHED.open()):
        f, i, w, hop = (float(row[f"t_{name}_ms"]) for name in ("f", "b", "w", "comm"))
        p, m = int(row["stages"]), int(row["microbatches"])
        work, seconds = m * (f + i + w), {Kind.F: f, Kind.B: i + w, Kind.I: i, Kind.W: w}
        closed = {
            "1f1b": (p - 1) * (f + i + w) + 2 * hop * (m + p - 1) * (p - 1) / p,
            "zb-h1": (p - 1) * (f + i - w + 4 * hop),
            "zb-h2": (p - 1) * (f + i - 2 * w + 2 * hop),
        }
        for name, formula in closed.items():
            published = pytest.approx(float(row[f"bubble_{name.replace('-', '_')}"]), abs=2e-4)
            whole, own = idle(generate(name, p, m), seconds, hop)
            counted = whole[0] if name == "1f1b" else max(own)
            assert formula / (formula + work) == published, name
            assert counted / (counted + work) == published, name
