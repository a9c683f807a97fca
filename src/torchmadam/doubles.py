"""Float64, and what takes its place on devices that have none: Apple's GPUs, and some of Intel's."""

import functools

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily


def are_on(device: torch.device) -> bool:
    """Whether a device computes in float64. Others refuse even to make such a tensor."""
    return device.type in ("cpu", "cuda", "meta") or _answers(device)


def widest(device: torch.device) -> torch.dtype:
    """The widest floats that a device computes with."""
    return torch.float64 if are_on(device) else torch.float32


def doubled(tensor: Tensor) -> Tensor:
    """As float64; on the CPU where the tensor's device has none."""
    return tensor.double() if are_on(tensor.device) else tensor.cpu().double()


def _answers(device: torch.device) -> bool:
    return _tried(device)


# As torch.compiler.assume_constant_result would, which imports the whole compiler with this module. Not on the cached
# function itself: Dynamo looks through caches, and takes no notice there.
_answers._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _tried(device: torch.device) -> bool:
    # There is no list of such devices to go by, and new kinds come as plug-ins.
    try:
        with unset_fake_temporarily():  # in which nothing has a value, and an answer would be kept that is of no device
            return float(torch.full((), 4.0, dtype=torch.float64, device=device).sqrt()) == 2.0
    except (RuntimeError, TypeError):
        return False
