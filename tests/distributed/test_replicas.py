"""Coded parameters, and Madam, under DDP."""

from tests.distributed import work

from ranks import on_ranks


def test_replicas_start_and_stay_equal_and_the_first_tensor_that_differs_is_named():
    on_ranks(2, work.replicas_start_and_stay_equal)
