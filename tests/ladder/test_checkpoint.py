"""Files: what comes back, and that nothing damaged or hostile ever does."""

import hashlib
import json
import os
import random
import re
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import torchmadam
from torchmadam import LadderFileError, LadderTensor, Madam, load, save, to_ladder_
from torchmadam.ladder import checkpoint

LADDERS = ["paper12", "paper10", "paper8", "signed8", "signed12", "synapse"]


class Net(nn.Module):
    """Tied and float parameters, buffers, odd shapes."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.table = nn.Embedding(7, 5)
        self.conv = nn.Conv2d(3, 5, 3)
        self.norm = nn.BatchNorm2d(5)
        self.out = nn.Linear(5, 7)
        self.out.weight = self.table.weight
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.empty(3, 0))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("scratch", torch.ones(2), persistent=False)


def coded(ladder="paper12", **arguments):
    return to_ladder_(Net(), ladder, filter=lambda name, p: name != "conv.bias", **arguments)


def assert_same(a, b):
    left, right = a.state_dict(), b.state_dict()
    assert left.keys() == right.keys()
    for name in left:
        assert type(left[name]) is type(right[name]), name
        if isinstance(left[name], LadderTensor):
            assert torch.equal(left[name].codes(), right[name].codes()), name
            assert torch.equal(left[name].limit, right[name].limit)
        else:
            assert torch.equal(left[name], right[name]), name


@pytest.mark.parametrize("ladder", LADDERS)
@pytest.mark.parametrize("into", ["floats", "same codes", "other codes", "channels_last"])
def test_a_file_gives_back_exactly_what_was_saved(ladder, into, tmp_path):
    model = coded(ladder)
    model.norm.running_mean.normal_()
    save(model, tmp_path / "m.safetensors")
    other = Net(seed=5)
    if into == "same codes":
        other = to_ladder_(other, ladder, filter=lambda name, p: name != "conv.bias", seed=3)
    elif into == "other codes":
        other = to_ladder_(other, "paper10" if ladder != "paper10" else "signed8")
    elif into == "channels_last":
        other.to(memory_format=torch.channels_last)
    before = other.conv.weight
    assert load(tmp_path / "m.safetensors", other) is other
    assert_same(model, other)
    assert other.out.weight is other.table.weight
    assert other.conv.weight.requires_grad
    if into == "same codes":
        assert other.conv.weight is before  # filled in place, so an optimiser made before still holds it


def test_a_file_is_as_small_as_its_codes(tmp_path):
    model = to_ladder_(nn.Linear(1000, 1000), "paper12")
    save(model, tmp_path / "m.safetensors")
    assert (tmp_path / "m.safetensors").stat().st_size < 1.01 * 1_001_000 * 13 / 8 + 2000
    tied = to_ladder_(Net(), "paper12")
    save(tied, tmp_path / "t.safetensors")
    names = [n for n in checkpoint.read(tmp_path / "t.safetensors")[0] if n.startswith("out.weight")]
    assert names == []  # shared with the table, stored once


def test_saving_after_channels_last_gives_the_same_file(tmp_path):
    model = coded()
    save(model, tmp_path / "a")
    save(model.to(memory_format=torch.channels_last), tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_other_readers_open_the_file(tmp_path):
    from safetensors.torch import load_file

    save(coded(), tmp_path / "m.safetensors")
    tensors = load_file(tmp_path / "m.safetensors")
    assert tensors["conv.weight.plane0"].dtype == torch.uint8
    assert tensors["norm.running_var"].dtype == torch.float32


@pytest.mark.parametrize("ladder", LADDERS)
def test_the_numpy_reader_of_the_documentation_reads_every_weight(ladder, tmp_path):
    page = Path(__file__).parents[2] / "docs" / "format.md"
    block = re.search(r"```python\n(.*?)```", page.read_text(), re.DOTALL).group(1)
    assert len([line for line in block.splitlines() if line.strip()]) <= 40
    scope = {}
    exec(block, scope)
    model = coded(ladder)
    save(model, tmp_path / "m.safetensors")
    found = scope["weights_of"](tmp_path / "m.safetensors")
    assert found.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        dense = value.decode() if isinstance(value, LadderTensor) else value
        np.testing.assert_allclose(found[name], dense.numpy(), rtol=2e-6, atol=1e-9, err_msg=name)


# ---- damage


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("file") / "m.safetensors"
    save(coded(), path)
    return path


def refuses(blob, path, model, match=None):
    path.write_bytes(blob)
    with pytest.raises(LadderFileError, match=match):
        load(path, model)


def rewritten(blob, change, *, fix_checksum=True):
    """The file with its header changed, its checksum made right again: an attacker's file, not an accident."""
    start = 8 + int.from_bytes(blob[:8], "little")
    header, data = json.loads(blob[8:start]), blob[start:]
    metadata = header["__metadata__"]
    about = json.loads(metadata["torchmadam"])
    change(header, about)
    metadata["torchmadam"] = json.dumps(about, sort_keys=True)
    if fix_checksum:
        digest = hashlib.sha256(metadata["torchmadam"].encode())
        for name in sorted(n for n in header if n != "__metadata__"):
            entry = header[name]
            first, last = entry["data_offsets"]
            digest.update(f"\n{name} {entry['dtype']} {entry['shape']}\n".encode())
            digest.update(data[first:last])
        metadata["sha256"] = digest.hexdigest()
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def test_10_000_mutations_never_load(file, tmp_path):
    blob, target = file.read_bytes(), tmp_path / "bad.safetensors"
    model = coded()
    before = [p.decode() for p in model.parameters() if isinstance(p, LadderTensor)]
    rng = random.Random(0)
    harmless = 0
    for _ in range(10_000):
        bad = bytearray(blob)
        kind = rng.randrange(5)
        if kind == 0:
            bad = bad[: rng.randrange(len(bad))]
        elif kind == 1:
            for _ in range(rng.choice([1, 1, 1, 3, 50])):
                bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        elif kind == 2:
            where = rng.randrange(len(bad))
            bad[where : where + rng.randrange(1, 40)] = rng.randbytes(rng.randrange(40))
        elif kind == 3:
            bad[rng.randrange(start_of_data(blob))] = rng.choice(b'09{}[]",:-ex \x00\xff')
        else:
            bad += rng.randbytes(rng.randrange(1, 200))
        if bytes(bad) == blob:
            continue
        target.write_bytes(bad)
        try:
            load(target, model)
        except LadderFileError:
            continue
        # A header may change without changing what it says (a space for a space); then what was loaded must be right.
        harmless += 1
        assert all(
            torch.equal(a, b)
            for a, b in zip(
                before, (p.decode() for p in model.parameters() if isinstance(p, LadderTensor)), strict=True
            )
        )
    assert harmless < 20
    assert all(
        torch.equal(a, b)
        for a, b in zip(before, (p.decode() for p in model.parameters() if isinstance(p, LadderTensor)), strict=True)
    )


def start_of_data(blob):
    return 8 + int.from_bytes(blob[:8], "little")


def test_truncation_at_every_byte_is_refused(file, tmp_path):
    blob, model = file.read_bytes(), coded()
    for end in [*range(200), *range(200, len(blob), 37), len(blob) - 1]:
        refuses(blob[:end], tmp_path / "cut", model)


def describe(name="conv.weight", **claims):
    return lambda header, about: about["coded"][name].update(claims)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda h, a: a.update(version=2), "has version 2; this torchmadam reads version 1"),
        (lambda h, a: a.update(version="1"), "has version '1'"),
        (lambda h, a: a.pop("version"), "cannot be read"),
        (lambda h, a: a.update(coded=[]), "lacks its parts"),
        (lambda h, a: a.pop("shared"), "lacks its parts"),
        (lambda h, a: a["shared"].update({"conv.weight": "gain"}), "makes no sense"),
        (lambda h, a: a["shared"].update({"new": "nowhere"}), "makes no sense"),
        (lambda h, a: a["shared"].update({"new": ["gain"]}), "makes no sense"),
        (lambda h, a: a["shared"].update({"new": {}}), "makes no sense"),
        (lambda h, a: a.update(padding="x" * 1_000_000), "longer than that of"),
        (lambda h, a: a["coded"].update({"ghost": a["coded"]["conv.weight"]}), "ghost: the limit"),
        (lambda h, a: a["coded"].pop("conv.weight"), "not in the model: conv.weight.limit"),
        (describe(shape=[10**9, 10**9]), "planes of"),
        (describe(shape=[2**62, 2**62, 2**62]), "planes of"),
        (describe(shape=[-5, 27]), "whole numbers"),
        (describe(shape=[5, 27.0]), "whole numbers"),
        (describe(shape=[True, 27]), "whole numbers"),
        (describe(shape="5x27"), "makes no sense"),
        (describe(shape=None), "makes no sense"),
        (describe(shape=[3, 5, 3, 3]), "planes of"),
        (describe(shape=[5, 27]), r"has shape \(5, 27\), in the model \(5, 3, 3, 3\)"),
        (describe(levels=2**40), "make no ladder"),
        (describe(levels=4095.5), "whole numbers"),
        (describe(levels=3), "planes of"),
        (describe(spacing=float("nan")), "make no ladder"),
        (describe(spacing="0.001; import os"), "makes no sense"),
        (describe(spacing=-1), "make no ladder"),
        (describe(crossing=float("inf")), "make no ladder"),
        (describe(crossing=1.0), "must be odd"),
        (describe(signs="elsewhere"), "signs 'elsewhere' are unknown"),
        (describe(signs="seed"), "not in the model: conv.weight.plane2"),
        (describe(sign_key=2**70), "whole numbers"),
        (describe(dtype="object"), "makes no sense"),
        (describe(dtype="__class__"), "makes no sense"),
        (lambda h, a: a["coded"].update({"conv.weight": 5}), "makes no sense"),
    ],
)  # fmt: skip
def test_a_hostile_description_is_refused_even_with_a_right_checksum(change, says, file, tmp_path):
    refuses(rewritten(file.read_bytes(), change), tmp_path / "bad", coded(), says)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_a_limit_that_is_no_size_is_refused(value, tmp_path):
    model = coded()
    model.conv.weight.limit.fill_(value)
    save(model, tmp_path / "m")
    with pytest.raises(LadderFileError, match=r"conv\.weight: the limit must be one finite"):
        load(tmp_path / "m", coded())


@pytest.mark.parametrize("ladder", ["synapse", "signed8"])
def test_codes_beyond_the_ladder_are_refused(ladder, tmp_path):
    model = coded(ladder)
    model.conv.weight.planes[0].fill_(255)
    save(model, tmp_path / "m")
    with pytest.raises(LadderFileError, match="a code lies beyond"):
        load(tmp_path / "m", coded(ladder))


def test_a_tensor_of_an_unknown_type_is_refused(file, tmp_path):
    def change(header, about):
        header["norm.num_batches_tracked"]["dtype"] = "U64"

    blob = rewritten(file.read_bytes(), change)
    refuses(blob, tmp_path / "bad", coded(), "of a type that a coded model does not have")


def test_one_huge_row_is_checked_in_little_memory(tmp_path):
    holder = nn.ParameterList([nn.Parameter(torch.randn(1, 4_000_001))])
    to_ladder_(holder, "synapse", sign_seed=1)
    save(holder, tmp_path / "m")
    code = (
        "import resource, sys, torch, torchmadam\n"
        "from torchmadam.ladder import checkpoint\n"
        "tensors, about = checkpoint.read(sys.argv[1])\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "checkpoint.unflatten(tensors, about)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    grown = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "m")], capture_output=True, text=True, check=True
    )
    assert int(grown.stdout) * 1024 < 4 * (tmp_path / "m").stat().st_size


def test_the_file_may_change_after_loading_without_changing_the_model(tmp_path):
    save(to_ladder_(nn.Linear(512, 512), "paper12"), tmp_path / "m")
    model = load(tmp_path / "m", nn.Linear(512, 512))
    before = model.weight.decode()
    with open(tmp_path / "m", "r+b") as handle:
        handle.truncate(0)
    assert torch.equal(model.weight.decode(), before)


def test_nested_json_is_refused_without_a_crash(file, tmp_path):
    blob = file.read_bytes()
    start = start_of_data(blob)
    header = json.loads(blob[8:start])
    header["__metadata__"]["torchmadam"] = '{"version":' + "[" * 100_000 + "]" * 100_000 + "}"
    text = json.dumps(header).encode()
    refuses(len(text).to_bytes(8, "little") + text + blob[start:], tmp_path / "deep", coded())


def test_a_claim_of_terabytes_allocates_nothing(file, tmp_path):
    bad = rewritten(file.read_bytes(), describe(shape=[10**6, 10**6]))
    (tmp_path / "big").write_bytes(bad)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(LadderFileError):
        load(tmp_path / "big", coded())
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kilobytes


def test_ordinary_safetensors_pickles_and_missing_files_are_told_apart(tmp_path):
    from safetensors.torch import save_file

    save_file({"a": torch.ones(2)}, tmp_path / "plain.safetensors")
    with pytest.raises(LadderFileError, match=r"not written by torchmadam\.save.*load_state_dict"):
        load(tmp_path / "plain.safetensors", coded())
    torch.save(coded().state_dict(), tmp_path / "pickle.pt")
    with pytest.raises(LadderFileError, match="not a safetensors file"):
        load(tmp_path / "pickle.pt", coded())
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "nowhere", coded())


def test_a_file_of_another_model_is_refused_and_changes_nothing(file):
    model = to_ladder_(nn.Linear(5, 7), "paper12")
    before = model.weight.codes()
    with pytest.raises(
        LadderFileError, match=r"not a file of this model: missing: bias; missing: weight; not in the model"
    ):
        load(file, model)
    assert torch.equal(model.weight.codes(), before)


class Tied(nn.Module):
    def __init__(self, tie):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        if tie:
            self.b.weight = self.a.weight


def test_a_tied_file_gives_an_untied_model_tensors_of_its_own(tmp_path):
    save(to_ladder_(Tied(True), "paper12"), tmp_path / "m")
    model = load(tmp_path / "m", Tied(False))
    assert torch.equal(model.a.weight.decode(), model.b.weight.decode())
    for p in model.a.parameters():
        p.grad = torch.ones(p.shape)
    before = model.b.weight.codes()
    Madam(model.a.parameters()).step()
    assert torch.equal(model.b.weight.codes(), before)


def test_an_untied_file_is_refused_by_a_tied_model(tmp_path):
    save(to_ladder_(Tied(False), "paper12"), tmp_path / "m")
    with pytest.raises(LadderFileError, match=r"a\.weight and b\.weight differ, and are one tensor in the model"):
        load(tmp_path / "m", Tied(True))


def test_wrapped_modules_load_under_the_names_of_their_state_dict(tmp_path):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    def make():
        return nn.Sequential(checkpoint_wrapper(nn.Linear(4, 4)), nn.Linear(4, 4))

    a, b = to_ladder_(make(), "paper12"), to_ladder_(make(), "paper12", seed=1)
    save(a, tmp_path / "m")
    load(tmp_path / "m", b)
    assert all(torch.equal(p.codes(), q.codes()) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_a_file_of_a_compiled_model_loads_into_the_plain_one(tmp_path):
    model = to_ladder_(nn.Linear(4, 4), "paper12")
    save(torch.compile(model, backend="eager"), tmp_path / "m")
    assert torch.equal(load(tmp_path / "m", nn.Linear(4, 4)).weight.decode(), model.weight.decode())


def test_a_dtype_that_would_change_numbers_is_refused(tmp_path):
    save(nn.BatchNorm1d(3).double(), tmp_path / "m")
    with pytest.raises(LadderFileError, match=r"running_mean is torch\.float64, in the model torch\.float32"):
        load(tmp_path / "m", nn.BatchNorm1d(3))


def test_channels_last_models_stay_so_when_their_parameters_are_replaced(tmp_path):
    model = to_ladder_(nn.Conv2d(3, 5, 3), "paper12")
    save(model, tmp_path / "m")
    other = load(tmp_path / "m", nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last))
    assert other.weight.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(other.weight.decode(), model.weight.decode())


def test_permissions_and_symbolic_links_are_respected(tmp_path):
    save(nn.Linear(2, 2), tmp_path / "new")
    mask = os.umask(0)
    os.umask(mask)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o666 & ~mask
    (tmp_path / "new").chmod(0o640)
    (tmp_path / "link").symlink_to(tmp_path / "new")
    save(to_ladder_(nn.Linear(2, 2), "paper12"), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o640
    load(tmp_path / "new", nn.Linear(2, 2))


def test_extra_state_is_refused_by_name(tmp_path):
    class Odd(nn.Linear):
        def get_extra_state(self):
            return {"anything": 1}

        def set_extra_state(self, state):
            pass

    with pytest.raises(TypeError, match="_extra_state is a dict, not a tensor"):
        save(Odd(2, 2), tmp_path / "m")


# ---- crashes


@pytest.mark.parametrize("at", ["write", "fsync", "replace"])
def test_a_crash_while_saving_leaves_the_old_file_whole_and_nothing_else(at, tmp_path, monkeypatch):
    path = tmp_path / "m.safetensors"
    old = coded()
    save(old, path)
    blob = path.read_bytes()
    new = coded(seed=9)

    def crash(*_):
        raise OSError("the power is gone")

    if at == "write":
        real = os.fdopen

        class Half:
            """Writes a little, then fails."""

            def __init__(self, handle, mode):
                self.file, self.left = real(handle, mode), 300

            def __enter__(self):
                return self

            def __exit__(self, *_):
                self.file.close()

            def write(self, data):
                self.file.write(bytes(data)[: self.left])
                self.left -= len(data)
                if self.left <= 0:
                    crash()

        monkeypatch.setattr(os, "fdopen", Half)
    else:
        monkeypatch.setattr(os, at, crash)
    with pytest.raises(OSError, match="the power is gone"):
        save(new, path)
    monkeypatch.undo()
    assert path.read_bytes() == blob
    assert os.listdir(tmp_path) == ["m.safetensors"]
    assert_same(load(path, Net()), old)


def test_an_optimiser_state_lives_beside_the_file(tmp_path):
    model = coded()
    optimizer = Madam(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones(p.shape)
    optimizer.step()
    save(model, tmp_path / "m")
    torch.save(optimizer.state_dict(), tmp_path / "o")
    other = load(tmp_path / "m", Net())
    resumed = Madam(other.parameters())
    resumed.load_state_dict(torch.load(tmp_path / "o", weights_only=True))
    for m, o in ((model, optimizer), (other, resumed)):
        for p in m.parameters():
            p.grad = torch.ones(p.shape)
        o.step()
    assert_same(model, other)


def test_what_the_format_cannot_hold_is_refused_at_saving(tmp_path):
    model = nn.Linear(2, 2)
    model.register_buffer("odd", torch.ones(2, dtype=torch.complex128))
    with pytest.raises(TypeError, match=r"odd has dtype torch\.complex128"):
        save(model, tmp_path / "m")
    assert os.listdir(tmp_path) == []


def test_a_model_on_the_meta_device_is_filled_on_the_cpu(tmp_path):
    save(to_ladder_(nn.Linear(6, 5), "paper12"), tmp_path / "m")
    with torch.device("meta"):
        model = nn.Linear(6, 5)
    load(tmp_path / "m", model)
    norm = nn.BatchNorm1d(3)
    save(norm, tmp_path / "n")
    with torch.device("meta"):
        other = nn.BatchNorm1d(3)
    load(tmp_path / "n", other)
    assert all(t.device.type == "cpu" for t in other.state_dict().values())
    assert torchmadam.summary(model).weights == 35
    assert model.weight.device.type == "cpu"
    model(torch.randn(2, 6)).sum().backward()
