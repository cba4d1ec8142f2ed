"""In which order pairs of ranks get their communicators, and when a GPU has too few queues for them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipert.comm.errors import TransportError
from pipert.comm.rccl_pairs import check_queues, most_lanes, rounds

PAIRS = st.tuples(st.integers(0, 9), st.integers(0, 9)).filter(lambda pair: pair[0] < pair[1])


@given(st.sets(PAIRS))
def test_every_pair_is_in_one_round_and_every_rank_once_in_each(pairs: set[tuple[int, int]]) -> None:
    found = rounds(pairs)
    assert sorted(pair for each in found for pair in each) == sorted(pairs)
    for each in found:
        ranks = [rank for pair in each for rank in pair]
        assert len(ranks) == len(set(ranks))
    assert most_lanes(pairs) == max((sum(rank in pair for pair in pairs) for rank in range(10)), default=0)
    assert found == rounds(sorted(pairs, reverse=True))


@pytest.mark.parametrize("size", [2, 3, 4, 7, 64])
def test_a_pipeline_takes_two_rounds_however_long_it_is(size: int) -> None:
    assert len(rounds((rank, rank + 1) for rank in range(size - 1))) == min(2, size - 1)


def test_more_queues_than_the_gpu_runs_at_once_are_refused_with_the_remedy() -> None:
    check_queues(2, {}, hip=True)
    check_queues(6, {}, hip=False)
    check_queues(4, {"GPU_MAX_HW_QUEUES": "8"}, hip=True)
    with pytest.raises(TransportError, match=r"4 streams for messages.*runs 4 queues.*set GPU_MAX_HW_QUEUES=8 before"):
        check_queues(4, {}, hip=True)
    with pytest.raises(TransportError, match=r"runs 1 queues.*set CUDA_DEVICE_MAX_CONNECTIONS=8"):
        check_queues(2, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, hip=False)
