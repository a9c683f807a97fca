"""Coded parameters, and Madam, under FSDP2."""

import pytest
from tests.distributed import work

from ranks import on_ranks


def test_one_to_four_ranks_produce_the_codes_of_one_process():
    on_ranks(4, work.fsdp_steps_equal_one_process)


def test_what_travels_is_packed():
    on_ranks(2, work.gathers_are_packed)


def test_mixed_precision():
    on_ranks(2, work.mixed_precision_computes_what_narrow_codes_compute)


@pytest.mark.parametrize(("ladder", "rounding"), [("paper12", "stochastic"), ("paper12", "nearest")])
def test_end_to_end(ladder, rounding):
    on_ranks(4, work.training_end_to_end_differs_in_few_codes, ladder, rounding, (2, 3, 4))
