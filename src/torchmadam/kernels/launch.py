"""From lists of tensors to launches: which tensors a kernel takes, their tables, and the grid."""

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from torchmadam.kernels import resident, step_coded, step_float, tables
from torchmadam.ladder.layout import PLANE, SEED, CodeLayout
from torchmadam.mean import returned, room

BLOCK = 512  # elements that a program works on at a time
SPAN = 8  # blocks that a program of a step works through; fewer, if else there were fewer programs than this:
PROGRAMS, FLOAT_PROGRAMS, EIGHT_PROGRAMS = 5000, 4000, 2500  # of codes, of floats, of floats with 8-bit moments
FLOAT_OPTIONS, EIGHT_OPTIONS = {"num_warps": 4}, {"num_warps": 2}  # all were the fastest of those tried on an H200
# A program that steps codes is a single warp, if it can be: a block in doubt, which it works through again, keeps no
# other waiting. But it should fill lines of 128 bytes in every plane that it writes: half lines take twice as long.
CODED_LINE = 128
CODED_SPAN = 8192  # elements that it works through, at most
LARGE = 2**26  # elements of a step of codes, or with 8-bit moments, in which the time between launches does not matter
# Its arithmetic for blocks in doubt would take registers from all, and leave room for fewer programs at a time.
CODED_REGISTERS = {4: 80, 8: 128}  # by elements of a thread
# Of kernels without masks, with gradients of bfloat16 and 8-bit moments, by planes of codes: as few as spill nothing.
EVEN_REGISTERS = {1: 80, 2: 96}
MEAN_REGISTERS = {4: 96, 8: 144}  # of kernels with first moments, which have one number more to keep
# Kinds of matrices: one long row that ends with a block; one long row; rows that end within a byte.
_EVEN, _FLAT, _ROWS = range(3)
# Exactly rounded arithmetic, as in the reference: no fused multiply-add. Triton's own choice changes with 3.10.
EXACT, FUSED = {"enable_fp_fusion": False}, {"enable_fp_fusion": True}
HIP = torch.version.hip is not None  # AMD's GPUs, which PyTorch calls by the name of CUDA, too
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_LOST = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}
_LEAST = {torch.float32: 2.0**-126, torch.bfloat16: 2.0**-126, torch.float16: 2.0**-24}


def takes(param: Tensor, grad: Tensor, moments: Sequence[Tensor]) -> bool:
    """Whether the float kernel can step this parameter; what it cannot, the reference does."""
    alike = all(moment.stride() == param.stride() for moment in moments)
    return param.dtype in _TYPES and grad.dtype in _TYPES and alike and _is_dense(param)


@dataclass(frozen=True)
class Launch:
    """A kernel, how many programs of it, with what, compiled how; ``lr`` comes in units of ``unit``, if any."""

    kernel: Any
    programs: int
    arguments: dict[str, Any]
    unit: float = 0.0
    options: Mapping[str, int] = field(default_factory=lambda: FLOAT_OPTIONS)


class Launches:
    """The launches of a step. They can be made again while every tensor in them stays where it is.

    The first call compiles; later ones go straight to the compiled kernels, past all looking at arguments.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._all: list[Launch] = []
        self._compiled: list[tuple[Any, list[Any], int, float]] = []

    def add(self, launch: Launch) -> None:
        """One more, after the others."""
        if launch.programs > 0:
            self._all.append(launch)

    def __call__(self, lr: float | Tensor) -> None:
        """Launch. Whether lr is a tensor, and then which one, must not change from one call to the next."""
        with resident.on(self._device):
            if not self._compiled:
                self._compile(lr)
                return
            for run, arguments, lr_place, unit in self._compiled:
                if unit and not isinstance(lr, Tensor):
                    arguments[lr_place] = lr / unit
                run(*arguments)

    def _compile(self, lr: float | Tensor) -> None:
        for own in self._all:
            arguments = own.arguments
            if own.unit and not isinstance(lr, Tensor):
                arguments["lr"] = lr / own.unit
            compiled = own.kernel[(own.programs,)](**arguments, **own.options, **EXACT)
            if compiled is not None:  # as it is under Triton's interpreter
                # Triton asks the driver about every tensor that it is given, and about no address.
                given = [a.data_ptr() if isinstance(a, Tensor) else a for a in arguments.values()]
                lr_place = list(arguments).index("lr") if own.unit else 0
                self._compiled.append((compiled[(own.programs, 1, 1)], given, lr_place, own.unit))


def float_step(
    params: Sequence[Tensor], grads: Sequence[Tensor], means: Sequence[Tensor], moments: Sequence[Tensor],
    exponents: Sequence[Tensor], steps: Sequence[Tensor], scales: Sequence[Tensor], nonfinite: Sequence[Tensor], *,
    streams: Sequence[int], crossings: Sequence[float], lr: float | Tensor, momentum: float, beta: float,
    max_step: float, bound: float | None, weight_decay: float, bias_correction: bool, rounding: str | None,
    maximize: bool, firsts: Sequence[int] = (),
) -> Launches | None:  # fmt: skip
    """update.madam_ in one launch; all parameters of one dtype, and all gradients.

    After a clock's, in large steps with 8-bit moments, and where a tensor is empty.

    Returns the launches, for another step on the same tensors; None if gradients had to be copied for this one.
    """
    laid_out = [_laid_out_like(grad, param) for grad, param in zip(grads, params, strict=True)]
    held = moments or steps  # without moments, or exponents, the address is not used
    rows = [
        [
            param.data_ptr(), grad.data_ptr(), moment.data_ptr(), step.data_ptr(), bad.data_ptr(), param.numel(),
            stream, scale.data_ptr(), _float_bits(crossing), exponent.data_ptr(), first, mean.data_ptr(), 0,
        ]
        for param, grad, mean, moment, exponent, step, bad, stream, scale, crossing, first in zip(
            params, laid_out, means or steps, held, exponents or steps, steps, nonfinite, streams, scales, crossings,
            firsts or [0] * len(params), strict=True,
        )
    ]  # fmt: skip
    device, dtype = params[0].device, params[0].dtype
    launches = Launches(device)
    table, clock = resident.table(rows, device)
    alone = _goes_alone([param.numel() for param in params], LARGE if exponents else math.inf)
    ln_beta = _logarithm("log_beta", beta)
    if not alone:
        _add_clock(launches, table, clock, len(rows), ln_beta, tables.FLOAT_COLUMNS)
    programs, options = (EIGHT_PROGRAMS, EIGHT_OPTIONS) if exponents else (FLOAT_PROGRAMS, FLOAT_OPTIONS)
    span = _span(sum(-(-p.numel() // BLOCK) for p in params), SPAN, programs)
    blocks = resident.blocks(tuple(-(-p.numel() // (span * BLOCK)) for p in params), device)
    launches.add(Launch(
        step_float.float_kernel, len(blocks),
        {
            "table": table, "blocks": blocks, "clock": clock, **ln_beta, **_logarithm("log_momentum", momentum),
            "lr_at": lr if isinstance(lr, Tensor) else clock, "lr": 0.0, "momentum": momentum,
            "recent": 1 - momentum, "beta": beta, "fresh": 1 - beta, "max_step": max_step, "bound": bound or 0.0,
            "decay": weight_decay, "least": _LEAST[dtype], "most": torch.finfo(dtype).max, "P": _TYPES[dtype],
            "G": _TYPES[laid_out[0].dtype], "HAS_MEAN": bool(means), "HAS_MOMENT": bool(moments),
            "EIGHT": bool(exponents), "CORRECT": bias_correction and max(momentum, beta) > 0,
            "BOUNDED": bound is not None, "DECAYS": weight_decay != 0, "MAXIMIZE": maximize, "LOST": _LOST[dtype],
            "STOCHASTIC": _LOST[dtype] > 0 and rounding != "nearest", "LR_IS_TENSOR": isinstance(lr, Tensor),
            "ALIGNED": _aligned(
                rows,
                [tables.PARAM, tables.GRAD, *[tables.MEAN] * bool(means), *[tables.MOMENT] * bool(moments)],
            ),
            "INDEX": _index_type(max(row[tables.FIRST] + row[tables.COUNT] for row in rows)),
            "FIELDS": tables.FLOAT_COLUMNS, "BLOCK": BLOCK, "SPAN": span, "ALONE": alone,
        },
        unit=1.0,
        options=options,
    ))  # fmt: skip
    launches(lr)
    torch.autograd.graph.increment_version(params)
    return launches if all(a is b for a, b in zip(laid_out, grads, strict=True)) else None


def coded_step(
    planes: Sequence[Sequence[Tensor]], codings: Sequence[CodeLayout], grads: Sequence[Tensor],
    means: Sequence[Tensor], moments: Sequence[Tensor], exponents: Sequence[Tensor], steps: Sequence[Tensor],
    nonfinite: Sequence[Tensor], *, streams: Sequence[int], lr: float | Tensor, momentum: float, beta: float,
    max_step: float, weight_decay: float, bias_correction: bool, rounding: str | None, maximize: bool,
) -> Launches | None:  # fmt: skip
    """update.madam_coded_ in one launch, or two if some matrices have rows that end within a byte.

    Large steps have a clock's before, and one more, for all matrices that end with a block, which takes no masks.

    All tensors are of one ladder, one kind of signs and one gradient dtype. Returns what :func:`float_step` does.
    """
    held = moments or steps
    laid_out = [coding.matrix(grad).contiguous() for coding, grad in zip(codings, grads, strict=True)]
    rows = []
    # Each kind of matrix has a kernel of its own, but one table serves all.
    numel = sum(coding.numel for coding in codings)
    block, _ = _coded_block(codings[0], flat=True, all_narrow=bool(exponents))
    kinds = [
        _EVEN if numel > LARGE and c.numel % block == 0 and _is_flat(c) else _FLAT if _is_flat(c) else _ROWS
        for c in codings
    ]
    for i in sorted(range(len(codings)), key=kinds.__getitem__):
        own, coding = planes[i], codings[i]
        in_plane = coding.signs == PLANE and not coding.format.is_signed
        k_planes = own[:-1] if in_plane else own
        rows.append(
            [
                means[i].data_ptr() if means else 0, laid_out[i].data_ptr(), held[i].data_ptr(), steps[i].data_ptr(),
                nonfinite[i].data_ptr(), exponents[i].data_ptr() if exponents else 0, streams[i], coding.rows,
                coding.columns, own[-1].data_ptr() if in_plane else coding.sign_key,
                *(plane.data_ptr() for plane in k_planes), *[0] * (4 - len(k_planes)), coding.first, 0,
            ]
        )  # fmt: skip
    device, ladder = laid_out[0].device, codings[0].format
    stochastic = (rounding or ladder.default_rounding) == "stochastic"
    feeds = stochastic and bool(means) and bool(moments)  # what rounding drops goes into the mean
    launches = Launches(device)
    table, clock = resident.table(rows, device)
    alone = _goes_alone([coding.numel for coding in codings], LARGE)
    ln_beta = _logarithm("log_beta", beta)
    if not alone:
        _add_clock(launches, table, clock, len(rows), ln_beta, tables.CODED_COLUMNS)
    wide = [
        tables.GRAD,
        *[tables.CODED_MEAN] * bool(means),
        *[tables.MOMENT] * bool(moments),
        *range(tables.PLANES, tables.CODED_FIRST),
    ]
    if _ladder_arguments(codings[0])["SIGN_MODE"] == 1:
        wide.append(tables.SIGNS)
    for kind in sorted(set(kinds)):
        first = sum(own < kind for own in kinds)
        rows_of_kind, flat = rows[first : first + kinds.count(kind)], kind != _ROWS
        block, lanes = _coded_block(codings[0], flat=flat, all_narrow=bool(exponents))
        warps = -(-block // (32 * 8))
        registers = CODED_REGISTERS[block // (32 * warps)]
        if kind == _EVEN and exponents and laid_out[0].dtype == torch.bfloat16:
            registers = EVEN_REGISTERS.get(len(_code_widths(codings[0])), registers)
        if means:
            registers = MEAN_REGISTERS[block // (32 * warps)]
        counts = [_count_blocks(row[tables.ROWS], row[tables.COLUMNS], block) for row in rows_of_kind]
        span = _span(sum(counts), CODED_SPAN // block, PROGRAMS)
        blocks = resident.blocks(tuple(-(-count // span) for count in counts), device, first)
        launches.add(Launch(
            step_coded.coded_kernel, len(blocks),
            {
                "table": table, "blocks": blocks, "clock": clock, **ln_beta, **_logarithm("log_momentum", momentum),
                "lr_at": lr if isinstance(lr, Tensor) else clock, "lr": 0.0, "spacing": ladder.spacing,
                "middle": float(ladder.top), "momentum": momentum, "recent": 1 - momentum,
                "returned": returned(momentum) * ladder.spacing, "room": room(momentum) * ladder.spacing * feeds,
                "per_rung": 1 / ladder.spacing, "beta": beta, "fresh": 1 - beta, "max_step": max_step,
                "decay": weight_decay, "G": _TYPES[laid_out[0].dtype],
                "HAS_MEAN": bool(means), "HAS_MOMENT": bool(moments), "EIGHT": bool(exponents),
                "CORRECT": bias_correction and max(momentum, beta) > 0,
                "DECAYS": weight_decay != 0, "MAXIMIZE": maximize,
                "STOCHASTIC": stochastic,
                "LR_IS_TENSOR": isinstance(lr, Tensor), **_ladder_arguments(codings[0]), "FLAT": flat,
                "EVEN": kind == _EVEN, "LANES": lanes, "ALIGNED": _aligned(rows_of_kind, wide),
                "INDEX": _index_type(max(c.first + c.rows * (c.columns + -c.columns % 8) for c in codings)),
                "FIELDS": tables.CODED_COLUMNS, "BLOCK": block, "SPAN": span, "ALONE": alone, "PTX": _takes_ptx(device),
            },
            unit=ladder.spacing,
            # AMD's compiler knows no such limit, and refuses it.
            options={"num_warps": warps} | ({} if HIP else {"maxnreg": registers}),
        ))  # fmt: skip
    launches(lr)
    torch.autograd.graph.increment_version([plane for own in planes for plane in own])
    same = all(a.data_ptr() == b.data_ptr() for a, b in zip(laid_out, grads, strict=True))
    return launches if same else None


def _ladder_arguments(coding: CodeLayout) -> dict[str, Any]:
    ladder = coding.format
    widths = _code_widths(coding)
    mode = 0 if ladder.is_signed else {PLANE: 1, SEED: 2}.get(coding.signs, 0)
    named = {f"W{i}": width for i, width in enumerate((*widths, 0, 0, 0)[:4])}
    return {"SIGNED": ladder.is_signed, "TOP": ladder.top, "SIGN_MODE": mode, **named}


def _code_widths(coding: CodeLayout) -> tuple[int, ...]:
    """The widths of the planes of k: all but the signs'."""
    return coding.widths[:-1] if not coding.format.is_signed and coding.signs == PLANE else coding.widths


def _is_flat(coding: CodeLayout) -> bool:
    """Whether all rows end on a byte of every plane, so that the matrix of codes is one long row."""
    return coding.columns % 8 == 0


def _coded_block(coding: CodeLayout, *, flat: bool, all_narrow: bool) -> tuple[int, int]:
    """Elements that a program steps at a time; and those of a group, eight.

    Where some take 4 bytes, a group is four, if those fill bytes: a load has at most 16 bytes.
    """
    narrowest = min(_code_widths(coding))
    lanes = 4 if flat and not all_narrow and narrowest > 1 else 8
    return max(32 * lanes, 8 * CODED_LINE // narrowest), lanes


def _span(count: int, most: int, programs: int) -> int:
    """Blocks that a program works through, of so many: a power of two, so that few kernels are compiled."""
    fair = min(most, count // programs)
    return 1 << max(0, fair.bit_length() - 1)


def _count_blocks(rows: int, columns: int, block: int) -> int:
    """Blocks of a matrix of codes, of so many elements, in groups of 8 that do not cross rows."""
    return -(-rows * -(-columns // 8) // (block // 8))


def _aligned(rows: list[list[int]], fields: list[int]) -> bool:
    return all(row[field] % 16 == 0 for row in rows for field in fields)


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a piece of memory without gaps or overlaps, in whatever order."""
    if tensor.is_contiguous():
        return True
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))
    return tensor.permute(order).is_contiguous()


def _laid_out_like(grad: Tensor, param: Tensor) -> Tensor:
    if grad.stride() == param.stride():
        return grad
    return torch.empty_like(param, dtype=grad.dtype).copy_(grad)


def _index_type(count: int) -> Any:
    return tl.int32 if count < 2**31 - 8 * BLOCK * SPAN else tl.int64


def _goes_alone(sizes: list[int], most: float) -> bool:
    """Whether the programs of a step reckon for themselves what else a clock, launched before, would have noted.

    That takes them some hundred instructions each, and the launch some microseconds. Programs of floats, which wait for
    memory, have the time for it; others only where there are at ``most`` so many elements. An empty tensor has no
    program that could count its step.
    """
    return 0 not in sizes and sum(sizes) <= most


def _logarithm(name: str, memory: float) -> dict[str, float]:
    """The natural logarithm of a moment's memory, in two halves of float32."""
    whole = math.log(memory) if memory > 0 else -1e30
    (high,) = struct.unpack("<f", struct.pack("<f", whole))
    return {name: high, f"{name}_rest": whole - high}


def _takes_ptx(device: torch.device) -> bool:
    """Whether kernels can have instructions of NVIDIA's: not in Triton's interpreter, nor on other devices."""
    return device.type == "cuda" and not HIP


def _float_bits(value: float) -> int:
    bits: int = struct.unpack("<i", struct.pack("<f", value))[0]
    return bits


def _add_clock(
    launches: Launches, table: Tensor, clock: Tensor, count: int, ln_beta: dict[str, float], fields: int
) -> None:
    """Add the launch that counts the step of every tensor, and notes what its programs need."""
    arguments = {"table": table, "clock": clock, "count": count, **ln_beta, "FIELDS": fields, "BLOCK": 256}
    launches.add(Launch(tables.clock_kernel, -(-count // 256), arguments))
