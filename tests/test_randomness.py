"""Streams are named, repeatable and private to a thread."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from threading import Barrier

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipert import randomness
from pipert.randomness import Draw, current_draw, digest, drawing, stream

KEYS = st.lists(st.one_of(st.text(max_size=6), st.integers(-3, 300)), max_size=4).map(tuple)


def numbers(generator: torch.Generator) -> list[float]:
    return torch.rand(4, generator=generator).tolist()


@given(seed=st.integers(0, 2**63), key=KEYS)
def test_a_stream_is_the_same_every_time(seed: int, key: tuple[str | int, ...]) -> None:
    assert numbers(stream(seed, *key)) == numbers(stream(seed, *key))


@given(seeds=st.tuples(st.integers(0, 9), st.integers(0, 9)), keys=st.tuples(KEYS, KEYS))
def test_streams_of_different_names_differ(seeds: tuple[int, int], keys: tuple[tuple[str | int, ...], ...]) -> None:
    same = (seeds[0], *keys[0]) == (seeds[1], *keys[1])
    assert (digest(seeds[0], *keys[0]) == digest(seeds[1], *keys[1])) is same


def test_parts_of_a_key_are_not_glued_together() -> None:
    names = [(0, "ab", "c"), (0, "a", "bc"), (0, "abc"), (0, 1, 23), (0, 12, 3), (0, "1", 23), (0, "int1:1")]
    for left, right in combinations(names, 2):
        assert numbers(stream(*left)) != numbers(stream(*right))


def test_more_than_the_low_32_bits_of_the_digest_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(randomness, "digest", lambda seed, *key: key[0])
    assert numbers(stream(0, 5)) != numbers(stream(0, 5 + (1 << 52)))


def test_drawing_a_stream_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    numbers(stream(1, "weight"))
    assert torch.equal(before, torch.get_rng_state())


def test_numbers_do_not_depend_on_the_number_of_threads() -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = torch.empty(300_000).normal_(generator=stream(0, "w"))
        torch.set_num_threads(2)
        assert torch.equal(alone, torch.empty(300_000).normal_(generator=stream(0, "w")))
    finally:
        torch.set_num_threads(threads)


def test_drawing_nests_and_ends_also_after_an_error() -> None:
    outer, inner = Draw(0, 1, (0, 1)), Draw(0, 1, (2,))
    assert current_draw() is None
    with drawing(outer):
        with pytest.raises(ZeroDivisionError), drawing(inner):
            assert current_draw() == inner
            raise ZeroDivisionError
        assert current_draw() == outer
        with drawing(None):
            assert current_draw() is None
    assert current_draw() is None


def test_threads_do_not_see_each_others_draw() -> None:
    meeting = Barrier(4)

    def rank(index: int) -> bool:
        outside = current_draw() is None
        with drawing(Draw(0, index, (index,))):
            meeting.wait(timeout=10)
            return outside and current_draw() == Draw(0, index, (index,))

    with drawing(Draw(9, 9, ())), ThreadPoolExecutor(4) as pool:
        assert all(pool.map(rank, range(4)))
