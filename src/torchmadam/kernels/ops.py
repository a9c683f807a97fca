"""Operators of the library ``torchmadam``: PyTorch picks the device, and its compilers see one node.

The reference runs wherever no kernel is registered, on a CPU above all, where steps may be compiled instead;
on CUDA devices Triton kernels run. Defined with ``torch.library.Library``: ``torch.library.custom_op`` costs several
times as much a call.
"""

import functools
import importlib.util
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from torchmadam import update
from torchmadam.kernels import compiled, compiled_codes
from torchmadam.ladder.format import LadderFormat
from torchmadam.ladder.layout import SEED, CodeLayout
from torchmadam.messages import warn

_LIBRARY = torch.library.Library("torchmadam", "DEF")
_LADDER = "int levels, float spacing, float crossing"
_RULE = (
    "Tensor? lr_tensor, float lr, float momentum, float beta, float max_step, float weight_decay, "
    "bool bias_correction, str? rounding, bool maximize"
)
_LIBRARY.define(
    f"decode(Tensor[] planes, Tensor limit, {_LADDER}, SymInt[] shape, int[] order, str signs, int sign_key, "
    f"SymInt first_row, ScalarType dtype) -> Tensor"
)
_LIBRARY.define(
    f"codes(Tensor[] planes, {_LADDER}, SymInt[] shape, int[] order, str signs, int sign_key, SymInt first_row) "
    "-> Tensor"
)
_LIBRARY.define(
    "float_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(f!)[] means, Tensor(b!)[] moments, "
    "Tensor(c!)[] exponents, Tensor(d!)[] steps, Tensor[] scales, Tensor(e!)[] nonfinite, int[] streams, "
    "float[] crossings, float? bound, "
    f"{_RULE}, int[] firsts) -> ()"
)
_LIBRARY.define(
    f"coded_step_(Tensor(a!)[] planes, {_LADDER}, str signs, int[] sign_keys, int[] first_rows, "
    "int[] dims, int[] shapes, int[] orders, Tensor[] grads, Tensor(f!)[] means, Tensor(b!)[] moments, "
    "Tensor(c!)[] exponents, Tensor(d!)[] steps, Tensor(e!)[] nonfinite, "
    f"int[] streams, {_RULE}) -> ()"
)


class _Made(threading.local):
    """What the operators below have launched since somebody last asked, one entry a call; None: not repeatable."""

    launches: list[Any] | None = None

    def note(self, launches: Any) -> None:
        if self.launches is not None:
            self.launches.append(launches)

    def take(self) -> list[Any] | None:
        taken, self.launches = self.launches, None
        return taken if taken and None not in taken else None


_MADE = _Made()


# ---- decoding and unpacking


def decode(planes: Sequence[Tensor], limit: Tensor, coding: CodeLayout, first_row: int, dtype: torch.dtype) -> Tensor:
    """The rows from ``first_row`` on that these planes hold, as a float matrix in memory order."""
    ladder = coding.format
    out: Tensor = torch.ops.torchmadam.decode(
        planes, limit, ladder.levels, ladder.spacing, ladder.crossing, coding.shape, coding.order, coding.signs,
        coding.sign_key, max(coding.first_row, 0) + first_row, dtype,
    )  # fmt: skip
    return out


def _decode_reference(
    planes: list[Tensor], limit: Tensor, levels: int, spacing: float, crossing: float, shape: list[int],
    order: list[int], signs: str, sign_key: int, first_row: int, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    coding = _coding(levels, spacing, crossing, tuple(shape), tuple(order), signs, sign_key)
    return coding.format.decode(coding.unpack(planes, first_row), limit, dtype)


def _decode_cuda(
    planes: list[Tensor], limit: Tensor, levels: int, spacing: float, crossing: float, shape: list[int],
    order: list[int], signs: str, sign_key: int, first_row: int, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    coding = _coding(levels, spacing, crossing, tuple(shape), tuple(order), signs, sign_key)
    if _has_triton() and _kernels_take(coding) and dtype != torch.float64:
        return _launch_decode().decode(planes, limit, coding, first_row, dtype)  # type: ignore[no-any-return]
    return coding.format.decode(coding.unpack(planes, first_row), limit, dtype)


def _decode_shape(
    planes: list[Tensor], limit: Tensor, levels: int, spacing: float, crossing: float, shape: list[int],
    order: list[int], signs: str, sign_key: int, first_row: int, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    return planes[0].new_empty((planes[0].shape[0], _columns(shape)), dtype=dtype)


def codes(planes: Sequence[Tensor], coding: CodeLayout) -> Tensor:
    """The matrix of int32 codes, signs included: :meth:`CodeLayout.unpack`, in one launch on a GPU."""
    ladder = coding.format
    out: Tensor = torch.ops.torchmadam.codes(
        planes, ladder.levels, ladder.spacing, ladder.crossing, coding.shape, coding.order, coding.signs,
        coding.sign_key, max(coding.first_row, 0),
    )  # fmt: skip
    return out


def _codes_reference(
    planes: list[Tensor], levels: int, spacing: float, crossing: float, shape: list[int], order: list[int], signs: str,
    sign_key: int, first_row: int,
) -> Tensor:  # fmt: skip
    return _coding(levels, spacing, crossing, tuple(shape), tuple(order), signs, sign_key).unpack(planes, first_row)


def _codes_cuda(
    planes: list[Tensor], levels: int, spacing: float, crossing: float, shape: list[int], order: list[int], signs: str,
    sign_key: int, first_row: int,
) -> Tensor:  # fmt: skip
    coding = _coding(levels, spacing, crossing, tuple(shape), tuple(order), signs, sign_key)
    if _has_triton() and _kernels_take(coding):
        return _launch_decode().codes(planes, coding, first_row)  # type: ignore[no-any-return]
    return coding.unpack(planes, first_row)


def _codes_shape(
    planes: list[Tensor], levels: int, spacing: float, crossing: float, shape: list[int], order: list[int], signs: str,
    sign_key: int, first_row: int,
) -> Tensor:  # fmt: skip
    return planes[0].new_empty((planes[0].shape[0], _columns(shape)), dtype=torch.int32)


def _columns(shape: list[int]) -> int:
    columns = 1
    for length in shape[1:]:
        columns = columns * length
    return columns


# ---- a step of floats


def float_step_(
    params: Sequence[Tensor], grads: Sequence[Tensor], means: Sequence[Tensor], moments: Sequence[Tensor],
    exponents: Sequence[Tensor], steps: Sequence[Tensor], scales: Sequence[Tensor], nonfinite: Sequence[Tensor], *,
    streams: Sequence[int], crossings: Sequence[float], bound: float | None, compile: bool, lr: float | Tensor,
    firsts: Sequence[int] = (), **rule: Any,
) -> list[Any] | None:  # fmt: skip
    """:func:`torchmadam.update.madam_`, once for every device and pair of dtypes among these tensors.

    ``compile``: what compiled.py takes, which is on a CPU, goes there. Where only Triton's kernels ran, their launches
    are returned: functions of lr that make the same step again.
    """
    if torch.compiler.is_compiling():  # plain operations, which the compiler can fuse
        update.madam_(
            params, grads, means, moments, exponents, steps, scales, nonfinite, streams=streams, crossings=crossings,
            bound=bound, lr=lr, firsts=firsts, **rule,
        )  # fmt: skip
        return None
    _MADE.launches = []
    keys = [
        (p.device, p.dtype, g.dtype, compile and compiled.takes(p, g, m))
        for p, g, m in zip(params, grads, _each(len(params), means, moments), strict=True)
    ]
    for pick in _alike(keys):
        tensors = [pick(own) for own in (params, grads, means, moments, exponents, steps, scales, nonfinite)]
        if pick(keys)[0][-1]:
            compiled.float_step(
                *tensors, streams=pick(streams), crossings=pick(crossings), bound=bound, lr=lr,
                firsts=pick(firsts), **rule,
            )  # fmt: skip
            _MADE.note(None)
            continue
        torch.ops.torchmadam.float_step_(
            *tensors, pick(streams), pick(crossings), bound, *_lr_of(lr), *_rule_of(rule), pick(firsts)
        )  # fmt: skip
    return _MADE.take()


def _float_step_reference(
    params: list[Tensor], grads: list[Tensor], means: list[Tensor], moments: list[Tensor], exponents: list[Tensor],
    steps: list[Tensor], scales: list[Tensor], nonfinite: list[Tensor], streams: list[int], crossings: list[float],
    bound: float | None, lr_tensor: Tensor | None, lr: float, momentum: float, beta: float, max_step: float,
    weight_decay: float, bias_correction: bool, rounding: str | None, maximize: bool, firsts: list[int],
) -> None:  # fmt: skip
    update.madam_(
        params, grads, means, moments, exponents, steps, scales, nonfinite, streams=streams, crossings=crossings,
        bound=bound, lr=lr if lr_tensor is None else lr_tensor, momentum=momentum, beta=beta, max_step=max_step,
        weight_decay=weight_decay, bias_correction=bias_correction, rounding=rounding, maximize=maximize, firsts=firsts,
    )  # fmt: skip
    _MADE.note(None)


def _float_step_cuda(
    params: list[Tensor], grads: list[Tensor], means: list[Tensor], moments: list[Tensor], exponents: list[Tensor],
    steps: list[Tensor], scales: list[Tensor], nonfinite: list[Tensor], streams: list[int], crossings: list[float],
    bound: float | None, lr_tensor: Tensor | None, lr: float, momentum: float, beta: float, max_step: float,
    weight_decay: float, bias_correction: bool, rounding: str | None, maximize: bool, firsts: list[int],
) -> None:  # fmt: skip
    rule: dict[str, Any] = {
        "lr": _lr_for_kernels(lr_tensor, lr), "momentum": momentum, "beta": beta, "max_step": max_step,
        "bound": bound, "weight_decay": weight_decay, "bias_correction": bias_correction, "rounding": rounding,
        "maximize": maximize,
    }  # fmt: skip
    fast = _has_triton()
    held = _each(len(params), means, moments)
    keys = [fast and _launch().takes(p, g, m) for p, g, m in zip(params, grads, held, strict=True)]
    for pick in _alike(keys):
        step = _launch().float_step if pick(keys)[0] else update.madam_
        launches = step(
            pick(params), pick(grads), pick(means), pick(moments), pick(exponents), pick(steps), pick(scales),
            pick(nonfinite), streams=pick(streams), crossings=pick(crossings), firsts=pick(firsts), **rule,
        )  # fmt: skip
        _MADE.note(launches)


# ---- a step of codes


def coded_step_(
    planes: Sequence[Sequence[Tensor]], codings: Sequence[CodeLayout], grads: Sequence[Tensor],
    means: Sequence[Tensor], moments: Sequence[Tensor], exponents: Sequence[Tensor], steps: Sequence[Tensor],
    nonfinite: Sequence[Tensor], *, streams: Sequence[int], compile: bool, lr: float | Tensor, **rule: Any,
) -> list[Any] | None:  # fmt: skip
    """:func:`torchmadam.update.madam_coded_`, once for every device, ladder, kind of signs and dtype of gradients.

    ``compile`` and what is returned are as for :func:`float_step_`.
    """
    _MADE.launches = []
    held = _each(len(grads), means, moments)
    can = [*map(_kernels_take, codings)]
    in_c = [
        compile and g.is_cpu and able and compiled_codes.takes(c, m)
        for g, able, c, m in zip(grads, can, codings, held, strict=True)
    ]
    keys = [(g.device, g.dtype, c.format, c.signs, *how) for g, c, *how in zip(grads, codings, can, in_c, strict=True)]
    for pick in _alike(keys):
        own = pick(codings)
        ladder = own[0].format
        if pick(in_c)[0]:
            compiled_codes.coded_step(
                pick(planes), own, pick(grads), pick(means), pick(moments), pick(exponents), pick(steps),
                pick(nonfinite), streams=pick(streams), lr=lr, **rule,
            )  # fmt: skip
            _MADE.note(None)
            continue
        torch.ops.torchmadam.coded_step_(
            list(chain.from_iterable(pick(planes))), ladder.levels, ladder.spacing, ladder.crossing, own[0].signs,
            [c.sign_key for c in own], [c.first_row for c in own], [len(c.shape) for c in own],
            list(chain.from_iterable(c.shape for c in own)), list(chain.from_iterable(c.order for c in own)),
            pick(grads), pick(means), pick(moments), pick(exponents), pick(steps), pick(nonfinite), pick(streams),
            *_lr_of(lr), *_rule_of(rule),
        )  # fmt: skip
    return _MADE.take()


def _coded_step(kernel: bool, *arguments: Any) -> None:
    (
        planes, levels, spacing, crossing, signs, sign_keys, first_rows, dims, shapes, orders, grads, means, moments,
        exponents, steps, nonfinite, streams, lr_tensor, lr, momentum, beta, max_step, weight_decay, bias_correction,
        rounding, maximize,
    ) = arguments  # fmt: skip
    codings, at = [], 0
    for count, key, first in zip(dims, sign_keys, first_rows, strict=True):
        shape, order = tuple(shapes[at : at + count]), tuple(orders[at : at + count])
        codings.append(_coding(levels, spacing, crossing, shape, order, signs, key, first))
        at += count
    each = len(codings[0].widths)
    own = [planes[i : i + each] for i in range(0, len(planes), each)]
    step = _launch().coded_step if kernel and _has_triton() and _kernels_take(codings[0]) else update.madam_coded_
    launches = step(
        own, codings, grads, means, moments, exponents, steps, nonfinite, streams=streams,
        lr=_lr_for_kernels(lr_tensor, lr) if kernel else lr if lr_tensor is None else lr_tensor,
        momentum=momentum, beta=beta, max_step=max_step, weight_decay=weight_decay, bias_correction=bias_correction,
        rounding=rounding, maximize=maximize,
    )  # fmt: skip
    _MADE.note(launches)


# ---- shared


def _each(count: int, *lists: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """What so many parameters have, each of those lists that are not empty."""
    return [*zip(*filter(len, lists), strict=True)] or [()] * count


def _alike(keys: Sequence[Hashable]) -> Iterable[Callable[[Sequence[Any]], list[Any]]]:
    """For every distinct key a function that picks, from a list, the entries that have it; empty lists stay empty."""
    for key in dict.fromkeys(keys):
        places = [i for i, other in enumerate(keys) if other == key]
        yield functools.partial(_picked, places)


def _picked(places: list[int], entries: Sequence[Any]) -> list[Any]:
    return [entries[i] for i in places] if entries else []


def _lr_of(lr: float | Tensor) -> tuple[Tensor | None, float]:
    return (lr, 0.0) if isinstance(lr, Tensor) else (None, lr)


def _lr_for_kernels(lr_tensor: Tensor | None, lr: float) -> float | Tensor:
    """A kernel takes a number, or a tensor that is on its device."""
    if lr_tensor is None:
        return lr
    return lr_tensor if lr_tensor.is_cuda else float(lr_tensor)


def _rule_of(rule: dict[str, Any]) -> list[Any]:
    names = ("momentum", "beta", "max_step", "weight_decay", "bias_correction", "rounding", "maximize")
    return [rule[name] for name in names]


@functools.lru_cache(maxsize=4096)
def _coding(
    levels: int, spacing: float, crossing: float, shape: tuple[int, ...], order: tuple[int, ...], signs: str, key: int,
    first_row: int = 0,
) -> CodeLayout:  # fmt: skip
    return CodeLayout(LadderFormat(levels, spacing, crossing), shape, order, signs, key, first_row)


def _kernels_take(coding: CodeLayout) -> bool:
    """Kernels key generated signs by memory position, which is the logical one in row-major order only."""
    return coding.signs != SEED or coding.order == tuple(range(len(coding.order)))


@functools.lru_cache(maxsize=1)
def _has_triton() -> bool:
    if importlib.util.find_spec("triton") is not None:
        return True
    warn("Triton is not installed, so weights on a GPU take the slow way; pip install 'torchmadam[gpu]'")
    return False


@functools.lru_cache(maxsize=1)
def _launch() -> Any:
    from torchmadam.kernels import launch

    return launch


@functools.lru_cache(maxsize=1)
def _launch_decode() -> Any:
    from torchmadam.kernels import launch_decode

    return launch_decode


_LIBRARY.impl("decode", _decode_reference, "CompositeExplicitAutograd")
_LIBRARY.impl("decode", _decode_cuda, "CUDA")
_LIBRARY.impl("codes", _codes_reference, "CompositeExplicitAutograd")
_LIBRARY.impl("codes", _codes_cuda, "CUDA")
_LIBRARY.impl("float_step_", _float_step_reference, "CompositeExplicitAutograd")
_LIBRARY.impl("float_step_", _float_step_cuda, "CUDA")
_LIBRARY.impl("coded_step_", functools.partial(_coded_step, False), "CompositeExplicitAutograd")
_LIBRARY.impl("coded_step_", functools.partial(_coded_step, True), "CUDA")
torch.library.register_fake("torchmadam::decode", _decode_shape, lib=_LIBRARY)
torch.library.register_fake("torchmadam::codes", _codes_shape, lib=_LIBRARY)
