"""LadderTensor: a tensor whose elements are codes.

It has three behaviours. Operators that move elements (views, copies, casts, transfers) stay coded. Operators that would
write floats into codes raise. Everything else decodes and computes. So autograd, which saves what operators are given,
saves codes.
"""

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn import Parameter
from torch.utils._pytree import tree_flatten

from torchmadam.kernels import ops
from torchmadam.ladder.format import LadderFormat
from torchmadam.ladder.layout import BLANK, CodeLayout
from torchmadam.ladder.rows import Rows

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
# Operators that move elements, filled in by moves.py, and products that never make floats of them, by products.py; a
# handler may decline with NotImplemented.
MOVES: dict[Any, Handler] = {}


class LadderTensor(Rows, Tensor):
    """A strided view of coded storage that behaves as a float tensor wherever it is read.

    Its dtype is the dtype it decodes to, and the dtype of its gradients; the precision is in the codes. Make one with
    :func:`torchmadam.to_ladder_`; train it with :class:`torchmadam.Madam`.

    Attributes:
        planes: the coded storage, uint8 matrices of ``coding.plane_shapes``.
        limit: sigma*, the largest weight, a 0-d float32 tensor.
        coding: the format, the shape of the storage, and where the signs are.
    """

    planes: Sequence[Tensor]
    limit: Tensor
    coding: CodeLayout
    # The parameter's name in its model, for messages.
    label: str | None
    # Set on casts that share the planes of their source: the planes' version when the cast was made.
    _cast_at: int | None

    @staticmethod
    def __new__(
        cls: type["LadderTensor"],
        planes: Sequence[Tensor],
        limit: Tensor,
        coding: CodeLayout,
        *,
        dtype: torch.dtype = torch.float32,
        size: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        offset: int = 0,
        requires_grad: bool = False,
    ) -> "LadderTensor":
        """A view of ``planes``; size, stride and offset are counted in elements and default to the whole tensor."""
        self: LadderTensor = Tensor._make_wrapper_subclass(
            cls,
            coding.shape if size is None else size,
            coding.strides if stride is None else stride,
            offset,
            dtype=dtype,
            device=planes[0].device,
            requires_grad=requires_grad,
        )
        self.planes = tuple(planes)
        for i, plane in enumerate(planes):  # PyTorch wants inner tensors as attributes
            setattr(self, f"plane{i}", plane)
        self.limit = limit
        self.coding = coding
        self.label = None
        self._cast_at = None
        return self

    @property
    def data(self) -> Tensor:
        """A view without a gradient. Assigning to it raises, since floats are not codes."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        raise refusal("p.data = ...")

    def _no_in_place(self, other: Any) -> Any:
        # PyTorch's own += turns a TypeError into "p = p + x", which would be a silent no-op.
        raise refusal("an in-place operation such as p += x")

    __iadd__ = __isub__ = __imul__ = __itruediv__ = __ifloordiv__ = __imod__ = _no_in_place
    __ipow__ = _no_in_place  # type: ignore[assignment]
    __iand__ = __ior__ = __ixor__ = __ilshift__ = __irshift__ = __imatmul__ = _no_in_place

    def numpy(self, *, force: bool = False) -> Any:
        """The decoded weights as a NumPy array."""
        return cast(LadderTensor, self.detach()).decode().numpy(force=force)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    def tolist(self) -> Any:
        """The decoded weights as a list."""
        return cast(LadderTensor, self.detach()).decode().tolist()

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 and spec else repr(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> "LadderTensor":
        if id(self) not in memo:
            if not self.is_leaf:
                raise RuntimeError("only tensors made by the user can be deep-copied, not results; detach it first")
            copy = cast(LadderTensor, self.detach().clone())
            copy.label = self.label
            memo[id(self)] = _as_was(copy, self.requires_grad, isinstance(self, Parameter))
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._check_current()
        view = (tuple(self.shape), self.stride(), self.storage_offset())
        flags = (self.requires_grad, isinstance(self, Parameter))
        return rebuilt, (self.planes, self.limit, self.coding, self.dtype, *view, *flags, self.label)

    def share_memory_(self) -> "LadderTensor":
        """Not available: share the planes instead."""
        raise TypeError(
            "share_memory_ cannot share a LadderTensor's storage; call it on each of p.planes, and on p.limit"
        )

    def storage(self) -> Any:
        """Not available: safetensors asks for it, to write floats that are not there."""
        raise TypeError(
            "a LadderTensor has no storage of floats; write models with torchmadam.save, or call "
            "torchmadam.plain_state_dict_(model) once, after which model.state_dict() holds plain tensors "
            "(torchmadam.hf.register_(model), if it is one of Transformers)"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"LadderTensor({tuple(self.shape)}, {self.coding.format}, {self.dtype}, {self.device}{grad})"

    # ---- what torch.compile asks of a tensor that wraps others

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        names = [f"plane{i}" for i in range(len(self.coding.widths))] + ["limit"]
        return names, (self.coding, self.dtype, self.storage_offset())

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> "LadderTensor":
        coding, dtype, offset = context
        planes = [inner[f"plane{i}"] for i in range(len(coding.widths))]
        return LadderTensor(planes, inner["limit"], coding, dtype=dtype, size=size, stride=stride, offset=offset)

    def _stable_hash_for_caching(self) -> str:
        """The compiler's cache key of this tensor: what a graph may depend on, and none of the codes."""
        about = (self.coding, self.dtype, self.device, tuple(self.shape), self.stride(), self.storage_offset())
        return hashlib.sha256(repr((*about, self.requires_grad)).encode()).hexdigest()

    # ---- reading

    @property
    def is_whole(self) -> bool:
        """Whether this is its whole storage, in the storage's own order."""
        return (
            tuple(self.shape) == self.coding.shape
            and self.stride() == self.coding.strides
            and self.storage_offset() == 0
        )

    def _check_current(self) -> None:
        if self._cast_at is not None and self._cast_at != version(self.planes):
            raise RuntimeError(
                "a weight has been changed by an optimiser step since it was cast for the forward pass; "
                "run the forward pass again before this backward"
            )

    def codes(self) -> Tensor:
        """The integer codes, signs included, in this view's shape."""
        self._check_current()
        return ops.codes(self.planes, self.coding).as_strided(self.shape, self.stride(), self.storage_offset())

    def decode(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weights as an ordinary tensor, of this tensor's dtype unless another is given."""
        self._check_current()
        dtype = self.dtype if dtype is None else dtype
        size, stride, offset = self.shape, self.stride(), self.storage_offset()
        if self.numel() == 0 or self.coding.first_row == BLANK:
            return torch.zeros(size, dtype=dtype, device=self.device)
        planes, first, last = self.planes, 0, self.coding.rows
        if not self.is_whole:
            # Only the rows that this view touches.
            columns = self.coding.columns
            first = offset // columns
            last = (offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))) // columns + 1
            planes = [plane[first:last] for plane in planes] if (first, last) != (0, self.coding.rows) else planes
        matrix = ops.decode(planes, self.limit, self.coding, first, dtype)
        if is_row_major(size, stride) and self.numel() == matrix.numel():
            return matrix.view(size)
        return matrix.as_strided(size, stride, offset - first * self.coding.columns)

    def __dlpack__(self, *_: Any, **__: Any) -> Any:
        """Refuse: what others would find in the memory is not numbers. (``to_dlpack``, an old name, does not ask.)"""
        raise TypeError("a LadderTensor's weights are codes, which DLPack cannot describe; use .decode() first")

    # ---- the three behaviours

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    @_disable_dynamo  # after a graph break the compiler would trace into here
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # What moves elements stays coded,
        handler = MOVES.get(func) or (MOVES["view"] if func.is_view and not _is_composite(func) else None)
        moved = handler(func, args, kwargs) if handler else NotImplemented
        if moved is not NotImplemented:
            return moved
        if _is_composite(func):
            return func.decompose(*args, **kwargs)
        # what would write floats into codes raises,
        if any(isinstance(t, LadderTensor) for t in _written(func, args, kwargs)):
            raise refusal(func.name().replace("aten::", ""))
        # and everything else decodes and computes.
        return func(*map(_decoded, args), **{name: _decoded(value) for name, value in kwargs.items()})


@functools.lru_cache(maxsize=4096)
def _is_composite(func: Any) -> bool:
    """Whether an operator is made of others, which in inference mode are not put in its place before it comes here.

    Some call themselves views and copy if they have to, such as ``contiguous`` and ``reshape``.
    """
    found: bool = func._can_decompose()
    return found


def _decoded(value: Any) -> Any:
    """An operator's argument without codes."""
    if isinstance(value, LadderTensor):
        return value.decode()
    return [*map(_decoded, value)] if isinstance(value, list | tuple) else value


def refusal(operation: str) -> TypeError:
    """The error for an operation that would write floats into codes."""
    return TypeError(
        f"{operation} would write floats into a LadderTensor, whose weights are codes; train it with torchmadam.Madam, "
        f"or turn it back into floats with torchmadam.to_dense_(model). Instead of load_state_dict with floats: load "
        f"first, then to_ladder_(model, ..., init='nearest'). Of swa_utils and other averages: torchmadam.average. Of "
        f"DistributedDataParallel: torchmadam.distributed.data_parallel(model), or init_sync=False"
    )


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The tensors that an operator writes to, by its schema."""
    if not func._schema.is_mutable:
        return []
    named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    targets = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return tree_flatten([named.get(name) for name in targets])[0]


def is_row_major(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether these are the strides of a new tensor, those of dimensions of length 1 among them."""
    expected = 1
    for n, step in zip(reversed(size), reversed(stride), strict=True):
        if step != expected:
            return False
        expected *= max(n, 1)
    return True


def version(planes: Sequence[Tensor]) -> int | None:
    """A number that every change of the planes raises; None while tracing, where nothing changes."""
    total = 0
    for plane in planes:
        if plane.is_inference() or (type(plane) is not Tensor and isinstance(plane, FakeTensor | FunctionalTensor)):
            return None
        total += plane._version
    return total


def rebuilt(
    planes: list[Tensor], limit: Tensor, coding: CodeLayout, dtype: torch.dtype, size: tuple[int, ...],
    stride: tuple[int, ...], offset: int, requires_grad: bool, parameter: bool, label: str | None,
) -> LadderTensor:  # fmt: skip
    """A tensor from what its pickle holds: plain tensors and numbers."""
    tensor = LadderTensor(planes, limit, coding, dtype=dtype, size=size, stride=stride, offset=offset)
    tensor.label = label
    return _as_was(tensor, requires_grad, parameter)


def _as_was(tensor: LadderTensor, requires_grad: bool, parameter: bool) -> LadderTensor:
    if not parameter:
        return cast(LadderTensor, tensor.requires_grad_(requires_grad))
    made = cast(LadderTensor, Parameter(tensor, requires_grad))
    made.label = tensor.label
    return made


torch.serialization.add_safe_globals([rebuilt, LadderTensor, CodeLayout, LadderFormat])
