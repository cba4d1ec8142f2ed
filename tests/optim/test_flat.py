"""Flat buffers: every element has one place, in one shard."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from pipert.optim.flat import Layout, Piece


def test_parameters_lie_one_behind_the_other_and_are_cut_at_shards() -> None:
    layouts = [Layout((4, 0, 3), parts=3, index=index) for index in range(3)]
    assert [layout.pieces() for layout in layouts] == [
        (Piece(0, 0, 3, 0),),
        (Piece(0, 0, 1, 3), Piece(2, 1, 3, 0)),
        (Piece(2, 0, 1, 2),),
    ]
    assert (layouts[0].shard, layouts[0].padded, layouts[2].own) == (3, 9, slice(6, 9))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 5))
def test_pieces_of_all_shards_are_the_parameters(sizes: list[int], parts: int) -> None:
    whole = [torch.arange(100 * i, 100 * i + n) for i, n in enumerate(sizes)]
    layouts = [Layout(tuple(sizes), parts, index) for index in range(parts)]
    flat = torch.full((layouts[0].padded,), -1)
    for view, values in zip(layouts[0].views(flat, [v.shape for v in whole]), whole, strict=True):
        view.copy_(values)
    found: dict[int, list[int]] = {i: [] for i in range(len(sizes))}
    for layout in layouts:
        shard = flat[layout.own]
        assert len(shard) == layout.shard
        for piece in layout.pieces():
            assert piece.first == len(found[piece.parameter])
            found[piece.parameter] += shard[piece.start : piece.stop].tolist()
    assert [found[i] for i in range(len(sizes))] == [values.tolist() for values in whole]
