"""From a matrix of codes and some rows of x to a launch of linear.py's kernels: which they take, how, in what grid."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchmadam.kernels import launch, linear, resident
from torchmadam.ladder.format import LadderFormat
from torchmadam.ladder.layout import SEED, CodeLayout

# The vector kernel has an instruction more a weight for every row of x, and the tile kernel about as many as four rows.
VECTOR_MOST = 4
VECTOR_ROWS = 4  # of W that share what is loaded of x; more take registers from the programs beside
VECTOR_WARPS = 4
VECTOR_REGISTERS = 0  # of a thread, at most; 0: as many as the compiler likes, but for what does with few:
LEAN_REGISTERS = 64  # a polynomial, one plane, one row of x; 32 warps then run at a time, not 16 or fewer
VECTOR_EARLY = True
FEW_ROWS = 2048  # of W; below, a program takes one, since else there were fewer programs than a GPU runs at a time
TILE_ROWS = 16
TILE_GROUPS = 8
TILE_OPTIONS = {"num_warps": 4, "num_stages": 2}
VECTOR_LANES, TILE_LANES = 16, 32
POLYNOMIAL_ERROR = 4e-6  # of sinh, relative; a bfloat16's is 2e-3


def takes(x: Tensor, planes: Sequence[Tensor], coding: CodeLayout) -> bool:
    """Whether the kernels can: at most two planes of k and stored signs, in whole groups, at even addresses."""
    return (
        coding.numel > 0
        and coding.columns % TILE_LANES == 0
        and (coding.signs != SEED or coding.format.is_signed)
        and len(launch._code_widths(coding)) <= 2
        and all(tensor.data_ptr() % 16 == 0 for tensor in (x, *planes))
    )


def forward(x: Tensor, planes: Sequence[Tensor], limit: Tensor, coding: CodeLayout, bias: Tensor | None) -> Tensor:
    """X W^T + bias, for a contiguous matrix x of which :func:`takes` says so."""
    out = torch.empty(x.shape[0], coding.rows, dtype=x.dtype, device=x.device)
    own = prepared(out, x, planes, limit, coding, bias)
    with resident.on(x.device):
        own.kernel[(own.programs,)](**own.arguments, **own.options)
    return out


def prepared(
    out: Tensor, x: Tensor, planes: Sequence[Tensor], limit: Tensor, coding: CodeLayout, bias: Tensor | None
) -> launch.Launch:
    """The launch that puts it into ``out``."""
    batch, rows = x.shape[0], coding.rows
    ladder = launch._ladder_arguments(coding)
    signs = ladder["SIGN_MODE"] == 1
    k_planes = planes[:-1] if signs else planes
    numbers = arithmetic(coding.format)
    lean = numbers["KIND"] == 1 and ladder["W1"] == 0 and batch == 1
    kernel, options, tile = plan(batch, rows, coding.columns, lean=lean)
    arguments = {
        "out": out, "x": x, "bias": out if bias is None else bias, "limit": limit, "plane0": k_planes[0],
        "plane1": k_planes[-1], "signs": planes[-1], "batch": batch, "rows": rows,
        "ones": (1 << ladder["W0"]) - 1, "whole": 2.0**23, "GROUPS": coding.columns // tile["LANES"],
        "W0": ladder["W0"], "W1": ladder["W1"], "SIGNS": signs, "BIAS": bias is not None,
        **numbers, **tile,
    }  # fmt: skip
    return launch.Launch(kernel, -(-rows // tile["R"]), arguments, options=options)


def plan(batch: int, rows: int, columns: int, *, lean: bool) -> tuple[Any, dict[str, int], dict[str, Any]]:
    """Which kernel, compiled how, and the sizes of what its programs work on."""
    if batch <= VECTOR_MOST:
        groups = columns // VECTOR_LANES
        warps = min(VECTOR_WARPS, max(1, _power_of_2(groups) // 32))
        tile = {"LANES": VECTOR_LANES, "B": _power_of_2(batch), "R": VECTOR_ROWS if rows >= FEW_ROWS else 1}
        tile |= {"G": 32 * warps, "EVEN": groups % (32 * warps) == 0, "EARLY": VECTOR_EARLY}
        registers = VECTOR_REGISTERS or (LEAN_REGISTERS if lean else 0)
        return linear.vector_kernel, {"num_warps": warps, **({"maxnreg": registers} if registers else {})}, tile
    groups = columns // TILE_LANES
    tile = {"LANES": TILE_LANES, "B": max(16, _power_of_2(batch)), "R": TILE_ROWS, "G": TILE_GROUPS}
    return linear.tile_kernel, TILE_OPTIONS, tile | {"EVEN": groups % TILE_GROUPS == 0}


@functools.lru_cache(maxsize=64)
def arithmetic(ladder: LadderFormat) -> dict[str, float]:
    """The numbers that linear.rungs needs, and the factor that it leaves out."""
    found = {"KIND": 0, "zero": 0.0, "spacing": -ladder.spacing / math.log(2), "p1": 0.0, "p2": 0.0, "factor": 1.0}
    if not ladder.is_signed:
        return found
    found["zero"] = float(ladder.top)
    # sinh(a) / a as a polynomial of a^2 up to ``most``: of Taylor's series the two terms beyond the square are replaced
    # by the polynomials of degree 2 next to them (Chebyshev's). What is left is their largest distance.
    most = (ladder.top * ladder.spacing) ** 2
    fourth, third = 1 / 362880, 1 / 5040
    series = [1 - fourth * most**4 / 128, 1 / 6 + fourth * most**3 / 4, 1 / 120 - fourth * most**2 * 5 / 4]
    third += 2 * most * fourth
    series = [series[0] + third * most**3 / 32, series[1] - third * most**2 * 9 / 16, series[2] + third * most * 3 / 2]
    if third * most**3 / 32 < POLYNOMIAL_ERROR:
        # Over its last coefficient it is (a^2 + half)^2 + rest: an instruction less. And a is k times the spacing.
        half = series[1] / series[2] / 2
        rest = series[0] / series[2] - half**2
        factor = ladder.crossing * series[2] * ladder.spacing**5
        return found | {"KIND": 1, "p1": half / ladder.spacing**2, "p2": rest / ladder.spacing**4, "factor": factor}
    return found | {"KIND": 2, "spacing": ladder.spacing / math.log(2), "factor": 0.5 * ladder.crossing}


def _power_of_2(count: int) -> int:
    """The smallest that is not below."""
    return 1 << (count - 1).bit_length()
