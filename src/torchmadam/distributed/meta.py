"""Models that are too large for one device: from the meta device to shards, a unit at a time."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from torchmadam import noise, shards
from torchmadam.ladder.convert import to_ladder_
from torchmadam.ladder.format import LadderFormat
from torchmadam.ladder.tensor import LadderTensor


def materialise_(
    model: nn.Module,
    units: Iterable[nn.Module],
    bits: int | str | LadderFormat | None = 12,
    *,
    device: torch.device | str,
    init: Callable[[nn.Module], Any] | None = None,
    shard: Callable[[nn.Module], Any] = fully_shard,
    seed: int = 0,
    **conversion: Any,
) -> nn.Module:
    """Initialise, convert and shard a model that was made on the meta device.

    No rank ever holds more floats than those of one unit. The weights do not depend on the number of ranks, as long as
    all of them have devices of one kind.

    Args:
        model: made under ``with torch.device("meta")``.
        units: its parts, such as ``model.blocks``, each of which is gathered as one; the model itself comes last, and
            takes what they leave.
        bits: as of :func:`torchmadam.to_ladder_`; None keeps floats.
        device: of this rank.
        init: fills a module's own parameters, not its children's; None calls its ``reset_parameters()``.
        shard: how to shard a unit, for ``functools.partial(fully_shard, mesh=..., mp_policy=...)``.
        seed: of the weights and of the rungs drawn.
        conversion: further arguments of :func:`torchmadam.to_ladder_`; names in them are the whole model's.
    """
    names = {module: name for name, module in model.named_modules()}
    made: set[nn.Parameter] = set()
    converted = 0
    for number, unit in enumerate([*units, model]):
        if unit not in names:
            raise ValueError(f"unit {number} is no part of the model; pass modules such as model.blocks")
        with torch.random.fork_rng([device] if torch.device(device).type == "cuda" else []):
            torch.manual_seed(noise.stream(seed, number) % 2**63)
            own: dict[nn.Parameter, nn.Parameter] = {}
            for module in unit.modules():
                shared = made.intersection(p for p in module._parameters.values() if p is not None)
                if shared:
                    raise ValueError(f"{names[module]} shares a parameter with an earlier unit; make them one unit")
                _fill(module, torch.device(device), init, own, names[module])
            made |= own.keys()
        if bits is not None:
            prefix = f"{names[unit]}." if names[unit] else ""
            to_ladder_(unit, bits, seed=seed, first_index=converted, **_within(conversion, prefix, unit))
            converted += sum(isinstance(p, LadderTensor) for p in unit.parameters())
        shard(unit)
    return model


@torch.no_grad()
def _fill(
    module: nn.Module,
    device: torch.device,
    init: Callable[[nn.Module], Any] | None,
    made: dict[nn.Parameter, nn.Parameter],
    name: str,
) -> None:
    """Give a module's own tensors that are on the meta device memory and values; one that is shared, once."""
    fresh = False
    for key, p in list(module._parameters.items()):
        if p is not None and p.is_meta:
            fresh |= p not in made
            if p not in made:
                made[p] = nn.Parameter(torch.empty_like(p, device=device), requires_grad=p.requires_grad)
            setattr(module, key, made[p])
    for key, buffer in list(module._buffers.items()):
        if buffer is not None and buffer.is_meta:
            fresh = True
            setattr(module, key, torch.empty_like(buffer, device=device))
    if not fresh:
        return
    reset: Any = getattr(module, "reset_parameters", None)
    if init is None and reset is None:
        raise TypeError(
            f"{name or 'the model'} ({type(module).__name__}) has tensors of its own and no reset_parameters() to fill "
            f"them; pass init=, a function of a module"
        )
    reset() if init is None else init(module)


def _within(conversion: Mapping[str, Any], prefix: str, unit: nn.Module) -> dict[str, Any]:
    """The arguments of to_ladder_ for a part of the model, whose names lack a prefix."""
    own = dict(conversion)
    if isinstance(own.get("scale"), Mapping):
        left = {name for name, p in unit.named_parameters() if not shards.is_sharded(p)}
        scales = {name.removeprefix(prefix): scale for name, scale in own["scale"].items() if name.startswith(prefix)}
        own["scale"] = {name: scale for name, scale in scales.items() if name in left}
    if own.get("filter") is not None:
        theirs = own["filter"]
        own["filter"] = lambda name, p: theirs(prefix + name, p)
    return own
