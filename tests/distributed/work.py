"""What ranks do in the tests of this folder, and what they do it to."""

import contextlib
import copy
import functools
import os
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

import torchmadam
from torchmadam import LadderTensor, Madam, held, release_gradients, shards, to_dense_, to_ladder_
from torchmadam.distributed import (
    compare_replicas,
    data_parallel,
    load,
    materialise_,
    save,
    sizes,
    watch_replicas,
)


class Net(nn.Module):
    """Rows that divide by no number of ranks, fewer rows than ranks, one dimension and three."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.filters = nn.Conv1d(1, 5, 3)
        self.wide = nn.Linear(20, 13)
        self.norm = nn.LayerNorm(13)
        self.narrow = nn.Linear(13, 1)
        self.last = nn.Linear(1, 3)
        with torch.no_grad():
            self.wide.weight[12, 3] = 4.0  # on the last rank, and all of them have to know of it

    def forward(self, x):
        x = self.filters(self.table(x).unsqueeze(1)).flatten(1)
        return self.last(self.narrow(self.norm(torch.tanh(self.wide(x)))))


def device():
    """Where a test's tensors are: on a GPU under NCCL."""
    on_gpu = dist.is_initialized() and dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def words():
    return torch.arange(11, device=device())


def build(ladder, make=Net, **conversion):
    torch.manual_seed(0)
    model = make().to(device())
    if isinstance(ladder, torch.dtype):
        return model.to(ladder)
    return model if ladder is None else to_ladder_(model, ladder, **conversion)


def sharded(model, mesh, **arguments):
    for child in model.children():
        if list(child.parameters()):
            fully_shard(child, mesh=mesh, **arguments)
    return fully_shard(model, mesh=mesh, **arguments)


def meshes():
    """Meshes of 1, 2, ... ranks, that those ranks then use; the others get None."""
    made = [DeviceMesh(device().type, list(range(n))) for n in range(1, dist.get_world_size() + 1)]
    return [mesh if dist.get_rank() < mesh.size() else None for mesh in made]


def given(p, t, i):
    """The gradient number i of step t, of which a sharded parameter gets its part."""
    whole = torch.randn(p.shape, generator=torch.Generator().manual_seed(1000 * t + i)).to(p.device, p.dtype)
    return shards.part_of(whole, p)


def step_given(model, optimizer, steps):
    for t in steps:
        for i, p in enumerate(model.parameters()):
            p.grad = given(p, t, i)
        optimizer.step()


def bits_of(tensor):
    """All of a tensor, from all ranks: codes as integers, floats as they are."""
    here = shards.local(tensor).detach()
    if not isinstance(here, LadderTensor):
        return tensor.full_tensor().detach() if shards.is_sharded(tensor) else here
    codes = here.codes()
    return shards.like(codes, tensor).full_tensor() if shards.is_sharded(tensor) else codes


def assert_same(model, reference):
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(bits_of(p), bits_of(q)), name


# ---- FSDP2

PAPER = {"momentum": 0.0, "crossing": 0.0, "bound": 3.0, "weight_decay": 0.0}
KINDS = [
    ("paper12", {}, PAPER),
    ("paper12", {"sign_seed": 4}, {"rounding": "stochastic"}),
    ("signed8", {"dtype": torch.bfloat16}, {}),
    ("paper10", {}, {"second_moment": "none", "rounding": "stochastic", "momentum": 0.0, "weight_decay": 0.1}),
    (None, {}, PAPER),
    (None, {}, {}),
    (torch.bfloat16, {}, {}),
    ("signed8", {}, {"momentum": 0.0}),
    (torch.bfloat16, {}, {"second_moment": "none"}),
]


def fsdp_steps_equal_one_process(rank, kinds=KINDS):
    """One to four ranks take the very steps of one process when they are given its gradients."""
    for mesh in meshes():
        for ladder, conversion, arguments in kinds:
            if mesh is None:
                continue
            reference = build(ladder, **conversion)
            model = sharded(build(ladder, **conversion), mesh)
            optimizer = Madam(model.parameters(), **arguments)
            theirs = Madam(reference.parameters(), **arguments)
            x = words()
            for t in range(2):
                # The forward pass too, from gathered planes; it must not change what is stepped.
                torch.testing.assert_close(model(x), reference(x))
                step_given(model, optimizer, [t])
                step_given(reference, theirs, [t])
                assert_same(model, reference)
            for p, q in zip(model.parameters(), reference.parameters(), strict=True):
                ours, own = optimizer.state[p], theirs.state[q]
                for name in own.keys() & {"first_moment", "step_moment", "second_moment"}:
                    assert torch.equal(ours[name].full_tensor(), own[name])
                if "scale" in own:
                    torch.testing.assert_close(ours["scale"], own["scale"], rtol=1e-6, atol=0)
                    assert ours["room"] == pytest.approx(own["room"])
                    assert ours["zeros"] == own["zeros"]
        dist.barrier()


def mlp():
    return nn.Sequential(
        nn.Linear(64, 160), nn.ReLU(), nn.LayerNorm(160), nn.Linear(160, 96), nn.ReLU(), nn.Linear(96, 10)
    )


def batch_of(t):
    generator = torch.Generator().manual_seed(t)
    x = torch.randn(48, 64, generator=generator).to(device())
    return x, (x[:, :10].abs()).argmax(1)


def share_of_codes_that_differ(model, reference):
    pairs = [(bits_of(p), bits_of(q)) for p, q in zip(model.parameters(), reference.parameters(), strict=True)]
    return sum(int((a != b).sum()) for a, b in pairs) / sum(a.numel() for a, _ in pairs)


class Counted:
    """Bytes that this rank hands to PyTorch's collectives, while this is entered: gathered, and to be reduced."""

    # Their names changed between PyTorch 2.11 and 2.13.
    NAMES = (("all_gather_single", "all_gather_into_tensor"), ("reduce_scatter_single", "reduce_scatter_tensor"))

    def __enter__(self):
        self.bytes, self._held = [0, 0], {}
        for kind, names in enumerate(self.NAMES):
            name = next(name for name in names if hasattr(dist, name))
            self._held[name] = getattr(dist, name)
            setattr(dist, name, functools.partial(self._counting, kind, self._held[name]))
        return self

    def _counting(self, kind, original, *arguments, **named):
        tensor = named["input"] if "input" in named else arguments[1]
        self.bytes[kind] += tensor.numel() * tensor.element_size()
        return original(*arguments, **named)

    def __exit__(self, *_):
        for name, original in self._held.items():
            setattr(dist, name, original)


def what_travels_is_packed(rank):
    """A step's bytes, of a layer whose rows are uneven and of a large one, against those of bfloat16."""
    mesh = meshes()[-1]

    def sent(way, layer):
        torch.manual_seed(0)
        model = nn.Sequential(layer()).to(device(), way.dtype)
        if way.ladder is not None:
            to_ladder_(model, way.ladder, dtype=way.dtype)
        policy = MixedPrecisionPolicy(param_dtype=way.gathered, reduce_dtype=way.reduced)
        sharded(model, mesh, mp_policy=policy)
        with Counted() as counted:
            out = model(torch.ones(2, 512, device=device(), dtype=way.dtype))
            assert out.dtype == torch.bfloat16
            out.sum().backward()
        for p in model.parameters():
            assert p.grad.dtype == p.dtype == way.dtype
            assert (way.ladder is None) or isinstance(shards.local(p), LadderTensor)
        return counted.bytes

    for way in sizes.WAYS:
        found = sizes.measured(way)
        # Gathered before forward and before backward, by every rank its part; gradients are reduced whole.
        gathered, reduced = sent(way, lambda: nn.Linear(512, 512, bias=False))
        assert gathered * mesh.size() == 2 * found.gathered * 512 * 512
        assert reduced == found.reduced * 512 * 512
    ways = {way.name: way for way in sizes.WAYS}
    floats, _ = sent(ways["AdamW, bfloat16"], lambda: nn.Linear(512, 63))
    assert 0.74 * floats < sent(ways["Madam 12-bit"], lambda: nn.Linear(512, 63))[0] <= 0.77 * floats
    eight = ways["Madam 8-bit, no momentum, 8-bit moment"]
    assert 0.49 * floats < sent(eight, lambda: nn.Linear(512, 63))[0] <= 0.52 * floats


def mixed_precision_computes_what_narrow_codes_compute(rank):
    mesh = meshes()[-1]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(build("paper12"), mesh, mp_policy=policy)
    reference = build("paper12", dtype=torch.bfloat16)
    x = words()
    out = model(x)
    assert torch.equal(out, reference(x))
    out.float().square().mean().backward()
    reference(x).float().square().mean().backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert p.grad.dtype == torch.float32
        torch.testing.assert_close(p.grad.full_tensor(), q.grad.float(), rtol=0.01, atol=1e-6)


def micro_steps(model, optimizer, t, rank, world, *, hold, dtype):
    """A step on two halves of a batch, of which each rank takes its slice, clipped to a norm."""
    x, y = batch_of(t)
    halves = list(zip(x.to(dtype).chunk(2), y.chunk(2), strict=True))
    for i, (part, target) in enumerate(halves):
        with hold(model, i + 1 < len(halves)):
            own = part.chunk(world)[rank], target.chunk(world)[rank]
            (nn.functional.cross_entropy(model(own[0]), own[1]) / len(halves)).backward()
    # The norm too is a sum: where float32 has to agree, nothing is clipped.
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5 if dtype == torch.float64 else 1e9)
    optimizer.step()
    optimizer.zero_grad()
    return norm.full_tensor() if shards.is_sharded(norm) else norm


@contextlib.contextmanager
def without_reducing(model, wait):
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(not wait)
        yield
    else:
        with model.no_sync() if wait and hasattr(model, "no_sync") else contextlib.nullcontext():
            yield


def training_end_to_end_differs_in_few_codes(rank, ladder, rounding, sizes, ddp, split, steps=50):
    """Some steps: gradients accumulated over two halves of a batch, and clipped to a norm.

    Every rank takes the same batch; or it is split over them. Sums over ranks differ in their last bit, and in float32
    that soon moves a code, and then others (docs/log.md), so that gradients are float64.
    """
    dtype = torch.float64
    hold = {"hold": without_reducing, "dtype": dtype}
    everyone = meshes()
    runs = [("fsdp", mesh) for i, mesh in enumerate(everyone) if i + 1 in sizes]
    for kind, mesh in [*runs, ("ddp", everyone[-1])] if ddp else runs:
        if mesh is not None:
            reference = build(ladder, mlp, dtype=dtype)
            theirs = Madam(reference.parameters(), rounding=rounding)
            model = build(ladder, mlp, dtype=dtype)
            if kind == "ddp" and rank:
                to_ladder_(to_dense_(model), ladder, seed=rank)  # which data_parallel has to make rank 0's
            model = sharded(model, mesh) if kind == "fsdp" else data_parallel(model)
            optimizer = Madam(model.parameters(), rounding=rounding)
            if kind == "ddp":
                watch_replicas(model, optimizer, every=5)
            for t in range(steps):
                expected = micro_steps(reference, theirs, t, 0, 1, **hold)
                own = (rank, mesh.size()) if split else (0, 1)
                norm = micro_steps(model, optimizer, t, *own, **hold)
                torch.testing.assert_close(norm, expected, rtol=1e-4, atol=0)
            assert share_of_codes_that_differ(model, reference) < 0.001
        dist.barrier()


def shards_may_be_replicated(rank):
    """Two replicas of two shards each (HSDP) make the steps of one process."""
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("replicate", "shard"))
    for ladder in ("paper12", torch.bfloat16):
        reference, model = build(ladder), sharded(build(ladder), mesh)
        theirs, optimizer = (Madam(m.parameters(), rounding="stochastic") for m in (reference, model))
        for t in range(2):
            torch.testing.assert_close(model(words()), reference(words()))
            model(words()).sum().backward()
            step_given(model, optimizer, [t])
            step_given(reference, theirs, [t])
            assert_same(model, reference)


# ---- checkpoints


def saved_on_all_ranks(rank, folder, ladder, conversion, arguments):
    """Four ranks save after three steps; two ranks, and one, go on from there as one process would have."""
    everyone = meshes()
    reference = build(ladder, **conversion)
    theirs = Madam(reference.parameters(), lr=0.02, **arguments)
    model = sharded(build(ladder, **conversion), everyone[-1])
    optimizer = Madam(model.parameters(), lr=0.02, **arguments)
    step_given(model, optimizer, [0])
    save(folder, model, optimizer)  # which the next one replaces
    step_given(model, optimizer, [1, 2])
    save(folder, model, optimizer)
    step_given(reference, theirs, [0, 1, 2])
    for mesh in everyone[:2]:
        if mesh is not None:
            other = sharded(build(ladder, seed=9, **conversion) if ladder else build(ladder), mesh)
            fresh = Madam(other.named_parameters(), **arguments)
            load(folder, other, fresh, mesh.get_group())
            assert_same(other, reference)
            goes_on(other, fresh, reference, theirs)
        dist.barrier()


def goes_on(model, optimizer, reference, theirs):
    """Two more steps from here are the reference's, and so is what the optimiser holds."""
    reference, state = copy.deepcopy(reference), theirs.state_dict()
    theirs = Madam(reference.parameters())
    theirs.load_state_dict(copy.deepcopy(state))
    assert optimizer.param_groups[0]["lr"] == theirs.param_groups[0]["lr"] == 0.02
    step_given(model, optimizer, [3, 4])
    step_given(reference, theirs, [3, 4])
    exact = optimizer.param_groups[0]["second_moment"] != "8bit"  # whose groups of 128 end with the shard
    if exact:
        assert_same(model, reference)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        ours, own = optimizer.state[p], theirs.state[q]
        assert ours["index"] == own["index"]
        assert float(ours["step"]) == float(own["step"]) == 5
        for name in own.keys() & {"first_moment", "step_moment"}:
            mean = ours[name].full_tensor() if shards.is_sharded(p) else ours[name]
            assert mean.dtype == torch.bfloat16
            assert torch.equal(mean, own[name])
        if "second_moment" in own:
            moments = [held.as_float(state, tensor) for state, tensor in ((ours, p), (own, q))]
            moment = moments[0].full_tensor() if shards.is_sharded(p) else moments[0]
            torch.testing.assert_close(moment, moments[1], rtol=0 if exact else 0.35, atol=0)


def dies_while_saving(rank, folder):
    """Rank 1 is gone in the middle of the second save."""
    model = sharded(build("paper12"), meshes()[-1])
    optimizer = Madam(model.parameters())
    step_given(model, optimizer, [0])
    save(folder, model, optimizer)
    step_given(model, optimizer, [1])
    if rank == 1:
        written = FileSystemWriter.write_data

        def dying(*arguments):
            written(*arguments)
            os._exit(17)

        FileSystemWriter.write_data = dying
    save(folder, model, optimizer)


# ---- DDP


def raises(kind, match, function, *arguments, **named):
    with pytest.raises(kind, match=match):
        function(*arguments, **named)


def replicas_start_and_stay_equal(rank):
    x = words()
    for ladder in ("paper12", "signed8", None):
        model = build(ladder, **({"seed": rank} if ladder else {}))
        if ladder is None and rank:
            model.wide.weight.data.neg_()
        if ladder != "signed8":  # which draws nothing
            raises(RuntimeError, r"differs on ranks \[1.* from rank 0's", compare_replicas, model)
        wrapped = data_parallel(model)
        compare_replicas(model)
        optimizer = Madam(wrapped.parameters(), rounding="stochastic", momentum=0.0 if ladder else 0.9)
        watching = watch_replicas(model, optimizer, every=2)
        for t in range(4):
            (wrapped(x)[:, rank % 3] * (rank + 1 + t)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            if rank == 1 and ladder:
                model.wide.weight.planes[0][3, 2] ^= 1
            elif rank == 1:
                model.wide.weight[3, 2].mul_(1 + 2**-22)
        raises(RuntimeError, r"wide.weight differs on ranks \[1\] from rank 0's", compare_replicas, model)
        watching.remove()
        raises(TypeError, "not yet the mean of all ranks; use fully_shard", release_gradients, wrapped, optimizer)
    other = build("paper12" if rank == 0 else "paper10")
    raises(RuntimeError, "table.weight is of another shape, dtype or ladder on ranks", data_parallel, other)
    raises(TypeError, "init_sync", lambda: data_parallel(model, init_sync=True))
    raises(TypeError, "is sharded", compare_replicas, sharded(build("paper12"), meshes()[-1]))


# ---- what else there is


def everything_else_under_fsdp(rank, folder):
    mesh = meshes()[-1]
    x = words()
    reference = build("paper12")
    theirs = Madam(reference.parameters())

    # Gradients released inside backward, and 8-bit moments.
    for arguments in ({}, {"momentum": 0.0}, {"second_moment": "8bit"}):
        reference = build("paper12")
        theirs = Madam(reference.parameters(), **arguments)
        model = sharded(build("paper12"), mesh)
        optimizer = Madam(model.parameters(), **arguments)
        release_gradients(model, optimizer)
        for _ in range(3):
            model(x).square().mean().backward()
            assert all(p.grad is None for p in model.parameters())
            optimizer.step()
            reference(x).square().mean().backward()
            theirs.step()
            theirs.zero_grad()
        assert share_of_codes_that_differ(model, reference) <= 0.01

    raises(RuntimeError, "would mix up their exponents", optimizer.state_dict)
    raises(TypeError, "spread over ranks.*torchmadam.distributed.save", torchmadam.save, model, folder / "x")
    raises(TypeError, "spread over ranks", torchmadam.average, model)
    raises(ValueError, "is sharded; load what torchmadam.distributed.save saved", to_dense_, model)
    raises(ValueError, "is sharded; convert before fully_shard", to_ladder_, sharded(build(None), mesh))
    raises(TypeError, "would write floats", lambda: next(model.parameters()).data.fill_(1.0))
    # What this rank holds: padding counts, and the second moment of 8 bits.
    held_here = torchmadam.memory(model, optimizer)
    assert (
        held_here.weights
        == torchmadam.summary(model).weights
        == sum(shards.local(p).numel() for p in model.parameters())
    )
    assert held_here.floats == 0

    # The state of one process goes into a sharded optimiser.
    reference = build("paper12")
    theirs = Madam(reference.parameters())
    step_given(reference, theirs, [0, 1])
    model = build("paper12")
    with torch.no_grad():
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            p.copy_(q)
    model = sharded(model, mesh)
    optimizer = Madam(model.parameters())
    optimizer.load_state_dict(copy.deepcopy(theirs.state_dict()))
    step_given(model, optimizer, [2])
    step_given(reference, theirs, [2])
    assert_same(model, reference)

    # A state dict goes from one sharded model to another, scales included, also where shards are filled up or empty.
    other = sharded(build("paper12", bound=2.0, seed=5), mesh)
    other.load_state_dict(model.state_dict())
    assert_same(other, model)
    assert all(
        torch.equal(shards.local(p).limit, shards.local(q).limit)
        for p, q in zip(other.parameters(), model.parameters(), strict=True)
    )
    assert torch.equal(other(x), model(x))
    raises(
        TypeError,
        "needs the same limit",
        build("paper12").wide.weight.detach()[2:4].copy_,
        build("paper12", bound=2.0).wide.weight.detach()[2:4],
    )

    # A table of embeddings is gathered in packed rows, and only the rows that are asked for are decoded.
    model.table.unshard()
    assert isinstance(model.table.weight, LadderTensor)
    assert model.table.weight.is_whole
    model.table.reshard()

    # Codes are cut between rows only.
    raises(
        TypeError,
        "sharded by rows",
        sharded,
        build("paper12", mlp),
        mesh,
        shard_placement_fn=lambda p: Shard(p.dim() - 1),
    )

    # Narrow floats that are not sharded by rows would need places that are not one stretch.
    wide = sharded(
        nn.Sequential(nn.Linear(8, 4, bias=False)).to(device(), torch.bfloat16),
        mesh,
        shard_placement_fn=lambda p: Shard(1),
    )
    optimizer = Madam(wide.named_parameters())
    wide(torch.ones(1, 8, device=device(), dtype=torch.bfloat16)).sum().backward()
    raises(ValueError, "0.weight.*sharded other than by rows", optimizer.step)
    Madam(wide.named_parameters(), rounding="nearest").step()


def models_come_from_the_meta_device(rank):
    """The same weights on every number of ranks; and none is ever whole on a rank, but those of one unit."""
    found = []
    for mesh in meshes():
        if mesh is None:
            continue
        with torch.device("meta"):
            model = Net()
        shard = functools.partial(fully_shard, mesh=mesh)
        materialise_(model, [model.wide, model.norm], "paper12", device=device(), shard=shard, filter=_not_last)
        assert all(shards.is_sharded(p) for p in model.parameters())
        assert isinstance(shards.local(model.wide.weight), LadderTensor)
        assert not isinstance(shards.local(model.last.weight), LadderTensor)
        torch.testing.assert_close(
            model.norm.weight.detach().full_tensor(), torch.ones(13, device=device()), rtol=1e-3, atol=0
        )
        optimizer = Madam(model.parameters())
        model(words()).sum().backward()
        optimizer.step()
        found.append([bits_of(p) for p in model.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(found[0], found[-1], strict=True))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].weight = model[0].weight
    raises(ValueError, "shares a parameter", lambda: materialise_(model, model, device="cpu", shard=lambda m: m))
    dist.barrier()


def _not_last(name, p):
    return not name.startswith("last.")


def compiled_models_train_as_others_do(rank):
    warnings.simplefilter("ignore")  # of the compiler, about itself
    reference = build("paper12")
    theirs = Madam(reference.parameters())
    model = sharded(build("paper12"), meshes()[-1])
    optimizer = Madam(model.parameters())
    run = torch.compile(model, options=torchmadam.compile_options())
    for _ in range(3):
        for forward, own in ((run, optimizer), (reference, theirs)):
            forward(words()).square().mean().backward()
            own.step()
            own.zero_grad()
    assert share_of_codes_that_differ(model, reference) < 0.01


def tell_how_float32_differs(rank, ladder, rounding):
    """Not a test: prints the share of codes that differ from one process's after 50 steps with float32 gradients."""
    for mesh in meshes()[1:]:
        for split in (False, True):
            if mesh is not None:
                models = [build(ladder, mlp), sharded(build(ladder, mlp), mesh)]
                optimizers = [Madam(model.parameters(), rounding=rounding) for model in models]
                for t in range(50):
                    for i, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                        x, y = batch_of(t)
                        if i and split:
                            x, y = x.chunk(mesh.size())[rank], y.chunk(mesh.size())[rank]
                        nn.functional.cross_entropy(model(x), y).backward()
                        optimizer.step()
                        optimizer.zero_grad()
                share = share_of_codes_that_differ(models[1], models[0])
                if rank == 0:
                    batch = "split over ranks" if split else "whole on every rank"
                    print(f"{ladder} {rounding}, {mesh.size()} ranks, batch {batch}: {share:.5f}", flush=True)
            dist.barrier()


class Blocks(nn.Module):
    """A model as the page has one."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def runs_as_written(rank, blocks, folder):
    """The blocks of docs/distributed.md: shard, save and load, replicate, materialise; each is then trained a step."""
    os.chdir(folder)
    shard, keep, replicate, large = blocks
    names = {"make_model": Blocks, "device": device()}

    def step():
        names["model"](torch.randn(4, 8, device=device())).square().mean().backward()
        names["optimizer"].step()
        names["optimizer"].zero_grad()

    exec(shard.replace("torch.distributed.init_process_group()", ""), names)
    step()
    before = [bits_of(p) for p in names["model"].parameters()]
    exec(keep, names)
    assert all(torch.equal(a, bits_of(p)) for a, p in zip(before, names["model"].parameters(), strict=True))
    names["model"] = build("paper12", Blocks)
    exec(replicate, names)
    step()
    exec(large, names)
    assert all(shards.is_sharded(p) for p in names["model"].parameters())
    names["optimizer"] = Madam(names["model"].parameters())
    step()
