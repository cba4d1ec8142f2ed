"""In which order pairs of ranks get their communicators, and when a GPU has too few queues for them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipert.comm.errors import TransportError
from pipert.comm.rccl_pairs import Queues, check_queues, queues_of, rounds

PAIRS = st.tuples(st.integers(0, 9), st.integers(0, 9)).filter(lambda pair: pair[0] < pair[1])


@given(st.sets(PAIRS))
def test_every_pair_is_in_one_round_and_every_rank_once_in_each(pairs: set[tuple[int, int]]) -> None:
    found = rounds(pairs)
    assert sorted(pair for each in found for pair in each) == sorted(pairs)
    for each in found:
        ranks = [rank for pair in each for rank in pair]
        assert len(ranks) == len(set(ranks))
    assert found == rounds(sorted(pairs, reverse=True))


@pytest.mark.parametrize("size", [2, 3, 4, 7, 64])
def test_a_pipeline_takes_two_rounds_however_long_it_is(size: int) -> None:
    assert len(rounds((rank, rank + 1) for rank in range(size - 1))) == min(2, size - 1)


def test_the_number_of_queues_is_the_variables_or_the_usual_one() -> None:
    gpu = torch.device("cuda", 1)
    assert queues_of(torch.device("cpu"), {}, hip=True) is None
    assert queues_of(gpu, {}, hip=True) == ("GPU_MAX_HW_QUEUES", 4)
    assert queues_of(gpu, {"GPU_MAX_HW_QUEUES": "8"}, hip=True) == ("GPU_MAX_HW_QUEUES", 8)
    assert queues_of(gpu, {"GPU_MAX_HW_QUEUES": "8"}, hip=False) == ("CUDA_DEVICE_MAX_CONNECTIONS", 8)


def test_more_streams_than_the_gpu_has_queues_are_refused_with_the_remedy() -> None:
    check_queues(2, 1, Queues("GPU_MAX_HW_QUEUES", 4))
    check_queues(4, 3, Queues("CUDA_DEVICE_MAX_CONNECTIONS", 8))
    with pytest.raises(TransportError, match=r"2 streams for messages, 2 for .*runs 4 queues.*GPU_MAX_HW_QUEUES=8 "):
        check_queues(2, 2, Queues("GPU_MAX_HW_QUEUES", 4))
    with pytest.raises(TransportError, match=r"runs 8 queues.*set CUDA_DEVICE_MAX_CONNECTIONS=9 before"):
        check_queues(4, 4, Queues("CUDA_DEVICE_MAX_CONNECTIONS", 8))
