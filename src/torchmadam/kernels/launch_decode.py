"""From packed planes to launches of decode.py's kernel. Layers are decoded in every pass, so the way there is short."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchmadam.kernels import decode as decoding
from torchmadam.kernels import launch, resident
from torchmadam.ladder.layout import CodeLayout

BLOCK = 1024  # eight for each thread of four warps
OPTIONS = {"num_warps": 4}


@dataclass(frozen=True)
class Plan:
    """All of a launch but its tensors; and what has been compiled for it, by what the compiler knows of those."""

    programs: int
    columns: int
    k_planes: int
    numbers: tuple[float, ...]
    constants: dict[str, Any]
    compiled: dict[Any, Callable[..., None]] = field(default_factory=dict)


def decode(planes: Sequence[Tensor], limit: Tensor, coding: CodeLayout, first_row: int, dtype: torch.dtype) -> Tensor:
    """The rows from ``first_row`` on that these planes hold, as a float matrix in memory order."""
    return _decoded(planes, limit, coding, first_row, dtype, raw=False)


def codes(planes: Sequence[Tensor], coding: CodeLayout, first_row: int) -> Tensor:
    """The same rows as CodeLayout.unpack gives them."""
    return _decoded(planes, planes[0], coding, first_row, torch.int32, raw=True)


def _decoded(
    planes: Sequence[Tensor], limit: Tensor, coding: CodeLayout, first_row: int, dtype: torch.dtype, *, raw: bool
) -> Tensor:
    rows = planes[0].shape[0]
    plan = _plan(coding, rows, first_row, dtype, raw)
    out = torch.empty(rows, plan.columns, dtype=dtype, device=planes[0].device)
    if plan.programs == 0:
        return out
    used = [plane.contiguous() for plane in planes]
    tensors = [out, limit, used[-1], *used[: plan.k_planes], *[out] * (4 - plan.k_planes)]
    with resident.on(out.device):
        _run(plan, tensors, out.device)
    return out


def _run(plan: Plan, tensors: list[Tensor], device: torch.device) -> None:
    """Launch. The second time around it goes straight to the compiled kernel, past all looking at arguments."""
    places = [tensor.data_ptr() for tensor in tensors]
    known = (device, tensors[1].dtype, *(place % 16 == 0 for place in places))
    run = plan.compiled.get(known)
    if run is not None:
        run(*places, *plan.numbers, *plan.constants.values())
        return
    made = decoding.decode_kernel[(plan.programs,)](*tensors, *plan.numbers, **plan.constants, **OPTIONS)
    if made is not None:  # as it is under Triton's interpreter
        plan.compiled[known] = made[(plan.programs, 1, 1)]


@functools.lru_cache(maxsize=4096)
def _plan(coding: CodeLayout, rows: int, first_row: int, dtype: torch.dtype, raw: bool) -> Plan:
    ladder, columns = coding.format, coding.columns
    found = launch._ladder_arguments(coding) | {
        "RAW": raw, "NARROW": dtype.itemsize == 2, "FLAT": launch._is_flat(coding),
        "INDEX": launch._index_type(coding.numel), "BLOCK": BLOCK,
    }  # fmt: skip
    numbers = (rows, columns, first_row * columns, ladder.spacing, ladder.crossing, float(ladder.top), coding.sign_key)
    k_planes = sum(found[f"W{i}"] > 0 for i in range(4))
    names = decoding.decode_kernel.arg_names[7 + len(numbers) :]  # in their order: compiled kernels know no names
    return Plan(
        launch._count_blocks(rows, columns, BLOCK), columns, k_planes, numbers, {name: found[name] for name in names}
    )
