"""The step of floats on a CPU as one pass over memory: step.c, built on this machine when it is first needed.

compiled_codes.py does the same for codes.
"""

import ctypes
import functools
import math
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from torchmadam import moment8, noise, update

# Without errno and traps a compiler may use vectors. Not -ffast-math: the sources have to know infinities and NaNs.
_FLAGS = ["-O3", "-std=c11", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math"]
# In order of preference: not every machine has such vectors, not every compiler has OpenMP, or a name for its machine.
_WISHES = (
    "-march=native -fopenmp -mprefer-vector-width=512", "-march=native -fopenmp", "-fopenmp", "-march=native", ""
)  # fmt: skip
_FLOAT32, _BFLOAT16_NEAREST, _BFLOAT16_STOCHASTIC = range(3)
_ALONE = 2**15  # weights whose step takes as long as waking a thread


class _Tensor(ctypes.Structure):
    """The struct Tensor of step.c."""

    _fields_ = (
        ("weights", ctypes.c_void_p), ("grads", ctypes.c_void_p), ("means", ctypes.c_void_p),
        ("moments", ctypes.c_void_p), ("exponents", ctypes.c_void_p),
        ("count", ctypes.c_int64), ("first", ctypes.c_int64), ("nonfinite", ctypes.c_int64),
        ("momentum", ctypes.c_float), ("recent", ctypes.c_float), ("beta", ctypes.c_float), ("fresh", ctypes.c_float),
        ("rate", ctypes.c_float), ("top", ctypes.c_float), ("factor", ctypes.c_float), ("width", ctypes.c_float),
        ("least", ctypes.c_float), ("most", ctypes.c_float), ("phase", ctypes.c_uint32),
        ("low", ctypes.c_uint32), ("high", ctypes.c_uint32),
    )  # fmt: skip


def takes(param: Tensor, grad: Tensor, moments: Sequence[Tensor]) -> bool:
    """Whether :func:`float_step` can step this parameter: float32 or bfloat16, dense, and all in one memory order."""
    lying = (param, grad, *moments)
    if (
        not param.is_cpu
        or param.dtype not in (torch.float32, torch.bfloat16)
        or grad.dtype != param.dtype
        or grad.is_neg()  # memory has the opposite
        or param.numel() >= 2**31
    ):
        return False
    if all(t.is_contiguous() for t in lying):
        return True
    order = noise.memory_order(param)
    return all(t.permute(order).is_contiguous() for t in lying)


def float_step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    means: Sequence[Tensor],
    moments: Sequence[Tensor],
    exponents: Sequence[Tensor],
    steps: Sequence[Tensor],
    scales: Sequence[Tensor],
    nonfinite: Sequence[Tensor],
    *,
    streams: Sequence[int],
    crossings: Sequence[float],
    lr: float | Tensor,
    momentum: float,
    beta: float,
    max_step: float,
    bound: float | None,
    weight_decay: float,
    bias_correction: bool,
    rounding: str | None,
    maximize: bool,
    firsts: Sequence[int] = (),
) -> None:
    """:func:`torchmadam.update.madam_`, but for the last place, on tensors that it :func:`takes`, of one dtype.

    That decides now and then which way a mean is rounded to bfloat16, and a moment to 8 bits.
    """
    run = built("step.c", "madam_step", "-ffp-contract=fast")  # with fused multiply-adds
    lr = float(lr)
    dtype = params[0].dtype
    stochastic = dtype == torch.bfloat16 and rounding != "nearest"
    # Without a second moment u is 1 in size, whatever max_step is.
    top = min(lr * max_step if moments else lr, update.MAX_LOG_STEP)
    factor = math.exp(-lr * weight_decay)
    torch._foreach_add_(list(steps), 1)
    limits = torch.stack(list(scales)) if bound is None else torch.stack(list(scales)) * bound
    least, most = update.extremes(dtype, None if bound is None else limits)
    mosts = most.tolist() if isinstance(most, Tensor) else [most] * len(params)
    # Means are of gradients that have been turned already.
    turn = -1 if maximize else 1
    rates = [lr if means else math.copysign(lr, turn)] * len(params)
    if bias_correction:
        rates = [
            rate * math.sqrt(1 - beta**t) / (1 - momentum**t)
            for rate, t in zip(rates, torch.stack(list(steps)).tolist(), strict=True)
        ]
    halves = [(0, 0)] * len(params)
    if stochastic:
        halves = [noise.key_halves(key, int(step)) for key, step in zip(streams, steps, strict=True)]
    phases = [0] * len(params)
    if means or exponents:
        phases = [moment8.phase_number(key, int(step)) for key, step in zip(streams, steps, strict=True)]
    listed = [
        _Tensor(
            param.data_ptr(), grads[i].data_ptr(), means[i].data_ptr() if means else None,
            moments[i].data_ptr() if moments else None, exponents[i].data_ptr() if exponents else None,
            param.numel(), firsts[i] if firsts else 0, 0, momentum, turn * (1 - momentum), beta, 1 - beta, rates[i],
            top, factor, limit * crossings[i], least, mosts[i], phases[i], *halves[i],
        )
        for i, (param, limit) in enumerate(zip(params, limits.tolist(), strict=True))
    ]  # fmt: skip
    tensors = (_Tensor * len(params))(*listed)
    kind = _FLOAT32 if dtype == torch.float32 else _BFLOAT16_STOCHASTIC if stochastic else _BFLOAT16_NEAREST
    run(tensors, ctypes.c_int64(len(params)), kind, threads_for(sum(param.numel() for param in params)))
    for own, count in zip(tensors, nonfinite, strict=True):
        if own.nonfinite:
            count.add_(own.nonfinite)
    # Nobody else tells autograd that these were written.
    torch.autograd.graph.increment_version(list(params))


def threads_for(weights: int) -> int:
    """How many threads should step so many weights."""
    return min(torch.get_num_threads(), 1 + weights // _ALONE)


@functools.lru_cache(maxsize=2)
def built(source: str, name: str, flag: str) -> "ctypes._NamedFuncPointer":
    """A function of a source file beside this one, compiled and loaded. Takes a second or two, once a process."""
    found = [name for name in ("cc", "gcc", "clang") if shutil.which(name)]
    compiler = shlex.split(os.environ.get("CC", "")) or found[:1]
    if not compiler or shutil.which(compiler[0]) is None:
        raise RuntimeError(
            f"compile=True needs a C compiler, and {compiler[0] if compiler else 'cc, gcc or clang'} is not here; "
            f"install gcc or clang, name one in the environment variable CC, or use compile=False"
        )
    said = ""
    with tempfile.TemporaryDirectory(prefix="torchmadam-", ignore_cleanup_errors=True) as folder:
        library = Path(folder) / "step.so"
        for wishes in _WISHES:
            given = [*_FLAGS, flag, *wishes.split(), str(Path(__file__).with_name(source))]
            command = [*compiler, *given, "-o", str(library), "-lm"]
            done = subprocess.run(command, capture_output=True, text=True)
            said = said or f"{shlex.join(command)}\n{done.stderr.strip()}"
            if done.returncode == 0:
                try:
                    step: ctypes._NamedFuncPointer = getattr(ctypes.CDLL(str(library)), name)
                except OSError as error:  # a folder from which nothing may run, or a library that is not there
                    said += f"\n{error}"
                    continue
                step.restype = None
                return step
    raise RuntimeError(
        f"compile=True needs a working C compiler; use compile=False, or see what this one said:\n{said}"
    )
