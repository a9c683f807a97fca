"""The step of codes on a CPU as one pass over memory: step_coded.c, built like step.c, exact like Triton's kernels."""

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from torchmadam import moment, moment8, noise
from torchmadam.kernels.compiled import built, threads_for
from torchmadam.ladder.format import LadderFormat
from torchmadam.ladder.layout import PLANE, SEED, CodeLayout
from torchmadam.update import Pace

_PLANES = 4


class _Rule(ctypes.Structure):
    """The struct Rule of step_coded.c."""

    _fields_ = (
        ("planes", ctypes.c_int32), ("widths", ctypes.c_int32 * _PLANES),
        *((n, ctypes.c_int32) for n in ("top", "is_signed", "signs", "stochastic", "narrow", "maximize")),
        *((name, ctypes.c_float) for name in ("momentum", "recent", "returned", "beta", "fresh")),
        *((name, ctypes.c_float) for name in ("most", "pace", "rate", "pull")),
        ("tanhs", ctypes.c_void_p),
    )  # fmt: skip


class _Codes(ctypes.Structure):
    """The struct Codes of step_coded.c."""

    _fields_ = (
        ("planes", ctypes.c_void_p * _PLANES),
        *((name, ctypes.c_void_p) for name in ("sign_plane", "grads", "means", "moments", "exponents")),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "first", "nonfinite")),
        ("mean_correction", ctypes.c_float),
        ("correction", ctypes.c_float),
        *((name, ctypes.c_uint32) for name in ("phase", "low", "high", "sign_low", "sign_high")),
    )


def takes(coding: CodeLayout, moments: Sequence[Tensor]) -> bool:
    """Whether :func:`coded_step` can step such a parameter, if kernels can."""
    return coding.first + coding.numel < 2**31 and all(
        t.is_cpu and t.permute(coding.order).is_contiguous() for t in moments
    )


def coded_step(
    planes: Sequence[Sequence[Tensor]], codings: Sequence[CodeLayout], grads: Sequence[Tensor],
    means: Sequence[Tensor], moments: Sequence[Tensor], exponents: Sequence[Tensor], steps: Sequence[Tensor],
    nonfinite: Sequence[Tensor], *, streams: Sequence[int], lr: float | Tensor, momentum: float, beta: float,
    max_step: float, weight_decay: float, bias_correction: bool, rounding: str | None, maximize: bool,
) -> None:  # fmt: skip
    """:func:`torchmadam.update.madam_coded_` on tensors that it :func:`takes`, of one ladder and one kind of signs."""
    run = built("step_coded.c", "madam_coded_step", "-ffp-contract=off")
    ladder, signs = codings[0].format, codings[0].signs
    stochastic = (rounding or ladder.default_rounding) == "stochastic"
    pace = Pace.of(
        lr, ladder.spacing, momentum=momentum if means else 0.0, max_step=max_step, weight_decay=weight_decay,
        feeds=stochastic and bool(means) and bool(moments),
    )  # fmt: skip
    torch._foreach_add_(list(steps), 1)
    times = [int(step) for step in torch.stack(list(steps)).tolist()]
    narrow = all(grad.dtype == torch.bfloat16 for grad in grads)
    laid_out = [coding.matrix(grad).contiguous().resolve_neg() for coding, grad in zip(codings, grads, strict=True)]
    if not narrow:
        laid_out = [grad.float() for grad in laid_out]
    tanhs = _tanhs(ladder) if ladder.is_signed and weight_decay else None
    widths = codings[0].widths
    in_plane = not ladder.is_signed and signs == PLANE
    k_widths = widths[:-1] if in_plane else widths
    rule = _Rule(
        len(k_widths), (ctypes.c_int32 * _PLANES)(*k_widths), ladder.top, ladder.is_signed,
        1 if in_plane else 2 if signs == SEED else 0, stochastic, narrow, maximize, momentum, 1 - momentum,
        pace.returned, beta, 1 - beta, float(pace.most), 1.0 if pace.mean is None else float(pace.mean),
        float(pace.rate), float(pace.pull), None if tanhs is None else tanhs.data_ptr(),
    )  # fmt: skip
    corrections: list[Any] = [(1.0, 1.0)] * len(codings)
    if bias_correction:
        taken = torch.stack(list(steps))
        of_both = [moment.correction(taken, beta=each).tolist() for each in (momentum, beta)]
        corrections = [*zip(*of_both, strict=True)]
    listed = []
    for i, coding in enumerate(codings):
        places = [plane.data_ptr() for plane in planes[i]]
        listed.append(
            _Codes(
                (ctypes.c_void_p * _PLANES)(*places[: len(k_widths)]), places[-1] if in_plane else None,
                laid_out[i].data_ptr(), means[i].data_ptr() if means else None,
                moments[i].data_ptr() if moments else None, exponents[i].data_ptr() if exponents else None,
                coding.rows, coding.columns, coding.first, 0, *corrections[i],
                moment8.phase_number(streams[i], times[i]),
                *noise.key_halves(streams[i], times[i]),
                *noise.key_halves(coding.sign_key, 0),
            )
        )  # fmt: skip
    tensors = (_Codes * len(listed))(*listed)
    weights = sum(coding.numel for coding in codings)
    run(ctypes.byref(rule), tensors, ctypes.c_int64(len(listed)), threads_for(weights))
    for own, count in zip(tensors, nonfinite, strict=True):
        if own.nonfinite:
            count.add_(own.nonfinite)
    # Nobody else tells autograd that these were written.
    torch.autograd.graph.increment_version([plane for own in planes for plane in own])


@functools.lru_cache(maxsize=64)
def _tanhs(ladder: LadderFormat) -> Tensor:
    """Of every k spacing of a signed ladder, as the reference computes it; of codes that do not exist, too."""
    with _disable_current_modes():  # a table that is kept must be a real one, whoever is tracing
        k = torch.arange(2**ladder.code_bits, dtype=torch.int32, device="cpu") - ladder.top
        return torch.tanh(k.float() * ladder.spacing)
