"""Models from floats to codes and back."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchmadam import groups, noise, replaced, shards
from torchmadam.ladder.format import LadderFormat
from torchmadam.ladder.layout import PLANE, POSITIVE, SEED, CodeLayout
from torchmadam.ladder.tensor import LadderTensor, is_row_major
from torchmadam.messages import describe, require_module, warn
from torchmadam.start import starts, warn_unmatched

# Of the paper's ladders, and of signed ones: those of Madam.paper and of Madam for floats.
_PAPER_BOUND, _SIGNED_BOUND = 3.0, groups.ZONE
# What a coded tensor may decode to.
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@torch.no_grad()
def to_ladder_(
    model: nn.Module,
    bits: int | str | LadderFormat = 12,
    *,
    init: str | None = None,
    bound: float | None = None,
    scale: float | Mapping[str, float] | None = None,
    zero_scale: float = 0.01,
    seed: int = 0,
    sign_seed: int | None = None,
    dtype: torch.dtype | None = None,
    filter: Callable[[str, nn.Parameter], bool] | None = None,
    first_index: int = 0,
) -> nn.Module:
    """Turn a model's parameters into codes, in place. No float copy of them is kept. Make the optimiser afterwards.

    Args:
        model: any module. Every float parameter is converted, first and last layers included, except embeddings with
            a ``padding_idx`` on a ladder without zero, which stay float.
        bits: 12 or 8, or any number from 2 to 15, for a signed ladder, which has a zero that weights can cross; a name,
            such as "paper12" for the paper's; or a :class:`LadderFormat`.
        init: which codes to start from.
            None is for training from scratch. On the paper's ladder it draws rungs uniformly, as the paper does, and
            keeps the signs the weights have, but not their sizes: a trained model is lost. Tensors whose elements are
            all equal (gains, zero biases) take the nearest rung instead, and so do frozen ones (``requires_grad``
            False), as under "nearest". On a signed ladder it takes the nearest rung everywhere.
            "uniform" draws rungs uniformly without exception, the paper to the letter.
            "nearest" goes on from trained weights: the nearest rung, on a ladder that reaches to the largest of them. A
            signed one is finer around zero where that is far away, so that steps are of their usual size.
        bound: the ladder's limit sigma* is this many times a tensor's scale. None: 5, on the paper's ladders 3; but
            under "nearest", unless ``scale`` is given, the limit is the tensor's absolute maximum. On signed ladders
            vectors of zeros may grow to ``bound`` itself, on rungs that are finer around zero; and unless ``bits`` is a
            format, steps are sized by 5 scales at most, where the bound is larger, too.
        scale: of all tensors, or by name (:func:`torchmadam.scales_of`); None measures each tensor's RMS.
        zero_scale: the scale of vectors that are all zeros, or whose RMS is below a hundredth of this; as under
            :class:`torchmadam.Madam`, that of such matrices goes by their inputs, but for the paper's ladders and for
            ``init="uniform"``.
        seed: of the rungs drawn, and of the signs of weights that have none.
        sign_seed: draw the signs from this seed and store them nowhere. Tensors without negative weights stay positive.
        dtype: what the tensors decode to, and the dtype of their gradients; None keeps each parameter's own.
        filter: a function of name and parameter; False leaves a parameter as it is.
        first_index: number of the first parameter, which keys what is drawn for it; for models converted in pieces.
    """
    require_module(model, "to_ladder_")
    ladder = _ladder(bits)
    if init not in (None, "uniform", "nearest"):
        raise ValueError(f"init={init!r} is unknown; choose None (from scratch), 'uniform' or 'nearest'")
    if sign_seed is not None and (init == "nearest" or ladder.is_signed):
        raise ValueError(
            "sign_seed replaces signs; it cannot keep a trained model's, and only the paper's ladders, such as "
            '"paper12", have any'
        )
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype={dtype} cannot be the dtype of gradients; use {', '.join(map(str, DTYPES))}")
    for number, value in (("bound", bound), ("zero_scale", zero_scale), ("scale", scale)):
        least_is_fine = number == "zero_scale" and value == 0
        if isinstance(value, float | int) and not (0 < value < math.inf or least_is_fine):
            raise ValueError(f"{number}={value} cannot work: it must be positive and finite")
    for number, whole in (("seed", seed), ("sign_seed", sign_seed)):
        if whole is not None and (not isinstance(whole, int) or not -(2**63) <= whole < 2**63):
            raise ValueError(f"{number}={whole!r} must be an integer of at most 64 bits")

    chosen = _chosen(model, ladder, filter)
    names, params = list(chosen.values()), list(chosen)
    usual = bound or (_SIGNED_BOUND if ladder.is_signed else _PAPER_BOUND)
    crossing = ladder.crossing
    if ladder.is_signed and not isinstance(bits, LadderFormat):
        crossing = groups.usual_crossing(usual)
    arguments: dict[str, Any] = {
        "scale": scale,
        "zero_scale": zero_scale,
        "bound": usual,
        # Drawn weights are as large as the ladder is long, which is therefore no longer than under the paper's rule.
        "crossing": 0.0 if init == "uniform" else crossing,
        "param_names": names,
    }
    if isinstance(scale, Mapping):
        arguments["scale"] = {groups.unwrapped(name): float(value) for name, value in scale.items()}
        warn_unmatched([arguments])
    found = starts(arguments, names, [p.detach() for p in params], ladder)

    coded: dict[nn.Parameter, nn.Parameter] = {}
    for index, (name, param, start) in enumerate(zip(names, params, found, strict=True), first_index):
        if param.is_complex():
            raise ValueError(f"{describe(name)} is complex, and ladders hold real weights; leave it out with filter=")
        kept = init == "nearest" or (init is None and not param.requires_grad)
        limit, own = start.scale * usual, _around_most(ladder, start.share(crossing))
        if kept and not start.is_zeros and param.numel():
            limit, own = start.sigma * usual, _around_most(ladder, crossing)
            if bound is None and scale is None:
                limit = float(param.abs().max())
                if not isinstance(bits, LadderFormat):
                    own = _around_most(ladder, _SIGNED_BOUND * start.sigma / limit)
        if limit > 0 and not 1e-30 < limit < 1e30:
            raise ValueError(f"{describe(name)} would have a limit of {limit:g}, which float32 cannot hold; rescale it")
        drawn = not kept and (init == "uniform" or not (ladder.is_signed or _is_constant(param)))
        if kept:
            _look_at_small(param.detach(), own, limit, name)
        own_seed = None if kept else sign_seed
        tensor = _encoded(param.detach(), own, limit, index, seed, own_seed, dtype or param.dtype, drawn)
        coded[param] = nn.Parameter(tensor, requires_grad=param.requires_grad)
        coded[param].label = name  # type: ignore[attr-defined]
    replace_tensors(model, coded)
    return model


@torch.no_grad()
def to_dense_(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """Turn a model's codes back into ordinary float parameters, in place, of the dtype they decode to."""
    require_module(model, "to_dense_")
    for name, p in model.named_parameters():
        if shards.is_sharded(p) and isinstance(shards.local(p), LadderTensor):
            raise ValueError(
                f"{describe(name)} is sharded; load what torchmadam.distributed.save saved into a model that is not"
            )
    dense: dict[nn.Parameter, nn.Parameter] = {
        p: nn.Parameter(p.decode(dtype), requires_grad=p.requires_grad)
        for p in model.parameters()
        if isinstance(p, LadderTensor)
    }
    replace_tensors(model, dense)
    return model


def _ladder(bits: int | str | LadderFormat) -> LadderFormat:
    if isinstance(bits, LadderFormat):
        return bits
    return LadderFormat.preset(bits) if isinstance(bits, str) else LadderFormat.signed(bits)


def _around_most(ladder: LadderFormat, share: float) -> LadderFormat:
    """A signed ladder with its zone of additive steps within a share of its length, which is where most weights are.

    Powers of two, so that tensors have few different ladders, and step together.
    """
    if not (ladder.is_signed and 0 < share < ladder.crossing):
        return ladder
    return LadderFormat.signed(ladder.stored_bits, crossing=2.0 ** math.floor(math.log2(share)))


def _chosen(
    model: nn.Module, ladder: LadderFormat, filter: Callable[[str, nn.Parameter], bool] | None
) -> dict[nn.Parameter, str]:
    """The parameters to convert, each once however often it is shared, with its name."""
    padded = {
        id(m.weight)
        for m in model.modules()
        if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.padding_idx is not None and not ladder.is_signed
    }
    if filter is not None and not callable(filter):
        raise TypeError(f"filter={filter!r} is no function; give one of name and parameter that says what to convert")
    chosen = {
        p: name
        for name, p in model.named_parameters()
        if not isinstance(shards.local(p), LadderTensor)
        and (p.is_floating_point() or p.is_complex())
        and id(p) not in padded
        and (filter is None or filter(name, p))
    }
    coded = {
        here.coding.format
        for name, p in model.named_parameters()
        if isinstance(here := shards.local(p), LadderTensor) and (filter is None or filter(name, p))
    }
    if coded and not chosen and ladder not in coded:
        raise ValueError(
            f"nothing is left to convert to {ladder}: the weights are codes already ({', '.join(map(str, coded))}); go "
            f"back to floats with torchmadam.to_dense_(model) first"
        )
    renormed = {
        id(m.weight)
        for m in model.modules()
        if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.max_norm is not None
    }
    for p, name in chosen.items():
        if id(p) in renormed:
            raise ValueError(
                f"{describe(name)} is of an embedding with max_norm, which writes floats into it in a forward pass; "
                f"leave it out with filter=, or do without max_norm"
            )
        if shards.is_sharded(p) or p.is_meta:
            raise ValueError(
                f"{describe(name)} is {'sharded' if shards.is_sharded(p) else 'on the meta device'}; convert before "
                f"fully_shard, and a model too large for that with torchmadam.distributed.materialise_"
            )
    return chosen


def _encoded(
    weights: Tensor,
    ladder: LadderFormat,
    limit: float,
    index: int,
    seed: int,
    sign_seed: int | None,
    dtype: torch.dtype,
    drawn: bool,
) -> LadderTensor:
    """One tensor's codes. ``drawn``: rungs drawn uniformly; otherwise the nearest to its weights."""
    signs = PLANE
    if sign_seed is not None:
        signs = POSITIVE if bool((weights >= 0).all() and (weights > 0).any()) else SEED
    sign_key = noise.stream(sign_seed, index) if signs == SEED and sign_seed is not None else 0
    coding = CodeLayout(ladder, tuple(weights.shape), _order(weights), signs, sign_key)

    top = torch.full((), limit, dtype=torch.float32, device=weights.device)
    key = noise.stream(seed, index)
    size = weights if ladder.is_signed else weights.abs()
    codes = _uniform(weights, ladder.levels, key) if drawn else ladder.encode(size, top)
    if not ladder.is_signed:
        negative = torch.where(weights == 0, _coin(weights, key), weights < 0)
        codes = codes | (negative.to(torch.int32) << ladder.code_bits)
    return LadderTensor(coding.pack(coding.matrix(codes)), top, coding, dtype=dtype)


def _look_at_small(weights: Tensor, ladder: LadderFormat, limit: float, name: str) -> None:
    """Warn if many weights are smaller than the smallest that the paper's ladder has, which they are to become."""
    least = limit * math.exp(-ladder.top * ladder.spacing)
    if ladder.is_signed or weights.numel() < 16 or not weights.any():
        return
    share = int(torch.count_nonzero((weights < least / 2) & (weights > -least / 2))) / weights.numel()
    if share > 0.2:
        warn(
            f"{100 * share:.0f} % of {describe(name)} is zero or less than half of {least:.2g}, the smallest weight "
            f"of a ladder that has no zero and reaches to {limit:.2g}: those weights will grow; use a signed ladder "
            f'("signed8", "signed12"), or bound= to cut off the largest weights'
        )


def _order(weights: Tensor) -> tuple[int, ...]:
    """Memory order of the codes: channels_last where the weights are, else contiguous.

    Where they are both, as those of a 1x1 convolution, by their strides: gradients come with those, too.
    """
    for dims, format, order in (
        (4, torch.channels_last, (0, 2, 3, 1)),
        (5, torch.channels_last_3d, (0, 2, 3, 4, 1)),
    ):
        if (
            weights.dim() == dims
            and weights.is_contiguous(memory_format=format)
            and not is_row_major(weights.shape, weights.stride())
        ):
            return order
    return tuple(range(weights.dim()))


def _uniform(like: Tensor, levels: int, key: int) -> Tensor:
    bits = noise.random_bits(like.shape, key, _clock(like, 1)).to(torch.int64) & 0xFFFFFFFF
    return ((bits * levels) >> 32).to(torch.int32)


def _coin(like: Tensor, key: int) -> Tensor:
    return noise.random_bits(like.shape, key, _clock(like, 2)) < 0


def _clock(like: Tensor, tick: int) -> Tensor:
    return torch.full((), tick, dtype=torch.int64, device=like.device)


def _is_constant(param: Tensor) -> bool:
    return param.numel() > 0 and bool((param == param.reshape(-1)[0]).all())


def replace_tensors(model: nn.Module, new: Mapping[Any, Tensor]) -> None:
    """Put new parameters and buffers in the place of old ones, in every module that shares them."""
    for module in model.modules():
        for name, old in [*module._parameters.items(), *module._buffers.items()]:
            if old is not None and old in new:
                setattr(module, name, new[old])  # not into the dict: recurrent layers keep a list besides
                replaced.mark(old, new[old])
