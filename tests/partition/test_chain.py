from __future__ import annotations

from itertools import pairwise
from math import fsum, inf, nan
from time import perf_counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipert.errors import PartitionError
from pipert.partition import chain_cuts, kernels
from pipert.partition.chain import Reach
from tests.partition.brute_force import best, chains, rank


def counts(costs: list[float], stages: int) -> list[int]:
    return [b - a for a, b in pairwise(chain_cuts(costs, stages))]


def ranges(cuts: list[int]) -> list[range]:
    return [range(a, b) for a, b in pairwise(cuts)]


@pytest.mark.parametrize(
    ("blocks", "stages", "answer"),
    [
        (5, 4, [2, 1, 1, 1]),
        (42, 16, [3] * 10 + [2] * 6),
        (38, 8, [5] * 6 + [4] * 2),
        (30, 4, [8, 8, 7, 7]),
        (10, 3, [4, 3, 3]),
        (7, 7, [1] * 7),
        (7, 1, [7]),
    ],
)
@pytest.mark.parametrize("unit", [1.0, 0.1, 3e-9, 7e12])
def test_equal_blocks_are_spread_evenly_and_none_is_lost(
    blocks: int, stages: int, answer: list[int], unit: float
) -> None:
    assert counts([unit] * blocks, stages) == answer


@pytest.mark.parametrize(("blocks", "stages"), [(3, 4), (3, 0), (3, -1), (0, 1)])
def test_stages_without_a_block_are_refused(blocks: int, stages: int) -> None:
    with pytest.raises(PartitionError, match=f"{blocks} blocks on {stages} stages.*every stage needs a block"):
        chain_cuts([1.0] * blocks, stages)


@pytest.mark.parametrize("stages", [2.0, "2", None, True])
def test_a_number_of_stages_that_is_no_whole_number_is_refused(stages: int) -> None:
    with pytest.raises(PartitionError, match=r"stages = .* must be a whole number"):
        chain_cuts([1.0] * 3, stages)


def test_costs_whose_sum_is_beyond_all_floats_or_next_to_nothing_are_cut_all_the_same() -> None:
    assert counts([1e308] * 5, 4) == counts([5e-324] * 5, 4) == [2, 1, 1, 1]
    assert counts([1e308, 1.0, 1.0, 1e308], 2) == [3, 1]


@pytest.mark.parametrize("cost", [nan, inf, -1.0, 10**400, "1", None])
def test_a_cost_that_is_no_cost_is_refused(cost: float) -> None:
    with pytest.raises(PartitionError, match="block 1 costs"):
        chain_cuts([1.0, cost, 1.0], 2)


def test_spread_is_least_after_the_bottleneck_is() -> None:
    # 9 alone is the bottleneck; the five others split 3 + 2 on two stages, not 4 + 1 as filling up to 9 would do.
    assert counts([2.0, 2.0, 2.0, 2.0, 2.0, 9.0], 3) == [3, 2, 1]


def test_the_bottleneck_comes_before_the_spread() -> None:
    # 3 | 5 2 | 3 4 has the least maximum, 7; 8 | 5 | 4 would spread less around the mean.
    assert counts([3.0, 5.0, 2.0, 3.0, 4.0], 3) == [1, 2, 2]


COSTS = st.one_of(
    st.lists(st.integers(0, 9).map(float), min_size=1, max_size=10),
    st.lists(st.floats(0, 1e3, allow_subnormal=False), min_size=1, max_size=10),
    st.lists(st.sampled_from([0.1, 0.2, 0.3, 1e-6, 50.0]), min_size=1, max_size=10),
)


@settings(max_examples=400, deadline=None)
@given(COSTS, st.integers(1, 4))
def test_random_costs_are_cut_as_well_as_any_cut(costs: list[float], stages: int) -> None:
    if stages > len(costs):
        return
    found = rank(costs, ranges(chain_cuts(costs, stages)))
    bottleneck, spread = best(costs, chains(len(costs), stages), lambda _: True)
    scale = fsum(costs)
    assert found[0] == pytest.approx(bottleneck, abs=1e-12 * scale)
    assert found[1] == pytest.approx(spread, abs=1e-7 * max(bottleneck**2, 1e-300))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_limits_by_stage_are_kept_at_the_least_cost(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 9))
    stages = data.draw(st.integers(1, min(4, n)))
    costs = [float(c) for c in data.draw(st.lists(st.integers(0, 9), min_size=n, max_size=n))]
    kinds = data.draw(st.integers(1, stages))
    steps = st.lists(st.integers(0, n), min_size=n, max_size=n)
    rows = np.array([np.maximum(sorted(data.draw(steps)), np.arange(n)) for _ in range(kinds)], dtype=np.int64)
    which = tuple(data.draw(st.lists(st.integers(0, kinds - 1), min_size=stages, max_size=stages)))

    def allowed(assignment: list[range]) -> bool:
        return all(part.stop <= rows[which[s], part.start] for s, part in enumerate(assignment))

    bottleneck, spread = best(costs, chains(n, stages), allowed)  # type: ignore[arg-type]
    if bottleneck == inf:
        with pytest.raises(PartitionError, match="keeps the limits"):
            chain_cuts(costs, stages, Reach(rows, which))
    else:
        parts = ranges(chain_cuts(costs, stages, Reach(rows, which)))
        assert allowed(parts)
        assert rank(costs, parts) == pytest.approx((bottleneck, spread), abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.integers(5, 60), st.integers(2, 12), st.integers(0, 10**6), st.sampled_from(["unit", "few", "real", "giant"]))
def test_both_searches_agree_where_limits_are_equal(n: int, stages: int, seed: int, kind: str) -> None:
    """The price search against the dynamic program over layers, which also knows nothing of each other's ties."""
    rng = np.random.default_rng(seed)
    costs = {
        "unit": np.ones(n),
        "few": rng.integers(0, 4, n).astype(float),
        "real": rng.random(n),
        "giant": np.concatenate((rng.random(n - 1), [n / 4])),
    }[kind].tolist()
    stages = min(stages, n)
    one = chain_cuts(costs, stages)
    two = chain_cuts(costs, stages, Reach(np.full((2, n), n), (*(0,) * (stages - 1), 1)))
    assert rank(costs, ranges(one)) == pytest.approx(rank(costs, ranges(two)), rel=1e-6, abs=1e-9)
    if kind in ("unit", "few"):
        assert one == two, "ties are broken alike: the longest first stages"


@pytest.mark.parametrize("limits", [False, True])
def test_compiled_kernels_give_the_same_cuts(limits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(5)
    for n, stages in ((40, 7), (200, 30)):
        costs = rng.lognormal(size=n).tolist()
        rows = np.minimum(np.arange(n) + np.array([[n], [9]]), n)
        reach = Reach(rows, tuple(s % 2 for s in range(stages))) if limits else None
        monkeypatch.setattr(kernels, "_SMALL", 10**9)
        plain = chain_cuts(costs, stages, reach)
        monkeypatch.setattr(kernels, "_SMALL", 0)
        assert chain_cuts(costs, stages, reach) == plain


def test_ten_thousand_blocks_on_a_thousand_stages_take_milliseconds() -> None:
    rng = np.random.default_rng(0)
    costs = rng.random(10_000).tolist()
    chain_cuts(costs, 1024)  # compiles
    times = []
    for _ in range(5):
        start = perf_counter()
        cuts = chain_cuts(costs, 1024)
        times.append(perf_counter() - start)
    assert len(cuts) == 1025
    assert min(np.diff(cuts)) >= 1
    assert min(times) < 0.1, "the bar of 20 ms is measured by benchmarks/partition.py; here only its order of magnitude"
