"""Parts of parameters and the whole are turned into each other exactly."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipert.errors import ConfigError
from pipert.layers import initial
from pipert.layers.initial import draw_normal
from pipert.layers.shard import Shard, Span, set_shard, to_full, to_shard


def split(whole: torch.Tensor, shard: Shard, parts: int) -> list[torch.Tensor]:
    return [to_shard(whole, shard.at(index, parts)) for index in range(parts)]


def test_swiglu_rows_stay_beside_each_other_and_go_from_4_parts_to_1_to_2_to_4() -> None:
    gate, up = torch.arange(8.0), 1000 + torch.arange(8.0)
    whole = torch.cat([gate, up])[:, None].expand(16, 3).contiguous()
    shard = Shard((16, 3), 0, 4, 0, ((8, 8), (8, 8)))
    four = split(whole, shard, 4)
    assert four[1][:, 0].tolist() == [2, 3, 1002, 1003]
    assert torch.equal(to_full(four, shard), whole)
    two = split(to_full(four, shard), shard, 2)
    assert two[1][:, 0].tolist() == [4, 5, 6, 7, 1004, 1005, 1006, 1007]
    again = split(to_full(two, shard.at(0, 2)), shard, 4)
    assert all(map(torch.equal, four, again))


def test_projections_of_8_and_2_heads_are_split_by_heads_with_copies_of_few_ones() -> None:
    width = 2
    rows = [f"q{h}" for h in range(8)] + [f"k{h}" for h in range(2)] + [f"v{h}" for h in range(2)]
    tagged = torch.arange(len(rows) * width)[:, None]
    shard = Shard((24, 1), 0, 2, 1, ((16, 8), (4, 2), (4, 2)))

    def heads(part: torch.Tensor) -> list[str]:
        return [rows[int(row) // width] for row in part[::width, 0]]

    assert heads(shard.take(tagged)) == ["q4", "q5", "q6", "q7", "k1", "v1"]
    assert [heads(part) for part in split(tagged, shard, 4)] == [
        ["q0", "q1", "k0", "v0"],
        ["q2", "q3", "k0", "v0"],
        ["q4", "q5", "k1", "v1"],
        ["q6", "q7", "k1", "v1"],
    ]
    third = shard.at(3, 4)
    assert third.spans == (Span(12, 16), Span(18, 20, 2, 1), Span(22, 24, 2, 1))
    assert third.shared and not shard.shared
    assert third.counted == ((0, 4),)
    assert shard.at(2, 4).counted == ((0, 4), (4, 6), (6, 8))


@given(data=st.data())
def test_parts_put_together_are_the_whole_and_totals_count_every_element_once(data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, 6))
    units = st.sampled_from([n for n in range(1, 13) if n % parts == 0 or parts % n == 0])
    pieces = tuple((n * data.draw(st.integers(1, 3)), n) for n in data.draw(st.lists(units, min_size=1, max_size=3)))
    dim = data.draw(st.integers(0, 2))
    shape = [2, 3, 2]
    shape[dim] = sum(rows for rows, _ in pieces)
    whole = torch.randn(shape)
    shard = Shard(tuple(shape), dim, parts, 0, pieces)
    split_up = split(whole, shard, parts)
    assert all(part.shape == shard.shape for part in split_up)
    assert torch.equal(to_full(split_up, shard), whole)
    counted = sum(
        float(part.narrow(dim, start, stop - start).double().square().sum())
        for index, part in enumerate(split_up)
        for start, stop in shard.at(index).counted
    )
    assert counted == pytest.approx(float(whole.double().square().sum()))


@given(rows=st.integers(1, 70), parts=st.integers(1, 8))
def test_a_padded_vocabulary_loses_nothing_and_its_padding_is_zero(rows: int, parts: int) -> None:
    whole = torch.randn(rows, 3)
    shard = Shard((rows, 3), 0, parts, 0, padded=True)
    split_up = split(whole, shard, parts)
    assert torch.equal(torch.cat(split_up)[:rows], whole)
    assert (torch.cat(split_up)[rows:] == 0).all()
    assert torch.equal(to_full(split_up, shard), whole)
    assert sum(shard.at(index).filled for index in range(parts)) == rows


@given(
    rows=st.integers(1, 80),
    width=st.integers(1, 5),
    dim=st.integers(0, 1),
    parts=st.integers(1, 4),
    chunk=st.sampled_from([1, 64, 1 << 20]),
)
def test_the_numbers_of_a_part_are_those_of_the_whole(rows: int, width: int, dim: int, parts: int, chunk: int) -> None:
    shape = (rows * parts, width) if dim == 0 else (rows, width * parts)
    whole = torch.empty(shape).normal_(0.0, 0.02, generator=torch.Generator().manual_seed(5))
    before, initial.CHUNK = initial.CHUNK, chunk
    try:
        for index in range(parts):
            shard = Shard(shape, dim, parts, index)
            part = torch.full(shard.shape, 7.0)
            set_shard(part, shard)
            draw_normal(part, 0.02, torch.Generator().manual_seed(5))
            assert torch.equal(part, shard.take(whole))
    finally:
        initial.CHUNK = before


def test_a_split_that_leaves_something_over_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"12 rows of 6 units .* 6 / 4 leaves 2 over; use a tp that divides 6"):
        Shard((12, 2), 0, 4, 0, ((12, 6),))
    with pytest.raises(ConfigError, match=r"pieces of 4 \+ 4 rows are not the 12 rows of dimension 0"):
        Shard((12, 2), 0, 2, 0, ((4, 4), (4, 4)))
