"""Coded parameters, and Madam, under FSDP2."""

import pytest
from tests.distributed import work

from compiler import needs_a_compiler
from ranks import on_ranks


def test_one_to_four_ranks_produce_the_codes_of_one_process():
    on_ranks(4, work.fsdp_steps_equal_one_process, work.KINDS[:2])


@pytest.mark.slow
def test_one_to_four_ranks_produce_the_weights_of_one_process_of_every_kind():
    on_ranks(4, work.fsdp_steps_equal_one_process)


def test_what_travels_is_packed_planes():
    on_ranks(2, work.what_travels_is_packed)


def test_two_ranks_produce_the_weights_of_one_process_of_every_kind():
    on_ranks(2, work.fsdp_steps_equal_one_process, work.KINDS[2:])


def test_mixed_precision_computes_what_narrow_codes_compute():
    on_ranks(2, work.mixed_precision_computes_what_narrow_codes_compute)


def test_everything_else_works_or_says_why_not(tmp_path):
    on_ranks(2, work.everything_else_under_fsdp, tmp_path)


def test_models_come_from_the_meta_device_the_same_on_any_number_of_ranks():
    on_ranks(2, work.models_come_from_the_meta_device)


def test_accumulating_and_clipping_on_two_ranks_trains_as_one_process_does():
    on_ranks(2, work.training_end_to_end_differs_in_few_codes, "paper12", "stochastic", (2,), True, True, 6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ladder", "rounding", "split"),
    [("paper12", "nearest", False), ("paper12", "stochastic", True), ("signed8", None, True)],
)
def test_training_on_two_to_four_ranks_differs_in_fewer_than_one_code_in_a_thousand(ladder, rounding, split):
    on_ranks(4, work.training_end_to_end_differs_in_few_codes, ladder, rounding, (2, 3, 4), True, split)


@pytest.mark.slow
@needs_a_compiler
def test_compiled_models_train_as_others_do():
    on_ranks(2, work.compiled_models_train_as_others_do)


@pytest.mark.slow
def test_replicas_of_shards_make_the_steps_of_one_process():
    on_ranks(4, work.shards_may_be_replicated)
