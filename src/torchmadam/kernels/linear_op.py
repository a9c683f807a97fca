"""The operator ``torchmadam::linear``: x W^T + bias with W as codes, for a few rows of x and without a gradient."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from torchmadam.kernels import ops
from torchmadam.ladder.format import LadderFormat
from torchmadam.ladder.layout import CodeLayout

MOST = 64  # rows of x; for more, decoding once and a large product cost less than decoding again and again
DTYPES = (torch.bfloat16, torch.float16)
_LIBRARY = torch.library.Library("torchmadam", "FRAGMENT")
_LIBRARY.define(
    "linear(Tensor x, Tensor[] planes, Tensor limit, int levels, float spacing, float crossing, SymInt[] shape, "
    "str signs, Tensor? bias) -> Tensor"
)


def linear(x: Tensor, planes: Sequence[Tensor], limit: Tensor, coding: CodeLayout, bias: Tensor | None) -> Tensor:
    """For a matrix x and a matrix of codes in row-major order, whose signs are stored."""
    ladder = coding.format
    out: Tensor = torch.ops.torchmadam.linear(
        x, planes, limit, ladder.levels, ladder.spacing, ladder.crossing, coding.shape, coding.signs, bias
    )
    return out


def _reference(
    x: Tensor, planes: list[Tensor], limit: Tensor, levels: int, spacing: float, crossing: float, shape: list[int],
    signs: str, bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """Decode to the dtype of x, and compute."""
    weight = ops.decode(planes, limit, _coding(levels, spacing, crossing, tuple(shape), signs), 0, x.dtype)
    return functional.linear(x, weight, bias)


def _cuda(
    x: Tensor, planes: list[Tensor], limit: Tensor, levels: int, spacing: float, crossing: float, shape: list[int],
    signs: str, bias: Tensor | None,
) -> Tensor:  # fmt: skip
    if ops._has_triton() and 0 < x.shape[0] <= MOST and x.dtype in DTYPES:
        coding = _coding(levels, spacing, crossing, tuple(shape), signs)
        x, planes = x.contiguous(), [plane.contiguous() for plane in planes]
        if _launch().takes(x, planes, coding):
            own_bias = None if bias is None else bias.contiguous()
            return _launch().forward(x, planes, limit, coding, own_bias)  # type: ignore[no-any-return]
    return _reference(x, planes, limit, levels, spacing, crossing, shape, signs, bias)


def _shape(
    x: Tensor, planes: list[Tensor], limit: Tensor, levels: int, spacing: float, crossing: float, shape: list[int],
    signs: str, bias: Tensor | None,
) -> Tensor:  # fmt: skip
    return x.new_empty((x.shape[0], shape[0]))


@functools.lru_cache(maxsize=4096)
def _coding(levels: int, spacing: float, crossing: float, shape: tuple[int, ...], signs: str) -> CodeLayout:
    return CodeLayout.contiguous(LadderFormat(levels, spacing, crossing), shape, signs)


@functools.lru_cache(maxsize=1)
def _launch() -> Any:
    from torchmadam.kernels import launch_linear

    return launch_linear


_LIBRARY.impl("linear", _reference, "CompositeExplicitAutograd")
_LIBRARY.impl("linear", _cuda, "CUDA")
torch.library.register_fake("torchmadam::linear", _shape, lib=_LIBRARY)
