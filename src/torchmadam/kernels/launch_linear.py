"""From a matrix of codes and some rows of x to a launch of linear.py's kernels: which they take, how, in what grid."""

import functools
import math
import struct
from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from torchmadam.kernels import launch, linear
from torchmadam.kernels.direct import Direct
from torchmadam.ladder.format import LadderFormat
from torchmadam.ladder.layout import SEED, CodeLayout

GROUP = 32  # columns
TURNS = 4  # of a warp, at least, if there are enough columns: the first one's loads keep it waiting
SHARED = 2**16  # rows of W by warps that share their columns: more would only have more to add up
# By rows of x, up to so many: rows of W of a program, and warps that share their columns. A tile was the fastest of
# those tried on an H200; so was a launch after the last one's end, and loading one turn ahead, into registers.
PLANS: dict[int, tuple[int, int]] = {8: (16, 8), 16: (32, 8), 32: (32, 8), 64: (32, 4)}
FITTED = True  # to the rows of W; if not, warps are as many as above
# Triton's interpreter knows no PTX.
PLAIN = not isinstance(linear.linear_kernel, triton.JITFunction)
# What Triton makes of dimensions (see linear.py).
_VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
UP, WIDE = _VERSION < (3, 7), _VERSION < (3, 8)
HALVES = {torch.bfloat16}  # types of x for which float16, or as much, is precise enough for weights
SHARE = 8  # of so many powers one is a polynomial
POLYNOMIAL_ERROR, CUBIC_ERROR = 4e-6, 1e-3  # of sinh, relative; a bfloat16's is 1.4e-3 on average


def takes(x: Tensor, planes: Sequence[Tensor], coding: CodeLayout) -> bool:
    """Whether the kernels can: at most two planes of k and stored signs, in whole groups, at even addresses.

    And not on AMD's GPUs, whose matrix instructions want other columns in a thread.
    """
    return (
        not launch.HIP
        and coding.numel > 0
        and coding.columns % GROUP == 0
        and (coding.signs != SEED or coding.format.is_signed)
        and len(launch._code_widths(coding)) <= 2
        and all(tensor.data_ptr() % 16 == 0 for tensor in (x, *planes))
    )


def forward(x: Tensor, planes: Sequence[Tensor], limit: Tensor, coding: CodeLayout, bias: Tensor | None) -> Tensor:
    """X W^T + bias, for a contiguous matrix x of which :func:`takes` says so."""
    out = torch.empty(x.shape[0], coding.rows, dtype=x.dtype, device=x.device)
    prepared(coding, x.shape[0], x.dtype, bias is not None)(tensors(out, x, planes, limit, coding, bias))
    return out


def tensors(
    out: Tensor, x: Tensor, planes: Sequence[Tensor], limit: Tensor, coding: CodeLayout, bias: Tensor | None
) -> list[Tensor]:
    """In the kernel's order; what it will not use is something that is there."""
    return [
        out,
        x,
        out if bias is None else bias,
        limit,
        planes[0],
        planes[len(launch._code_widths(coding)) - 1],
        planes[-1],
    ]


@functools.lru_cache(maxsize=4096)
def prepared(coding: CodeLayout, batch: int, dtype: torch.dtype, biased: bool) -> Direct:
    """All of a launch but its tensors."""
    ladder = launch._ladder_arguments(coding)
    numbers, factor = arithmetic(coding.format, ladder["W1"], halves=dtype in HALVES, plain=PLAIN)
    tile = plan(batch, coding.rows, coding.columns)
    constants = {
        **ladder, **numbers, "SIGNS": ladder["SIGN_MODE"] == 1, "BIAS": biased, "PLAIN": PLAIN,
        "GROUPS": coding.columns // GROUP, "UP": UP, "WIDE": WIDE, **tile,
    }  # fmt: skip
    programs, options = -(-coding.rows // tile["R"]), {"num_warps": tile["S"], **launch.FUSED}
    return Direct(linear.linear_kernel, programs, 7, (batch, coding.rows, factor), constants, options)


def plan(batch: int, rows: int, columns: int) -> dict[str, int]:
    """The sizes of what programs work on.

    Fewer warps share the columns where there are many rows: adding up what they have takes time, too.
    """
    most = next(most for most in PLANS if batch <= most)
    tile_rows, warps = PLANS[most]
    chunks = -(-columns // (4 * GROUP))  # of a warp; a warp without one has only zeros to add
    if FITTED:
        warps = min(warps, _power_of_2(max(4, min(SHARED // rows, chunks // TURNS))))
    return {"B": most, "R": tile_rows, "S": min(warps, 1 << (chunks - 1).bit_length())}


@functools.lru_cache(maxsize=64)
def arithmetic(ladder: LadderFormat, lower_bits: int, *, halves: bool, plain: bool) -> tuple[dict[str, float], float]:
    """The numbers that rungs.rungs needs, and the factor that it leaves out.

    It computes (2^23 + k unit) scale + offset with one rounding. Of the paper's ladder the rounding of the offset goes
    into the factor; of the others scale and offset are exact.
    """
    unit = 2.0 ** (8 - lower_bits if lower_bits else 0)
    if not ladder.is_signed:
        scale = _float32(-ladder.spacing / math.log(2)) / unit
        # Powers begin at 2^14, so that float16 has normal numbers for 28 octaves.
        offset = _float32(14 - 2.0**23 * scale)
        # With one plane of codes the unit for powers would take longer than all else; two read more, and wait for that.
        share = SHARE if halves and lower_bits == 0 else 0
        return _numbers(0, scale, offset, share), 2.0 ** -(2.0**23 * scale + offset)
    zero = 2.0**23 + ladder.top * unit
    # sinh(a) / a as a polynomial of a^2 up to ``most``: of Taylor's series the two terms beyond the square are replaced
    # by the polynomials of degree 2 next to them (Chebyshev's). What is left is their largest distance.
    most = (ladder.top * ladder.spacing) ** 2
    fourth, third = 1 / 362880, 1 / 5040
    series = [1 - fourth * most**4 / 128, 1 / 6 + fourth * most**3 / 4, 1 / 120 - fourth * most**2 * 5 / 4]
    third += 2 * most * fourth
    series = [series[0] + third * most**3 / 32, series[1] - third * most**2 * 9 / 16, series[2] + third * most * 3 / 2]
    if third * most**3 / 32 < POLYNOMIAL_ERROR:
        # Over its last coefficient it is (a^2 + half)^2 + rest: an instruction less. Here a = k spacing is z per.
        half = series[1] / series[2] / 2
        rest = series[0] / series[2] - half**2
        size = 2.0 ** -ladder.top.bit_length()  # z = k size is below 1
        per = ladder.spacing / size
        # Without its last term, in the same way; over the coefficient of a^2 it is a^2 + c.
        one, c = series[1] + series[2] * most, (series[0] - series[2] * most**2 / 8) / per**2
        c /= one
        if halves and not plain and ladder.code_bits == 8 and series[2] * most**2 / 8 < CUBIC_ERROR and c < 2**12:
            factor = ladder.crossing * one * per**3 * (c / _float32(c, "<e"))
            return _numbers(3, 0, _twice(-(1024 + ladder.top) * size), _twice(c)), factor
        # The largest weights are to be near 2^10: float16 ends at 2^16, and is not precise below 2^-14.
        size = 2.0 ** round(math.log2(ladder.spacing / (120 * math.sqrt(most) / 1024) ** 0.2))
        per = ladder.spacing / size
        numbers = _numbers(1, size / unit, -zero * size / unit, half / per**2, rest / per**4)
        return numbers, ladder.crossing * series[2] * per**5
    scale = ladder.spacing / math.log(2)
    shift = float(min(0, 14 - math.ceil(ladder.top * scale)))  # float16 ends at 2^16
    return _numbers(2, scale / unit, -zero, shift), 0.5 * ladder.crossing * 2**-shift


def _numbers(kind: int, scale: float, offset: float, p1: float = 0.0, p2: float = 0.0) -> dict[str, float]:
    return {"KIND": kind, "SCALE": scale, "OFFSET": offset, "P1": p1, "P2": p2}


def _twice(value: float) -> int:
    """The bits of a float16, in both halves of a word."""
    bits: int = struct.unpack("<h", struct.pack("<e", value))[0]
    return bits * 0x10000 | (bits & 0xFFFF)


def _float32(value: float, format: str = "<f") -> float:
    (rounded,) = struct.unpack(format, struct.pack(format, value))
    return float(rounded)


def _power_of_2(count: int) -> int:
    """The largest that is not above, or 1."""
    return 1 << max(0, count.bit_length() - 1)
