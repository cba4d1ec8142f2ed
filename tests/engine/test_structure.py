"""Values are taken apart and put together again without loss."""

from __future__ import annotations

import collections
import json
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipert.engine.boundary import BoundarySpec, Handover
from pipert.engine.structure import flatten, freeze, unflatten
from pipert.errors import BoundaryError


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass(frozen=True)
class Frozen:
    hidden: Any
    scale: float = 2.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", self.scale * 2)


PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.sampled_from([torch.int8])
)
VALUES = st.recursive(
    PLAIN | st.just("tensor"),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3) | st.integers(0, 9), inner, max_size=3),
        st.dictionaries(st.text(max_size=3), inner, max_size=3).map(collections.OrderedDict),
        st.tuples(inner, inner).map(lambda pair: Pair(*pair)),
        inner.map(Frozen),
    ),
    max_leaves=8,
)


@given(VALUES)
def test_any_value_comes_back_equal_through_json(value: Any) -> None:
    tensors, structure = flatten(value)
    again = freeze(json.loads(json.dumps(structure)))
    assert again == structure
    assert repr(unflatten(again, tensors)) == repr(value)  # repr tells 1, 1.0 and True apart


def test_structures_tell_equal_numbers_of_different_types_apart() -> None:
    assert len({flatten(value)[1] for value in (1, 1.0, True, "1")}) == 4


def test_a_tensor_that_occurs_twice_is_one_object_again() -> None:
    x = torch.ones(2)
    tensors, structure = flatten((x, [x, torch.ones(2)]))
    assert len(tensors) == 2
    first, (second, third) = unflatten(structure, [torch.zeros(2), torch.zeros(2)])
    assert first is second
    assert third is not first


def test_a_post_init_does_not_run_a_second_time() -> None:
    tensors, structure = flatten(Frozen(torch.ones(1)))
    assert unflatten(structure, tensors).scale == 4.0


def test_a_value_that_cannot_cross_is_refused_with_its_class_and_a_remedy() -> None:
    with pytest.raises(
        BoundaryError, match=r"builtins\.set cannot cross a stage boundary; pass tensors and plain data"
    ):
        flatten((torch.ones(1), {1, 2}))
    with pytest.raises(BoundaryError, match=r"dict key \(1, 2\)"):
        flatten({(1, 2): torch.ones(1)})


def test_a_class_that_other_ranks_cannot_find_is_refused() -> None:
    class Local(NamedTuple):
        x: Any

    with pytest.raises(BoundaryError, match="define it at the top level of a module"):
        flatten(Local(1))


@pytest.mark.parametrize("tensor", [torch.ones(2).to_sparse(), torch.ones(2, device="meta")], ids=["sparse", "meta"])
def test_a_tensor_without_dense_memory_is_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(BoundaryError, match="cannot cross a stage boundary; make it dense"):
        Handover.of(tensor)


def test_a_specification_round_trips_and_reads_well() -> None:
    value = {"h": torch.ones(2, 3, requires_grad=True), "ids": torch.ones(0, dtype=torch.int64), "n": (3, None, "x")}
    spec = Handover.of(value)[0].spec
    assert BoundarySpec.decode(spec.encode()) == spec
    assert str(spec) == "dict('h': float32[2, 3] with gradient, 'ids': int64[0], 'n': tuple(3, none, 'x'))"
    assert spec.with_gradient == (0,)
