"""Products with a coded matrix that never make a float one: generation, where a weight is read once for a few inputs.

``F.linear`` arrives as ``linear`` in inference mode, and as ``mm`` or ``addmm`` with a transposed view otherwise. What
needs a gradient, has many rows or lies on a CPU is decoded and computed as everything else.
"""

from typing import Any

import torch
from torch import Tensor

from torchmadam.kernels import linear_op
from torchmadam.ladder.layout import BLANK, SEED
from torchmadam.ladder.tensor import MOVES, LadderTensor

aten = torch.ops.aten
DEVICES = {"cuda"}


def _linear(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, weight, bias = (*args, None)[:3] if len(args) > 1 else (None, None, None)
    bias = kwargs.get("bias", bias)
    if not (isinstance(weight, LadderTensor) and weight.is_whole and weight.dim() == 2):
        return NotImplemented
    return _product(x, weight, bias)


def _mm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _product(args[0], args[1], None) if _is_transposed(args[1]) else NotImplemented


def _addmm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bias, x, weight = args[:3]
    plain = bias.dim() == 1 and kwargs.get("beta", 1) == 1 and kwargs.get("alpha", 1) == 1
    return _product(x, weight, bias) if plain and _is_transposed(weight) else NotImplemented


def _product(x: Any, weight: LadderTensor, bias: Tensor | None) -> Any:
    """X W^T + bias, with a whole weight or its transposed view; NotImplemented where decoding it is the better way."""
    coding = weight.coding
    if isinstance(x, LadderTensor) or x.device.type not in DEVICES or x.dtype not in linear_op.DTYPES or x.dim() == 0:
        return NotImplemented
    if x.dtype != weight.dtype or x.shape[-1] != coding.columns or coding.order != (0, 1) or coding.rows == 0:
        return NotImplemented
    if coding.first_row == BLANK or (coding.signs == SEED and not coding.format.is_signed):
        return NotImplemented
    given = [t for t in (x, weight, bias) if t is not None]
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        return NotImplemented
    # Last, since it puts a condition on the number of rows into a graph that is being traced.
    if not (x.shape[-1] > 0 and 0 < x.numel() // x.shape[-1] <= linear_op.MOST):
        return NotImplemented
    if bias is not None and (bias.dtype != x.dtype or tuple(bias.shape) != (coding.rows,)):
        return NotImplemented  # which says what is wrong
    weight._check_current()
    dense = bias.decode() if isinstance(bias, LadderTensor) else bias
    out = linear_op.linear(x.reshape(-1, coding.columns), weight.planes, weight.limit, coding, dense)
    return out.view(*x.shape[:-1], coding.rows)


def _is_transposed(weight: Any) -> bool:
    """Whether this is the transposed view of all of a matrix."""
    if not isinstance(weight, LadderTensor) or len(weight.coding.shape) != 2 or weight.storage_offset() != 0:
        return False
    rows, columns = weight.coding.shape
    return tuple(weight.shape) == (columns, rows) and weight.stride() == (1, columns)


MOVES.update({aten.linear.default: _linear, aten.mm.default: _mm, aten.addmm.default: _addmm})
