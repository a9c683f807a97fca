"""to_ladder_, to_dense_, summary and average."""

import copy
import math

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn

import torchmadam
from digits_training import train
from madam_lab.tasks import digits
from torchmadam import LadderFormat, LadderTensor, Madam, summary, to_dense_, to_ladder_
from torchmadam.repeat import situation_of


def net():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, 10))
    nn.init.zeros_(model[3].bias)
    return model


def resnet18():
    """The convolutions and norms of a ResNet-18 for CIFAR, without their wiring."""
    layers = [nn.Conv2d(3, 64, 3, bias=False), nn.BatchNorm2d(64)]
    width = 64
    for out in (64, 128, 256, 512):
        for block in range(2):
            first = width if block == 0 else out
            layers += [nn.Conv2d(first, out, 3, bias=False), nn.BatchNorm2d(out)]
            layers += [nn.Conv2d(out, out, 3, bias=False), nn.BatchNorm2d(out)]
            if first != out:
                layers += [nn.Conv2d(first, out, 1, bias=False), nn.BatchNorm2d(out)]
        width = out
    return nn.Sequential(*layers, nn.Linear(512, 10))


def gpt(width=768, layers=12, vocabulary=50257):
    blocks = [nn.TransformerEncoderLayer(width, 12, 4 * width, batch_first=True) for _ in range(layers)]
    return nn.Sequential(nn.Embedding(vocabulary, width), nn.Embedding(1024, width), *blocks, nn.LayerNorm(width))


@pytest.mark.parametrize("ladder", ["paper12", "paper10", "paper8", "signed8", "signed12"])
@pytest.mark.parametrize("make", [resnet18, gpt])
def test_the_bytes_held_are_the_bytes_promised(make, ladder):
    with torch.device("meta"):
        model = make()
    count = sum(p.numel() for p in model.parameters())
    assert count > 11_000_000
    ladder = LadderFormat.preset(ladder)
    held = 0
    for p in model.parameters():
        layout = torchmadam.ladder.layout.CodeLayout.contiguous(ladder, p.shape)
        held += sum(rows * columns for rows, columns in layout.plane_shapes) + 4
    assert held <= 1.01 * count * ladder.stored_bits / 8


def test_a_converted_resnet_18_holds_those_bytes():
    model = to_ladder_(resnet18(), "paper12")
    table = summary(model)
    held = sum(plane.numel() for p in model.parameters() for plane in p.planes) + 4 * len(list(model.parameters()))
    assert table.bytes == held
    assert table.weights == sum(p.numel() for p in model.parameters())
    assert held <= 1.01 * table.weights * 13 / 8
    assert table.ratio == pytest.approx(13 / 32, rel=0.01)
    assert all(isinstance(p, LadderTensor) for p in model.parameters())


def test_from_scratch_the_papers_ladder_draws_rungs_uniformly_and_keeps_signs():
    model = net()
    before = copy.deepcopy(model)
    to_ladder_(model, "paper12")
    weight = model[0].weight
    k = weight.codes() & 4095
    assert torch.equal(weight.decode().sign(), before[0].weight.sign())
    assert abs(k.double().mean().item() - 2047.5) < 5 * 1182 / math.sqrt(k.numel())
    assert k.unique().numel() > 3000
    rms = before[0].weight.square().mean().sqrt()
    torch.testing.assert_close(weight.limit, (3 * rms).detach())
    # Gains keep their value, and zero biases start as small as they can, with either sign.
    torch.testing.assert_close(model[1].weight.decode(), torch.ones(128), rtol=6e-4, atol=0)
    assert (model[3].bias.codes() & 4095 == 4095).all()
    assert 0 < (model[3].bias.decode() < 0).sum() < 10
    assert model[3].bias.limit.item() == pytest.approx(0.03)


def test_uniform_is_the_paper_to_the_letter():
    model = to_ladder_(net(), "paper12", init="uniform")
    gains = model[1].weight.decode()
    assert gains.min() > 0
    assert gains.max() / gains.min() > 10
    assert (model[3].bias.codes() & 4095).unique().numel() > 5


def test_from_scratch_a_signed_ladder_takes_the_weights_it_finds():
    model = net()
    before = copy.deepcopy(model)
    to_ladder_(model, "signed12")
    for p, q in zip(model.parameters(), before.parameters(), strict=True):
        limit = p.limit
        torch.testing.assert_close(p.decode(), q.detach().clamp(-limit, limit), rtol=0, atol=float(limit) * 4e-4)
    assert torch.equal(model[3].bias.decode(), torch.zeros(10))


@pytest.mark.parametrize(
    ("ladder", "worse"), [("paper12", 0.02), ("signed12", 0.002), ("signed8", 0.02), ("paper8", 0.05)]
)
def test_nearest_keeps_a_trained_model(ladder, worse):
    data = digits.load()
    kept = []

    def make(net):
        kept.append(net)
        return torch.optim.Adam(net.parameters())

    train(0, data, make, epochs=8)
    model = kept[0]

    def loss():
        with torch.no_grad():
            return F.cross_entropy(model(data.test_x), data.test_y).item()

    before = loss()
    largest = [p.abs().max().item() for p in model.parameters()]
    to_ladder_(model, ladder, init="nearest")
    after = loss()
    print(f"{ladder}: loss {before:.4f} before, {after:.4f} after")
    assert [p.limit.item() for p in model.parameters()] == pytest.approx(largest)
    assert abs(after - before) < worse


def test_conversion_is_deterministic_and_follows_the_seed():
    one, two, other = (to_ladder_(net(), "paper12", seed=s) for s in (1, 1, 2))
    assert torch.equal(one[0].weight.codes(), two[0].weight.codes())
    assert not torch.equal(one[0].weight.codes(), other[0].weight.codes())
    assert not torch.equal(one[0].weight.codes()[:10, :10] & 4095, one[3].weight.codes()[:10, :10] & 4095)


def test_signs_from_a_seed_are_stored_nowhere(tmp_path):
    stored, seeded = to_ladder_(net(), "paper12"), to_ladder_(net(), "paper12", sign_seed=7)
    weight = seeded[0].weight
    assert [p.numel() for p in weight.planes] == [128 * 64, 128 * 32]
    assert summary(seeded).rows[0].bytes * 8 <= 12 * weight.numel() + 64
    share = (weight.decode() < 0).float().mean()
    assert 0.45 < share < 0.55
    assert torch.all(seeded[1].weight.decode() > 0)  # gains do not start negative
    other = to_ladder_(net(), "paper12", sign_seed=8)[0].weight
    assert 0.4 < (weight.decode().sign() == other.decode().sign()).float().mean() < 0.6
    for model, name in ((stored, "stored"), (seeded, "seeded")):
        torchmadam.save(model, tmp_path / name)
    assert (tmp_path / "stored").stat().st_size - (tmp_path / "seeded").stat().st_size > 0.9 * 9472 / 8
    back = torchmadam.load(tmp_path / "seeded", net())
    assert torch.equal(back[0].weight.decode(), weight.decode())
    x = torch.randn(3, 64)
    seeded(x).sum().backward()
    signs = weight.decode().sign()
    Madam(seeded.parameters()).step()
    assert torch.equal(weight.decode().sign(), signs)


def test_tied_weights_stay_tied_and_frozen_ones_frozen():
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    model["b"].weight = model["a"].weight
    model["a"].bias.requires_grad_(False)
    to_ladder_(model, "paper12")
    assert model["a"].weight is model["b"].weight
    assert not model["a"].bias.requires_grad
    to_dense_(model)
    assert model["a"].weight is model["b"].weight
    assert type(model["a"].weight) is nn.Parameter


def test_padding_rows_stay_float_on_a_ladder_without_zero():
    model = nn.Sequential(nn.Embedding(5, 4, padding_idx=0), nn.Linear(4, 2))
    to_ladder_(model, "paper12")
    assert type(model[0].weight) is nn.Parameter
    assert isinstance(model[1].weight, LadderTensor)
    signed = to_ladder_(nn.Embedding(5, 4, padding_idx=0), "signed8")
    assert isinstance(signed.weight, LadderTensor)
    assert torch.equal(signed.weight.decode()[0], torch.zeros(4))


def test_scales_may_be_given_as_a_number_or_by_name():
    assert to_ladder_(net(), "paper12", scale=0.1, bound=2.0)[0].weight.limit.item() == pytest.approx(0.2)
    trained = net()
    with torch.no_grad():
        trained[0].weight.mul_(5)
    with pytest.warns(UserWarning, match=r"no scale for 1\.bias, 3\.bias"):
        model = to_ladder_(net(), "paper12", scale=torchmadam.scales_of(trained))
    torch.testing.assert_close(model[0].weight.limit, 3 * trained[0].weight.square().mean().sqrt().detach())


@pytest.mark.parametrize(
    ("bits", "ladder", "bound"),
    [
        (12, LadderFormat.signed(12), 5.0),
        (8, LadderFormat.preset("signed8"), 5.0),
        ("paper12", LadderFormat.paper(12), 3.0),
    ],
)
def test_a_number_of_bits_is_a_signed_ladder_of_five_times_the_scale(bits, ladder, bound):
    model = net()
    scales = [float(p.detach().square().mean().sqrt()) for p in model.parameters()]
    for p, scale in zip(to_ladder_(model, bits).parameters(), scales, strict=True):
        if scale or not ladder.is_signed:
            assert p.coding.format == ladder
            assert p.limit.item() == pytest.approx(bound * (scale or 0.01))
    assert next(to_ladder_(net()).parameters()).coding.format == LadderFormat.signed(12)


@pytest.mark.parametrize("bits", [12, 8, "signed8", LadderFormat.signed(12), LadderFormat.signed(6)])
def test_vectors_of_zeros_may_grow_on_ladders_that_are_finer_around_zero(bits):
    zeros = nn.ParameterDict(
        {"bias": torch.zeros(20), "gain": torch.full((4, 1, 1), 1e-5), "table": torch.zeros(4, 25)}
    )
    model = to_ladder_(zeros, bits)
    stored = model["table"].coding.format.stored_bits
    for name in ("bias", "gain"):
        p = model[name]
        assert p.limit.item() == pytest.approx(5.0)
        assert 0.02 < p.limit.item() * p.coding.format.crossing <= 0.05  # the zone of 5 x zero_scale, or half of it
        assert p.coding.format == LadderFormat.signed(stored, crossing=2.0**-7)
        assert not p.decode().any()
    assert model["table"].limit.item() == pytest.approx(5 * 0.5 / 5)  # matrices of zeros, by their inputs
    optimizer = Madam(model.parameters(), weight_decay=0.0)
    for _ in range(600):
        model["bias"].grad = -torch.ones(20)
        optimizer.step()
    assert torch.all(model["bias"].decode() > 2.0)


def test_which_ladder_a_tensor_gets_does_not_depend_on_what_was_drawn():
    def formats(seed, bits):
        torch.manual_seed(seed)
        layers = nn.Linear(3, 2), nn.Linear(300, 2), nn.LayerNorm(4), nn.Embedding(50, 3), nn.Conv2d(2, 3, 3)
        return [p.coding.format for p in to_ladder_(nn.ModuleList(layers), bits).parameters()]

    for bits in (8, LadderFormat.signed(6, crossing=0.3)):
        assert all(formats(seed, bits) == formats(0, bits) for seed in range(1, 8))


def test_what_is_drawn_from_a_ladder_is_no_larger_for_having_begun_as_zeros():
    zeros = nn.ParameterDict({"bias": torch.zeros(20), "table": torch.zeros(4, 25)})
    for p in to_ladder_(zeros, 8, init="uniform").parameters():
        assert p.limit.item() == pytest.approx(0.05)
        assert p.coding.format == LadderFormat.signed(8)


@pytest.mark.parametrize(("bound", "crossing"), [(2.0, 1.0), (5.0, 1.0), (10.0, 0.5), (50.0, 2.0**-4)])
def test_steps_are_sized_by_five_scales_however_large_the_bound_unless_the_format_says_otherwise(bound, crossing):
    weight = to_ladder_(net(), 12, bound=bound)[0].weight
    assert weight.coding.format == LadderFormat.signed(12, crossing=crossing)
    own = LadderFormat.signed(12)
    exact = to_ladder_(net(), own, bound=bound)[0].weight
    assert exact.coding.format == own
    assert exact.limit == weight.limit


@pytest.mark.parametrize("bits", [12, 8, "signed12"])
def test_an_outlier_among_trained_weights_does_not_make_the_steps_of_others_large(bits):
    torch.manual_seed(0)
    layer = nn.Linear(64, 64, bias=False)
    with torch.no_grad():
        layer.weight[0, 0] = 60 * layer.weight.square().mean().sqrt()
    floats = layer.weight.detach().clone()
    scale = floats.square().mean().sqrt()
    p = to_ladder_(layer, bits, init="nearest").weight
    assert p.limit.item() == floats.abs().max()
    assert p.coding.format.crossing == 1 / 16  # 5 / 54, and a power of two
    before = p.decode()
    assert (before - floats)[1:].abs().max() < (0.01 if bits != 8 else 0.15) * scale
    p.grad = torch.randn(64, 64)
    Madam([p], weight_decay=0.0).step()
    assert (p.decode() - before)[1:].square().mean().sqrt() < 0.12 * scale  # at lr = 0.01 of 5 scales, and rounding


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"init": "random"}, "init='random' is unknown"),
        ({"bits": 16}, "a signed ladder of 16 bits cannot be made: it has 2 to 15"),
        ({"bits": "nine"}, "no ladder is named 'nine'"),
        ({"bound": 0.0}, "bound=0.0 cannot work"),
        ({"dtype": torch.int32}, r"dtype=torch\.int32 cannot be the dtype of gradients"),
        ({"dtype": torch.float8_e4m3fn}, "cannot be the dtype of gradients"),
        ({"scale": -1.0}, r"scale=-1\.0 cannot work"),
        ({"scale": math.nan}, "scale=nan cannot work"),
        ({"bound": math.inf}, "bound=inf cannot work"),
        ({"zero_scale": -1.0}, r"zero_scale=-1\.0 cannot work"),
        ({"seed": 1.5}, r"seed=1\.5 must be an integer"),
        ({"sign_seed": 2**70, "bits": "paper8"}, "must be an integer of at most 64 bits"),
        ({"scale": 1e39}, "which float32 cannot hold"),
        ({"sign_seed": 1, "init": "nearest", "bits": "paper8"}, "sign_seed replaces signs"),
        ({"sign_seed": 1}, "only the paper's ladders, such as .paper12., have any"),
        ({"bits": 12.0}, "it has 2 to 15"),
    ],
)
def test_bad_arguments_raise_before_anything_is_changed(arguments, says):
    model = net()
    with pytest.raises(ValueError, match=says):
        to_ladder_(model, **arguments)
    assert all(type(p) is nn.Parameter for p in model.parameters())


def test_weights_that_are_not_finite_or_complex_are_refused():
    model = net()
    with torch.no_grad():
        model[0].weight[0, 0] = math.nan
    with pytest.raises(ValueError, match=r"'0\.weight' holds a value that is not finite"):
        to_ladder_(model, "paper12")
    with pytest.raises(ValueError, match="is complex"):
        to_ladder_(nn.ParameterDict({"c": nn.Parameter(torch.ones(2, dtype=torch.complex64))}), "paper12")


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0), (37, 53), (2, 3, 5, 7)])
@pytest.mark.parametrize("ladder", ["paper12", "signed8"])
def test_odd_shapes_convert_step_and_come_back(shape, ladder):
    holder = nn.ParameterList([nn.Parameter(torch.randn(shape))])
    to_ladder_(holder, ladder)
    p = holder[0]
    assert p.shape == shape
    p.grad = torch.ones(shape)
    before = p.decode()
    Madam(holder.parameters(), rounding="nearest", momentum=0.0).step()
    if p.numel():
        assert torch.all(p.decode() <= before)
        assert not torch.equal(p.decode(), before)
    to_dense_(holder)
    assert type(holder[0]) is nn.Parameter
    assert holder[0].shape == shape


def test_a_single_gain_keeps_its_value():
    gate = to_ladder_(nn.PReLU(), "paper12")
    assert gate.weight.item() == pytest.approx(0.25, rel=6e-4)


def test_summary_is_a_table_of_every_tensor_with_its_ends():
    model = to_ladder_(net(), "paper12", filter=lambda name, p: name != "0.bias")
    table = summary(model)
    text = str(table)
    assert [row.name for row in table.rows] == [name for name, _ in model.named_parameters()]
    assert "0.weight" in text
    assert "12-bit, spacing 0.001" in text
    assert "float32" in text
    assert table.rows[1].at_upper_end is None
    assert table.rows[-1].at_lower_end == 1.0
    assert len({len(line) for line in text.splitlines()}) == 1


# ---- average


@pytest.mark.parametrize("ladder", [None, "paper12", "signed8"])
def test_an_average_is_the_mean_of_decoded_weights_and_restores_exactly(ladder):
    model = net()
    if ladder:
        to_ladder_(model, ladder)
    optimizer = Madam(model.parameters(), lr=0.05)
    mean = torchmadam.average(model, recent=1.0)
    seen = []
    for t in range(4):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(t))
        optimizer.step()
        mean.update()
        seen.append(model[0].weight.detach() + 0.0)
    own = list(model.parameters())
    codes = [p.codes() for p in own] if ladder else [p.detach().clone() for p in own]
    x = torch.randn(3, 64)
    with mean.applied() as averaged:
        assert averaged is model
        torch.testing.assert_close(model[0].weight.detach(), torch.stack(seen).mean(0))
        inside = model(x)
    assert not torch.equal(inside, model(x))
    assert all(p is q for p, q in zip(own, model.parameters(), strict=True))
    assert all(torch.equal(c, p.codes() if ladder else p) for c, p in zip(codes, own, strict=True))
    optimizer.step()


def test_an_exponential_average_forgets_and_survives_a_save():
    model = to_ladder_(net(), "paper12")
    mean = torchmadam.average(model, decay=0.5)
    with pytest.raises(RuntimeError, match="no average yet"), mean.applied():
        pass
    values = []
    for t in range(3):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(t))
        Madam(model.parameters(), lr=0.05).step()
        mean.update()
        values.append(model[0].weight.decode())
    expected = (values[0] + values[1]) / 4 + values[2] / 2
    other = torchmadam.average(model, decay=0.5)
    other.load_state_dict(mean.state_dict())
    for average in (mean, other):
        with average.applied():
            torch.testing.assert_close(model[0].weight.detach(), expected)
    with pytest.raises(ValueError, match="another model"):
        torchmadam.average(nn.Linear(2, 2)).load_state_dict(mean.state_dict())


def one_weight(recent, dtype=torch.float32):
    model = nn.Linear(1, 1, bias=False, dtype=dtype)
    mean = torchmadam.average(model, recent=recent)

    def take(value):
        with torch.no_grad():
            model.weight.fill_(value)
        mean.update()

    def found():
        with mean.applied():
            return model.weight.item()

    return mean, take, found


@pytest.mark.parametrize("recent", [0.05, 1.0])
def test_a_memory_of_millions_follows_what_moves_by_a_thousandth(recent):
    mean, take, found = one_weight(recent)
    take(1.0)
    mean.count = t = 1_000_000
    exact, generator = 1.0, torch.Generator().manual_seed(0)
    for value in (1.001 + 0.001 * torch.randn(3000, generator=generator)).tolist():
        t += 1
        take(value)
        exact += (value - exact) / (recent * t)
    # float32 itself has 6e-8 there, a share of one in 50,000 would lose most of the way, and one in a million all
    assert found() - 1 == pytest.approx(exact - 1, rel=0.1 if recent < 1 else 0.4)
    assert exact - 1 > (5e-5 if recent < 1 else 2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mean_forgets_what_was_not_finite_before_it_was_one(dtype):
    _, take, found = one_weight(0.05, dtype)
    for value in (1.0, math.nan, 2.0):
        take(value)
    assert found() == 2.0


def test_the_state_of_an_average_says_what_it_remembers_and_is_that_of_a_wrapped_model(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    mean = torchmadam.average(torch.compile(model, backend="eager"), recent=0.3)
    mean.update()
    torch.save(mean.state_dict(), tmp_path / "mean.pt")
    state = torch.load(tmp_path / "mean.pt")
    plain = torchmadam.average(model, recent=0.3)
    plain.load_state_dict(state)
    assert plain.count == 1
    for other in ({"decay": 0.9}, {}):
        with pytest.raises(ValueError, match=r"recent=0\.3"):
            torchmadam.average(model, **other).load_state_dict(state)
    earlier = {"count": 1, "means": {f"_orig_mod.{name}": value for name, value in state["means"].items()}}
    torchmadam.average(model, decay=0.999).load_state_dict(earlier)


def test_a_module_that_is_called_as_a_wrapper_is_averaged_apart():
    model = nn.Linear(2, 2)
    model._orig_mod = nn.Linear(2, 2)
    mean = torchmadam.average(model)
    mean.update()
    state = mean.state_dict()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    again = torchmadam.average(model)
    again.load_state_dict(state)
    own = dict(model.named_parameters())
    with again.applied():
        seen = {name: p.clone() for name, p in model.named_parameters()}
    assert seen.keys() == own.keys() == state["means"].keys()
    assert len({float(p.sum()) for p in seen.values()}) == 4
    torch.testing.assert_close(seen, state["means"], check_stride=False)


def test_a_cuda_graph_is_refused(monkeypatch):
    mean, take, _ = one_weight(0.05)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"after graph\.replay"):
        take(1.0)
    assert mean.count == 0


def test_the_mean_of_codes_goes_into_a_file_as_codes(tmp_path):
    torch.manual_seed(0)
    model = to_ladder_(net(), "signed8")
    optimizer, mean = Madam(model.parameters()), torchmadam.average(model)
    for t in range(30):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(t))
        optimizer.step()
        mean.update()
    with mean.applied():
        kept = copy.deepcopy(model)
        expected = [p.detach().clone() for p in model.parameters()]
    to_ladder_(kept, bits=8, init="nearest")
    torchmadam.save(kept, tmp_path / "mean.safetensors")
    fresh = torchmadam.load(tmp_path / "mean.safetensors", net())
    for p, wanted in zip(fresh.parameters(), expected, strict=True):
        assert isinstance(p, LadderTensor)
        half = math.asinh(5) / 127 * math.sqrt(1 + 5**2) / 5 / 2  # of what is between the uppermost rungs
        assert (p.decode() - wanted).abs().max() <= half * wanted.abs().max()


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"decay": 1.5}, r"decay=1\.5"),
        ({"recent": 0.0}, r"recent=0\.0"),
        ({"recent": 1.5}, r"recent=1\.5"),
        ({"recent": 0.05, "decay": 0.9}, "pass one"),
    ],
)
def test_an_average_has_one_memory_that_can_work(told, message):
    with pytest.raises(ValueError, match=message):
        torchmadam.average(net(), **told)


@pytest.mark.parametrize("recent", [None, 0.05, 0.3])
def test_the_memory_of_an_average_grows_with_training(recent):
    _, take, found = one_weight(recent)
    told, values = recent or 0.05, []
    for t in range(1, 401):
        values.append(math.sin(t * t))
        take(values[-1])
        if t in (1, 3, 20, 21, 100, 400):
            shares = [min(1.0, 1 / (told * s)) for s in range(1, t + 1)]
            left = [math.prod(1 - later for later in shares[s + 1 :]) for s in range(t)]
            assert sum(share * rest for share, rest in zip(shares, left, strict=True)) == pytest.approx(1)
            expected = sum(v * share * rest for v, share, rest in zip(values, shares, left, strict=True))
            assert found() == pytest.approx(expected, abs=1e-6)
    age = sum((400 - s) * share * rest for s, (share, rest) in enumerate(zip(shares, left, strict=True), 1))
    assert age == pytest.approx(told / (1 + told) * 400, rel=0.06)  # of what it remembers, on average


def test_an_average_has_the_statistics_of_batch_norm_and_lends_them():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    model.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
    mask = model.mask.clone()
    norm, mean, seen = model[1], torchmadam.average(model, recent=1.0), []
    for t in range(3):
        model(torch.randn(8, 4, generator=torch.Generator().manual_seed(t)) + t)
        mean.update()
        seen.append(norm.running_mean.clone())
    own = norm.running_mean
    with mean.applied():
        torch.testing.assert_close(norm.running_mean, torch.stack(seen).mean(0))
        assert norm.num_batches_tracked == 3
        assert torch.equal(model.mask, mask)
        torch.optim.swa_utils.update_bn([torch.ones(8, 4)], model)
        assert norm.num_batches_tracked == 1
    assert norm.running_mean is own
    assert torch.equal(own, seen[-1])
    assert norm.num_batches_tracked == 3
    assert len(model.state_dict()) == 8
    with mean.applied():
        torch.testing.assert_close(norm.running_mean, torch.stack(seen).mean(0))


def test_after_an_average_the_optimiser_goes_on_though_some_parameters_have_no_gradient():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer, mean = Madam(model.parameters()), torchmadam.average(model)
    mean.update()
    with mean.applied():
        pass
    model[0](torch.ones(2, 3)).sum().backward()
    before = model[0].weight.detach().clone()
    optimizer.step()
    assert not torch.equal(before, model[0].weight)


def test_an_exception_inside_the_average_restores_too():
    model = to_ladder_(net(), "paper12")
    mean = torchmadam.average(model)
    mean.update()
    own = list(model.parameters())
    with pytest.raises(ZeroDivisionError), mean.applied():
        raise ZeroDivisionError
    assert all(p is q for p, q in zip(own, model.parameters(), strict=True))


@pytest.mark.parametrize(
    "replace", [to_ladder_, lambda model: to_dense_(to_ladder_(model, "paper12"))], ids=["codes", "floats"]
)
def test_an_optimiser_made_before_the_parameters_were_replaced_says_so_instead_of_doing_nothing(replace):
    model = nn.Linear(3, 2)
    optimizer = Madam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    replace(model)
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(RuntimeError, match="make the optimiser afterwards"):
        optimizer.step()
    Madam(model.parameters()).step()


@pytest.mark.parametrize("clear", [lambda m, o: m.zero_grad(), lambda m, o: o.zero_grad(set_to_none=False)])
def test_so_does_one_whose_old_parameters_have_kept_their_last_gradient(clear):
    model = nn.Linear(3, 2)
    optimizer = Madam(model.parameters())
    for replace in (lambda: None, lambda: to_ladder_(model, 12, init="nearest")):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        replace()
        clear(model, optimizer)
    model(torch.ones(1, 3)).sum().backward()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="make the optimiser afterwards"):
            optimizer.step()


def test_so_does_one_whose_step_is_compiled_afterwards():
    model = nn.Linear(3, 2)
    optimizer = Madam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    to_ladder_(model, 12)
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="make the optimiser afterwards"):
        torch.compile(optimizer.step, backend="eager")()


def test_parameters_that_another_module_still_holds_train_on_and_a_broken_tie_is_named():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    to_ladder_(model[1], 12)
    assert model[0].weight is not model[1].weight
    optimizer = Madam(model.parameters())
    model[0].requires_grad_(False)  # what has no gradient is no sign of anything
    model(torch.randn(4, 8)).sum().backward()
    with pytest.warns(UserWarning, match=r"1 of the parameters \(of shape \(8, 8\)\) were shared.*trained as two now"):
        optimizer.step()
    model[0].requires_grad_(True)
    before = model[0].weight.detach().clone()
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    assert not torch.equal(before, model[0].weight)


@pytest.mark.parametrize(
    "function", [to_ladder_, to_dense_, lambda x: torchmadam.save(x, "x")], ids=["ladder", "dense", "save"]
)
def test_what_is_no_model_is_named(function):
    model = net()
    for wrong, kind in ((model.parameters(), "generator"), (model.state_dict(), "OrderedDict")):
        with pytest.raises(TypeError, match=f"got a {kind}; pass the model itself"):
            function(wrong)


def test_other_bits_are_refused_with_a_ladder_that_would_do():
    with pytest.raises(ValueError, match=r"use LadderFormat\.paper\(4, spacing=0\.27\)"):
        LadderFormat.paper(4)
    with pytest.raises(ValueError, match=r"use LadderFormat\.paper\(levels=26, spacing=0\.16\)"):
        LadderFormat.paper(levels=26)


def test_writing_codes_with_safetensors_alone_says_what_to_do(tmp_path):
    model = to_ladder_(net(), "paper12")
    with pytest.raises(TypeError, match="plain_state_dict_"):
        safetensors.torch.save_file(model.state_dict(), tmp_path / "x")


def test_a_conversion_that_would_change_nothing_says_so():
    model = to_ladder_(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), "paper12")
    with pytest.raises(ValueError, match=r"nothing is left to convert to 8-bit.*codes already \(12-bit.*to_dense_"):
        to_ladder_(model, "paper8")
    before = model[0].weight.codes().clone()
    to_ladder_(model, "paper12")
    to_ladder_(model, "paper8", filter=lambda name, p: False)
    assert torch.equal(model[0].weight.codes(), before)
    other = LadderFormat.paper(12, 0.00100001)  # of the same name
    with pytest.raises(ValueError, match="nothing is left"):
        to_ladder_(model, other)
    model.append(nn.Linear(2, 2))  # what was added later is converted, and the rest stays as it is
    to_ladder_(model, "signed8")
    assert [str(m.weight.coding.format)[:6] for m in model] == ["12-bit", "12-bit", "signed"]
    to_ladder_(model, "paper12")  # as some are, and all that can be


@pytest.mark.parametrize("ladder", ["paper12", "signed12"])
def test_frozen_weights_are_kept_whatever_the_ladder(ladder):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    model[0].requires_grad_(False)
    kept, drawn = (m.weight.detach().clone() for m in model)
    to_ladder_(model, ladder, sign_seed=3 if ladder == "paper12" else None)
    assert (model[0].weight.decode() - kept).norm() < 0.01 * kept.norm()
    if ladder == "paper12":
        assert (model[1].weight.decode() - drawn).norm() > 0.3 * drawn.norm()


def test_weights_too_small_for_the_ladder_are_warned_of_and_ordinary_ones_are_not():
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64) for _ in range(3)]
    with torch.no_grad():
        layers[1].weight.normal_()[0, 0] = 60.0
        layers[2].weight[torch.rand(64, 64) < 0.5] = 0.0
    to_ladder_(copy.deepcopy(layers[0]), "paper12", init="nearest")
    for layer in layers[1:]:
        with pytest.warns(UserWarning, match=r"% of parameter 'weight' is zero or less than half.*signed ladder"):
            to_ladder_(copy.deepcopy(layer), "paper12", init="nearest")
        to_ladder_(layer, "signed12", init="nearest")


def test_codes_are_refused_to_dlpack():
    layer = to_ladder_(nn.Linear(4, 3), "paper12")
    with pytest.raises(TypeError, match=r"codes, which DLPack cannot describe; use .decode\(\)"):
        torch.from_dlpack(layer.weight.detach())
    assert torch.equal(torch.from_dlpack(layer.weight.decode().detach()), layer.weight.decode())


def test_a_state_from_codes_goes_on_with_floats_and_back():
    torch.manual_seed(0)
    coded = to_ladder_(nn.Linear(4, 3), "paper12")
    dense = to_dense_(copy.deepcopy(coded))
    optimizers = [Madam(model.parameters()) for model in (coded, dense)]

    def step(model, optimizer):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()

    step(coded, optimizers[0])
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    dense.weight.grad = torch.ones(3, 4)
    assert situation_of(optimizers[1].param_groups[0], optimizers[1].state) is None  # which a GPU asks for first
    step(dense, optimizers[1])
    state = optimizers[1].state[dense.weight]
    assert float(state["step"]) == 2
    assert 0 < float(state["scale"]) < math.inf
    optimizers[0].load_state_dict(optimizers[1].state_dict())
    step(coded, optimizers[0])
    assert float(optimizers[0].state[coded.weight]["step"]) == 3
    assert "scale" not in optimizers[0].state[coded.weight]


def test_an_embedding_that_rescales_its_rows_is_refused_by_name():
    model = nn.Sequential(nn.Embedding(5, 4, max_norm=1.0), nn.Linear(4, 2))
    with pytest.raises(ValueError, match=r"parameter '0.weight' is of an embedding with max_norm.*leave it out"):
        to_ladder_(model)
    assert not isinstance(model[1].weight, LadderTensor)
    to_ladder_(model, filter=lambda name, p: not name.startswith("0."))
    model(torch.tensor([1, 2])).sum().backward()


def test_a_filter_is_a_function():
    with pytest.raises(TypeError, match="filter='x' is no function"):
        to_ladder_(nn.Linear(2, 2), filter="x")


@pytest.mark.parametrize("function", [torchmadam.summary, torchmadam.memory, torchmadam.average])
def test_what_wants_a_model_says_so(function):
    with pytest.raises(TypeError, match=f"{function.__name__} takes a model, an nn.Module, and got a OrderedDict"):
        function(nn.Linear(2, 2).state_dict())
