"""The launches of a step, caught on their way to a GPU, for Triton's compiler, which needs none."""

import torch

from torchmadam import LadderFormat, moment8

POINTERS = {torch.int64: "*i64", torch.int32: "*i32", torch.float32: "*fp32", torch.uint8: "*u8"}
POINTERS |= {torch.bfloat16: "*bf16", torch.float16: "*fp16"}
RULE = {
    "lr": 0.01, "beta": 0.999, "max_step": 8.0, "weight_decay": 0.0, "bias_correction": True, "maximize": False,
    "rounding": "stochastic", "streams": [1, 2],
}  # fmt: skip


def source(kernel, signature, constants, aligned=()):
    """What Triton compiles; ``aligned``: arguments that 16 divides."""
    from triton.compiler import ASTSource

    places = {(kernel.arg_names.index(n),): value for n, value in constants.items()}
    attributes = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(signature) if name in aligned}
    return ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=attributes)


def source_of(one, special=False):
    """Of a launch, from the arguments it would be given.

    ``special``: for addresses and integers that 16 divides, and integers that are 1, as Triton compiles it then.
    """
    kernel, arguments = one.kernel, one.arguments
    constants = {p.name: arguments[p.name] for p in kernel.params if p.is_constexpr}
    given = {n: value for n, value in arguments.items() if n not in constants and special}
    constants |= {n: 1 for n, value in given.items() if isinstance(value, int) and value == 1}
    aligned = [n for n, value in given.items() if isinstance(value, torch.Tensor) or value % 16 == 0]

    def type_of(value):
        if isinstance(value, torch.Tensor):
            return POINTERS[value.dtype]
        return "i32" if isinstance(value, int) else "fp32"

    signature = {n: "constexpr" if n in constants else type_of(arguments[n]) for n in kernel.arg_names}
    return source(kernel, signature, constants, aligned)


def of_a_step(kind, eight, momentum, monkeypatch):
    """The launches of a step of two matrices: of float32, of bfloat16, of a ladder, or, "large", as if many."""
    from torchmadam.kernels import launch
    from torchmadam.ladder.layout import CodeLayout

    if kind.startswith("large"):
        monkeypatch.setattr(launch, "LARGE", 0)
    found = []
    monkeypatch.setattr(launch.Launches, "__call__", lambda self, lr: found.extend(self._all))
    shapes = [(64, 64), (40, 27)]  # whose rows end on bytes, or within
    scalars = [torch.zeros(()) for _ in shapes]
    counts = [torch.zeros((), dtype=torch.int64) for _ in shapes]
    moments = [torch.zeros(s, dtype=torch.uint8 if eight else torch.float32) for s in shapes]
    means = [torch.zeros(s, dtype=torch.bfloat16) for s in shapes] if momentum else []
    rule = {**RULE, "momentum": momentum}
    if kind in ("float32", "bfloat16"):
        weights = [torch.zeros(s, dtype=getattr(torch, kind)) for s in shapes]
        groups = [moment8.count_groups((w.numel(),)) for w in weights]
        exponents = [torch.zeros(n, dtype=torch.uint8) for n in groups] if eight else []
        launch.float_step(
            weights, weights, means, moments, exponents, scalars, scalars, counts, crossings=[0.0, 1.0], bound=3.0,
            **rule,
        )  # fmt: skip
    else:
        codings = [CodeLayout.contiguous(LadderFormat.preset(kind.removeprefix("large ")), s) for s in shapes]
        planes = [[torch.zeros(s, dtype=torch.uint8) for s in c.plane_shapes] for c in codings]
        groups = [moment8.count_groups(s) for s in shapes]
        exponents = [torch.zeros(n, dtype=torch.uint8) for n in groups] if eight else []
        grads = [torch.zeros(s, dtype=torch.bfloat16) for s in shapes]
        launch.coded_step(planes, codings, grads, means, moments, exponents, scalars, counts, **rule)
    steps = [one for one in found if "EIGHT" in one.arguments]
    assert len(found) == len(steps) + kind.startswith("large")  # the clock
    assert len(steps) == (1 if kind in ("float32", "bfloat16") else 2)
    assert any(one.arguments.get("EVEN") for one in steps) == kind.startswith("large")
    return found


def of_decoding(name, dtype, shape):
    """The launch that decodes a matrix, as a launch.Launch."""
    from torchmadam.kernels import launch, launch_decode
    from torchmadam.ladder.layout import CodeLayout

    coding = CodeLayout.contiguous(LadderFormat.preset(name), shape)
    planes = [torch.empty(s, dtype=torch.uint8) for s in coding.plane_shapes]
    out, limit = torch.empty(shape, dtype=dtype), torch.ones(())
    own, k_planes = launch_decode._prepared(coding, shape[0], 0, dtype, dtype == torch.int32)
    tensors = [out, limit, planes[-1], *planes[:k_planes], *[planes[0]] * (4 - k_planes)]
    arguments = dict(zip(own.kernel.arg_names, (*tensors, *own.rest), strict=True))
    return launch.Launch(own.kernel, own.programs, arguments, options=own.options)
