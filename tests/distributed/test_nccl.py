"""The tests of this folder on the GPUs of a machine: Triton's kernels, and NCCL between them."""

import pytest
import torch
from tests.distributed import test_checkpoint, work

from ranks import on_ranks

COUNT = min(torch.cuda.device_count(), 4)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(COUNT < 2, reason="needs two GPUs")]


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (work.fsdp_steps_equal_one_process, ()),
        (work.what_travels_is_packed, ()),
        (work.mixed_precision_computes_what_narrow_codes_compute, ()),
        (work.training_end_to_end_differs_in_few_codes, ("paper12", "stochastic", (2, 3, 4), True, True)),
        (work.replicas_start_and_stay_equal, ()),
        (work.models_come_from_the_meta_device, ()),
        (work.compiled_models_train_as_others_do, ()),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_gpus_do_what_cpus_do(function, arguments):
    on_ranks(COUNT, function, *arguments, backend="nccl")


def test_everything_else_works_on_gpus_or_says_why_not(tmp_path):
    on_ranks(COUNT, work.everything_else_under_fsdp, tmp_path, backend="nccl")


@pytest.mark.parametrize(("ladder", "conversion", "arguments"), test_checkpoint.CASES, ids=str)
def test_what_gpus_save_fewer_gpus_load(ladder, conversion, arguments, tmp_path):
    on_ranks(COUNT, work.saved_on_all_ranks, tmp_path, ladder, conversion, arguments, backend="nccl")
