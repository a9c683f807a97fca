"""Coded tensors as plain ones: what a file holds, and what programs that know nothing of codes can save and load.

A coded tensor NAME is taken apart into NAME.plane0, NAME.plane1, ... (uint8 matrices) and NAME.limit (a float32
number); in a state dict, where nothing else can say what the bytes mean, NAME.ladder describes them: JSON, as uint8.
"""

import json
from collections.abc import Mapping, MutableMapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from torchmadam.ladder import packing
from torchmadam.ladder.convert import DTYPES
from torchmadam.ladder.format import LadderFormat
from torchmadam.ladder.layout import PLANE, POSITIVE, SEED, CodeLayout
from torchmadam.ladder.tensor import LadderTensor

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


class LadderFileError(ValueError):
    """A file that is damaged, of another version, not a coded model at all, or not a model of this shape."""


def plain_state_dict_(model: nn.Module) -> nn.Module:
    """From here on ``model.state_dict()`` holds plain tensors only, and ``load_state_dict`` takes them back as codes.

    For programs that write state dicts themselves, and cannot know what a coded tensor is: Accelerate's
    ``save_state``, ``safetensors.torch.save_file``. Nothing else changes; :func:`torchmadam.save` writes what it did.
    ``load_state_dict`` refuses planes of another ladder than the model's.
    """
    if _with_planes not in model._state_dict_hooks.values():
        model.register_state_dict_post_hook(_with_planes)
        model.register_load_state_dict_pre_hook(_with_codes)
    return model


def _with_planes(module: nn.Module, state: MutableMapping[str, Any], prefix: str, metadata: Any) -> None:
    """The hook of ``state_dict``. With ``keep_vars=True`` the caller wants the parameters themselves, and gets them."""
    seen: set[int] = set()
    for name, value in list(state.items()):
        if not name.startswith(prefix) or not isinstance(value, LadderTensor) or isinstance(value, nn.Parameter):
            continue
        del state[name]
        if value.planes[0].data_ptr() not in seen:  # a tensor that two names share is kept once
            about = as_bytes(description(value.coding, value.dtype))
            state.update(parts_of(name, value) | {f"{name}.ladder": about})
        seen.add(value.planes[0].data_ptr())


def _with_codes(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """The hook of ``load_state_dict``: puts codes together under every name of their parameter."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        if isinstance(param, LadderTensor):
            names.setdefault(param, []).append(prefix + name)
    for param, own in names.items():
        found = next((name for name in own if f"{name}.plane0" in state), None)
        if found is None:
            continue
        text = state.pop(f"{found}.ladder", None)
        coding = cast(LadderTensor, param).coding
        claims = description(coding, param.dtype) if text is None else _claims(found, text)
        tensor = put_together(found, state, claims)
        state |= dict.fromkeys(own, tensor)


def as_bytes(about: Mapping[str, Any]) -> Tensor:
    """A description as a tensor, for state dicts."""
    return torch.tensor(list(json.dumps(about, sort_keys=True).encode()), dtype=torch.uint8)


def _claims(name: str, text: Tensor) -> Any:
    try:
        return json.loads(bytes(text.tolist()))
    except (ValueError, TypeError) as error:
        raise LadderFileError(f"{name}.ladder is damaged: it is no JSON ({error})") from error


def description(coding: CodeLayout, dtype: torch.dtype) -> dict[str, Any]:
    """All that planes do not say about a coded tensor, in JSON's types."""
    ladder = coding.format
    return {
        "levels": ladder.levels,
        "spacing": ladder.spacing,
        "crossing": ladder.crossing,
        "shape": list(coding.shape),
        "signs": coding.signs,
        "sign_key": coding.sign_key,
        "dtype": str(dtype).removeprefix("torch."),
    }


def parts_of(name: str, value: LadderTensor) -> dict[str, Tensor]:
    """The planes and the limit of a coded tensor, in row-major order, under their names."""
    tensor = cast(LadderTensor, value.detach().clone(memory_format=torch.contiguous_format))
    return {f"{name}.plane{i}": plane for i, plane in enumerate(tensor.planes)} | {f"{name}.limit": tensor.limit}


def put_together(name: str, parts: MutableMapping[str, Tensor], claims: Any) -> LadderTensor:
    """The coded tensor of this name and description; its parts are taken out of the mapping, and checked."""
    coding, dtype = _described(name, claims)
    planes = [parts.pop(f"{name}.plane{i}", None) for i in range(len(coding.widths))]
    limit = parts.pop(f"{name}.limit", None)
    if limit is None or limit.dtype != torch.float32 or limit.dim() or not (torch.isfinite(limit) and limit >= 0):
        raise LadderFileError(f"{name}: the limit must be one finite, positive float32 number")
    found = [None if p is None else (p.dtype, tuple(p.shape)) for p in planes]
    if found != [(torch.uint8, shape) for shape in coding.plane_shapes]:
        raise LadderFileError(f"{name}: planes of {coding.plane_shapes} were announced, and the file has {found}")
    tensor = LadderTensor([p for p in planes if p is not None], limit, coding, dtype=dtype)
    _check_codes(name, tensor)
    return tensor


def _described(name: str, about: Mapping[str, Any]) -> tuple[CodeLayout, torch.dtype]:
    """A layout from its JSON description, which may say anything."""
    try:
        shape, signs, key = about["shape"], about["signs"], about["sign_key"]
        numbers = [about["levels"], *shape, key]
        if any(type(n) is not int for n in numbers) or any(n < 0 for n in shape) or not -(2**63) <= key < 2**63:
            raise ValueError("levels, shape and sign_key must be whole numbers")
        if signs not in (PLANE, POSITIVE, SEED):
            raise ValueError(f"signs {signs!r} are unknown")
        ladder = LadderFormat(about["levels"], float(about["spacing"]), float(about["crossing"]))
        return CodeLayout.contiguous(ladder, shape, signs, key), _DTYPES[about["dtype"]]
    except (ValueError, TypeError, KeyError, OverflowError, AttributeError) as error:
        raise LadderFileError(f"{name}: its description makes no sense ({error!r})") from error


def _check_codes(name: str, tensor: LadderTensor) -> None:
    """Refuse codes beyond the ladder's levels. In blocks, so as not to hold a whole tensor of integers."""
    coding, ladder = tensor.coding, tensor.coding.format
    if ladder.levels == 2**ladder.code_bits or not coding.numel:
        return
    widths = coding.widths[: len(packing.plane_widths(ladder.code_bits))]
    wide = min(coding.columns, 2**16)  # a multiple of 8, so that a block of columns starts on a byte
    tall = max(1, 2**16 // wide)
    for row in range(0, coding.rows, tall):
        for column in range(0, coding.columns, wide):
            count = min(wide, coding.columns - column)
            planes = [
                plane[row : row + tall, column * w // 8 :][:, : packing.bytes_per_row(count, w)]
                for plane, w in zip(tensor.planes, widths, strict=False)
            ]
            if int(packing.unpack(planes, widths, count).max()) >= ladder.levels:
                raise LadderFileError(f"{name}: a code lies beyond the {ladder.levels} levels of its ladder")
