"""Tests of the engine's failures and of tied weights, again, over RCCL's stand-in; ranks are threads."""

from __future__ import annotations

import pytest

from tests.engine import test_failures, test_zero
from tests.engine.test_failures import Odd

pytestmark = pytest.mark.usefixtures("local_meshes_over_rccl")


@pytest.mark.parametrize("error", [Odd("bang"), KeyboardInterrupt(), SystemExit(3)], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize(("backward", "action"), [(False, "2F3"), (True, "2B3")])
def test_an_exception_keeps_its_type_and_says_where(error: BaseException, backward: bool, action: str) -> None:
    test_failures.test_an_exception_keeps_its_type_and_says_where(error, backward, action)


def test_an_exception_in_the_loss_names_the_last_stage() -> None:
    test_failures.test_an_exception_in_the_loss_names_the_last_stage()


def test_an_exception_in_the_data_iterator_ends_all_ranks() -> None:
    test_failures.test_an_exception_in_the_data_iterator_ends_all_ranks()


@pytest.mark.parametrize("place", [0, 1])
def test_every_copy_of_a_tied_weight_sees_the_sum_whatever_its_place(place: int) -> None:
    test_zero.test_every_copy_of_a_tied_weight_sees_the_sum_whatever_its_place(1, place)
