"""Coded models in files. The format is specified in docs/format.md, version 1; nothing in it is ever executed.

A file is a safetensors file. A coded parameter NAME is stored as NAME.plane0, NAME.plane1, ... (uint8 matrices) and
NAME.limit (a float32 number); everything else in the model's state dict is stored as it is, and a tensor that two names
share is stored once. Two entries of the metadata say the rest: "torchmadam", a JSON object with the version, a
description of every coded parameter and the shared names, and "sha256", a checksum of all tensors and of that text.
"""

import ctypes
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import safetensors
import torch
from torch import Tensor, nn

from torchmadam import shards
from torchmadam.files import write_atomically
from torchmadam.groups import unwrapped
from torchmadam.ladder.convert import replace_tensors
from torchmadam.ladder.plain import LadderFileError as LadderFileError  # who reads files looks for it here
from torchmadam.ladder.plain import description, parts_of, put_together
from torchmadam.ladder.tensor import LadderTensor
from torchmadam.messages import require_module

VERSION = 1
_SAFETENSORS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}


def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a model, coded and float parts alike, to one file.

    The file appears under its name only when it is complete and on the disk: a crash leaves the old one whole.
    """
    require_module(model, "save")
    # keep_vars: the model's own tensors, whatever plain_state_dict_ makes of them for others.
    write(*flatten(_unwrapped(model.state_dict(keep_vars=True))), path)


def load(path: str | os.PathLike[str], model: nn.Module) -> nn.Module:
    """Read a file into a model of the same architecture, whose parameters may be floats or codes of any kind.

    Afterwards the model holds exactly what the file holds. Parameters that are coded alike already are filled in
    place; others are replaced, so make the optimiser afterwards. Whatever is wrong with the file raises a
    :class:`LadderFileError`, and the model is then as it was.
    """
    require_module(model, "load")
    return fill(model, unflatten(*read(path)), os.fspath(path))


def fill(model: nn.Module, state: Mapping[str, Tensor], source: str) -> nn.Module:
    """Make a model hold a state dict of floats and codes; ``source`` is for messages."""
    # keep_vars: the model's own tensors, under the names that its state dict gives them.
    own = _unwrapped(model.state_dict(keep_vars=True))
    problems = [f"missing: {name}" for name in sorted(own.keys() - state.keys())]
    problems += [f"not in the model: {name}" for name in sorted(state.keys() - own.keys())]
    first: dict[int, str] = {}
    for name in sorted(own.keys() & state.keys()):
        value, target = state[name], own[name]
        if value.shape != target.shape:
            problems.append(f"{name} has shape {tuple(value.shape)}, in the model {tuple(target.shape)}")
        elif not isinstance(value, LadderTensor) and value.dtype != target.dtype:
            problems.append(f"{name} is {value.dtype}, in the model {target.dtype}: convert the model first")
        earlier = first.setdefault(id(target), name)
        if not _equal(state[earlier], value):
            problems.append(f"{earlier} and {name} differ, and are one tensor in the model")
    if problems:
        more = f", and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise LadderFileError(f"{source} is not a file of this model: {'; '.join(problems[:8])}{more}")
    _fill(model, {id(target): (target, state[name], name) for name, target in own.items()})
    return model


def _unwrapped(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict under names without what torch.compile and other wrappers add to them."""
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} is a {type(value).__name__}, not a tensor, and the file format holds tensors only")
        if shards.is_sharded(value):
            raise TypeError(
                f"{name} is spread over ranks, and this file holds whole tensors; use torchmadam.distributed.save, "
                f"load and export"
            )
    plain = {unwrapped(name): value for name, value in state.items()}
    return plain if len(plain) == len(state) else dict(state)


def flatten(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A state dict as plain tensors, and a description of which of them are codes, and which names share one."""
    tensors: dict[str, Tensor] = {}
    coded: dict[str, Any] = {}
    shared: dict[str, str] = {}
    first: dict[Any, str] = {}
    for name, value in state.items():
        storage = value.planes[0] if isinstance(value, LadderTensor) else value
        place = (storage.data_ptr(), value.shape, value.stride(), value.storage_offset(), value.dtype)
        if value.numel() and first.setdefault(place, name) != name:
            shared[name] = first[place]
        elif isinstance(value, LadderTensor):
            coded[name] = description(value.coding, value.dtype)
            tensors |= {part: tensor.cpu() for part, tensor in parts_of(name, value).items()}
        elif value.dtype not in _SAFETENSORS:
            raise TypeError(f"{name} has dtype {value.dtype}, which the file format does not hold; convert it first")
        else:
            tensors[name] = value.detach().cpu().contiguous()
    return tensors, {"version": VERSION, "coded": coded, "shared": shared}


def unflatten(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> dict[str, Tensor]:
    """The state dict that :func:`flatten` took apart. Every claim of the description is checked against the bytes."""
    left = dict(tensors)
    state: dict[str, Tensor] = {}
    for name, claims in about["coded"].items():
        left.pop(f"{name}.ladder", None)  # the same again, where a state dict of plain tensors was saved
        state[name] = put_together(name, left, claims)
    clash = state.keys() & left.keys()
    if clash:
        raise LadderFileError(f"{sorted(clash)[0]} is in the file both as codes and as floats")
    state |= left
    for name, original in about["shared"].items():
        if not isinstance(original, str) or name in state or original not in state:
            raise LadderFileError(f"{name} is said to share the tensor {original!r}, which makes no sense")
        state[name] = state[original]
    return state


def write(tensors: Mapping[str, Tensor], about: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write plain tensors and their description, atomically."""
    # Wide types first, as safetensors does itself, so that every tensor is aligned.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": metadata_of(tensors, about)}
    end = 0
    for name in names:
        start, end = end, end + len(_bytes(tensors[name]))
        dtype = _SAFETENSORS[tensors[name].dtype]
        header[name] = {"dtype": dtype, "shape": list(tensors[name].shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)

    write_atomically(path, [len(text).to_bytes(8, "little") + text, *(_bytes(tensors[name]) for name in names)])


def metadata_of(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> dict[str, str]:
    """The two entries of a file's metadata that make plain tensors a coded model."""
    text = json.dumps(about, sort_keys=True)
    return {"torchmadam": text, "sha256": _checksum(tensors, text)}


def read(path: str | os.PathLike[str], *more: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The plain tensors of a file, or of several that hold parts of one model, and their description, all checked."""
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    try:
        for part in (path, *more):
            with safetensors.safe_open(part, framework="pt") as file:
                metadata |= file.metadata() or {}
                for name in file.keys():  # noqa: SIM118 (not a mapping)
                    # A copy: what comes back is a view of the file, which may change after it has been checked.
                    tensors[name] = file.get_tensor(name).clone()
    except FileNotFoundError:
        raise
    except Exception as error:  # the parser's own errors are of many kinds
        raise LadderFileError(f"{path} is not a safetensors file, or is damaged: {error}") from error
    if "torchmadam" not in metadata or "sha256" not in metadata:
        raise LadderFileError(
            f"{path} was not written by torchmadam.save: its metadata does not describe any codes; to load an ordinary "
            f"file of floats, model.load_state_dict(safetensors.torch.load_file(path))"
        )
    description = metadata["torchmadam"]
    if len(description) > 4096 + 2048 * len(tensors):
        raise LadderFileError(
            f"{path} is damaged: its description is longer than that of {len(tensors)} tensors can be"
        )
    unknown = [name for name, tensor in tensors.items() if tensor.dtype not in _SAFETENSORS]
    if unknown:
        raise LadderFileError(f"{path} holds {unknown[0]} of a type that a coded model does not have")
    try:
        about = json.loads(description)
        version = about["version"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise LadderFileError(f"{path} is damaged: its description cannot be read ({error})") from error
    if version != VERSION:
        raise LadderFileError(f"{path} has version {version!r}; this torchmadam reads version {VERSION}: update it")
    if _checksum(tensors, description) != metadata["sha256"]:
        raise LadderFileError(f"{path} is damaged: its checksum does not match; copy it again, or use an older one")
    if not all(isinstance(about.get(key), dict) for key in ("coded", "shared")):
        raise LadderFileError(f"{path} is damaged: its description lacks its parts")
    return tensors, about


def _checksum(tensors: Mapping[str, Tensor], description: str) -> str:
    digest = hashlib.sha256(description.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\n{name} {_SAFETENSORS[tensor.dtype]} {list(tensor.shape)}\n".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor; valid as long as the tensor is."""
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())) if size else memoryview(b"")


@torch.no_grad()
def _fill(model: nn.Module, found: Mapping[int, tuple[Tensor, Tensor, str]]) -> None:
    """Put values into targets, each once: in place where they are of one kind, else as new parameters and buffers."""
    new: dict[Tensor, Tensor] = {}
    for target, value, name in found.values():
        device = torch.device("cpu") if target.is_meta else target.device
        if not target.is_meta and _alike(target, value):
            target.copy_(value.to(device))
            torch.autograd.graph.increment_version(target)
            continue
        value = value.to(device, copy=True)
        if target.dim() == 4 and target.is_contiguous(memory_format=torch.channels_last):
            value = value.contiguous(memory_format=torch.channels_last)
        if isinstance(target, nn.Parameter):
            value = nn.Parameter(value, requires_grad=target.requires_grad)
        if isinstance(value, LadderTensor):
            value.label = name
        new[target] = value
    replace_tensors(model, new)


def _alike(target: Tensor, value: Tensor) -> bool:
    """Whether a value can be copied into a target without changing what either is."""
    if isinstance(target, LadderTensor) and isinstance(value, LadderTensor):
        same = replace(value.coding, order=()) == replace(target.coding, order=())
        return same and value.dtype == target.dtype
    return isinstance(target, LadderTensor) == isinstance(value, LadderTensor)


def _equal(a: Tensor, b: Tensor) -> bool:
    if a is b:
        return True
    if isinstance(a, LadderTensor) and isinstance(b, LadderTensor):
        return a.coding == b.coding and torch.equal(a.limit, b.limit) and torch.equal(a.codes(), b.codes())
    return type(a) is type(b) and torch.equal(a, b)
