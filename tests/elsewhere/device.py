"""A device that is neither a CPU nor a GPU of CUDA's and has no float64, emulated.

What Apple's GPUs refuse, it refuses. Its tensors wrap one on the CPU that does the work. Autograd, modules and
optimisers take them for another device's.
"""

import functools

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from torchmadam.kernels import ops

NAME = "elsewhere"
aten = torch.ops.aten
_LIBRARY = torch.library.Library("aten", "IMPL")
_WIDE = (torch.float64, torch.complex128)
# Our operators on devices that have no kernels of their own, as the dispatcher finds them.
_REFERENCES = {
    torch.ops.torchmadam.decode.default: ops._decode_reference,
    torch.ops.torchmadam.codes.default: ops._codes_reference,
    torch.ops.torchmadam.float_step_.default: ops._float_step_reference,
    torch.ops.torchmadam.coded_step_.default: functools.partial(ops._coded_step, False),
}


@functools.cache
def device() -> torch.device:
    """The device, which there is from then on."""
    _setup_privateuseone_for_python_backend(NAME)
    for name in ("empty.memory_format", "empty_strided"):  # of which PyTorch makes all other factories
        _LIBRARY.impl(name, functools.partial(_made, getattr(aten, name.split(".")[0])), "PrivateUse1")
    return torch.device(NAME, 0)


def _made(make, *sizes, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    return Elsewhere(
        make(*sizes, dtype=dtype, device="cpu", **{"memory_format": memory_format} if memory_format else {})
    )


class Elsewhere(Tensor):
    """A tensor of that device."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner):
        if inner.dtype in _WIDE:
            raise TypeError(f"cannot make a tensor of {inner.dtype}, because the device has none")
        made = Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=device(),
        )  # fmt: skip
        made.inner = inner
        return made

    # What wrappers lack and a real device's tensors have.

    def data_ptr(self):
        return self.inner.data_ptr()

    def untyped_storage(self):
        return self.inner.untyped_storage()

    def tolist(self):
        return self.inner.tolist()

    def __repr__(self):
        return f"Elsewhere({self.inner!r})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if not all(kind in (Elsewhere, Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # the other one takes itself apart
        kwargs = kwargs or {}
        if func in _REFERENCES:
            return _REFERENCES[func](*args, **kwargs)
        if func is aten._to_copy.default:
            return _copied(*args, **kwargs)
        strangers = [one for one in tree_leaves((args, kwargs)) if type(one) is Tensor and one.dim()]
        if func is aten.copy_.default:
            if strangers and strangers[0] is args[0]:  # read back
                return args[0].copy_(args[1].inner, *args[2:])
        elif strangers:
            raise RuntimeError(f"{func}: expected all tensors on one device, and found one of {strangers[0].device}")
        if "device" in kwargs:
            kwargs["device"] = "cpu"
        out = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
        wrapped = tree_map(lambda one: Elsewhere(one) if isinstance(one, Tensor) else one, out)
        return return_and_correct_aliasing(func, args, kwargs, wrapped)


def _copied(tensor, *, device=None, dtype=None, **other):
    """To another device, or dtype, or both; the dtype changes before it leaves, as it does on Apple's."""
    there = device is None or torch.device(device).type == NAME
    if dtype in _WIDE:
        raise TypeError(f"cannot convert a tensor to {dtype}, because the device has none")
    made = aten._to_copy.default(_inner(tensor), dtype=dtype, **other)
    return Elsewhere(made) if there else made


def _inner(one):
    return one.inner if isinstance(one, Elsewhere) else one
