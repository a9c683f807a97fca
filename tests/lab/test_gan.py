"""The GAN: spectral norm on floats and codes, two players in turn, pictures and their records."""

import itertools
import struct
import warnings
import zlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils import parametrizations

from madam_lab import png, recipes, records
from madam_lab.models import gan, spectral
from madam_lab.progress import Progress
from madam_lab.tasks import TASKS
from madam_lab.trainer import Limits, Run
from torchmadam import LadderTensor, to_ladder_

CPU = torch.device("cpu")


def layers():
    torch.manual_seed(0)
    conv = spectral.Conv2d(5, 7, 3)
    conv.to(memory_format=torch.channels_last)
    return {
        "conv": (conv, torch.randn(2, 5, 6, 6)),
        "linear": (spectral.Linear(37, 53), torch.randn(3, 37)),
        "embedding": (spectral.Embedding(10, 6), torch.tensor([3, 3, 9])),
    }


@pytest.mark.parametrize("ladder", [None, "paper12", "signed8"])
@pytest.mark.parametrize("kind", ["conv", "linear", "embedding"])
def test_the_largest_singular_value_of_a_normalised_weight_is_one(kind, ladder):
    layer, x = layers()[kind]
    if ladder:
        to_ladder_(layer, ladder)
    for _ in range(200):
        layer(x)
    found = torch.linalg.matrix_norm(layer.normalised().flatten(1), 2)
    assert float(found.detach()) == pytest.approx(1.0, abs=1e-3)
    before = layer.left.clone()
    layer.eval()(x)
    assert torch.equal(layer.left, before)  # evaluation looks, and does not go on


@pytest.mark.parametrize("kind", ["conv", "linear"])
def test_values_and_gradients_are_those_of_pytorchs_own_spectral_norm(kind):
    layer, x = layers()[kind]
    layer(x)
    layer.eval()
    shape = layer.weight.shape
    other = torch.nn.Conv2d(5, 7, 3, padding=1) if kind == "conv" else torch.nn.Linear(37, 53)
    other.load_state_dict({name: p.detach().contiguous() for name, p in layer.named_parameters()})
    other = parametrizations.spectral_norm(other).eval()
    norm = other.parametrizations.weight[0]
    norm._u.copy_(layer.left)
    norm._v.copy_(F.normalize(layer.weight.detach().reshape(shape[0], -1).t() @ layer.left, dim=0))
    torch.testing.assert_close(layer(x), other(x))
    layer(x).square().sum().backward()
    other(x).square().sum().backward()
    torch.testing.assert_close(layer.weight.grad, other.parametrizations.weight.original.grad)


@pytest.mark.parametrize("kind", ["conv", "linear", "embedding"])
def test_codes_stay_the_parameter_and_get_the_gradient_of_the_floats_they_stand_for(kind):
    layer, x = layers()[kind]
    to_ladder_(layer, "paper12")
    other, _ = layers()[kind]
    with torch.no_grad():
        for name, p in other.named_parameters():
            p.copy_(dict(layer.named_parameters())[name].decode())
    other.left.copy_(layer.left)
    planes = [plane.clone() for plane in layer.weight.planes]
    for each in (layer, other):
        each(x).square().sum().backward()
    assert isinstance(layer.weight, LadderTensor)
    assert all(torch.equal(a, b) for a, b in zip(planes, layer.weight.planes, strict=True))
    torch.testing.assert_close(layer.weight.grad, other.weight.grad)


def test_both_players_have_the_sizes_of_the_description():
    with torch.device("meta"):
        pair = gan.Gan()
    count = lambda model: sum(p.numel() for p in model.parameters())  # noqa: E731
    assert (count(pair.generator), count(pair.discriminator)) == (2_167_204, 2_390_466)
    plain = [m for m in pair.modules() if type(m) in (torch.nn.Conv2d, torch.nn.Linear, torch.nn.Embedding)]
    assert not plain  # every one of them is normalised


def test_weights_start_orthogonal_biases_at_a_hundredth_and_gains_of_attention_at_one():
    torch.manual_seed(0)
    pair = gan.Gan(width=16)
    matrix = pair.generator.blocks[0].conv1.weight.detach().flatten(1)
    torch.testing.assert_close(matrix @ matrix.t(), torch.eye(len(matrix)), atol=1e-5, rtol=0)
    biases = torch.cat([p.detach() for name, p in pair.named_parameters() if name.endswith("bias")])
    assert float(biases.std()) == pytest.approx(0.01, rel=0.1)
    assert pair.generator.attention.gain.tolist() == pair.discriminator.blocks[2].gain.tolist() == [1]


def test_a_picture_depends_on_every_chunk_of_noise_and_on_the_class():
    torch.manual_seed(0)
    net = gan.Generator(width=4).eval()
    z, y = torch.randn(2, 80), torch.tensor([1, 2])
    first = net(z, y)
    assert first.shape == (2, 3, 32, 32)
    assert float(first.detach().abs().max()) <= 1
    for chunk in range(4):
        other = z.clone()
        other[:, 20 * chunk : 20 * chunk + 20] += 1
        assert not torch.allclose(net(other, y), first)
    assert not torch.allclose(net(z, y.flip(0)), first)


def test_shortcuts_are_what_they_would_be_in_the_usual_order():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    up, down = spectral.Conv2d(3, 5, 1).eval(), gan.DownBlock(3, 5, first=True).eval()
    doubled = lambda t: F.interpolate(t, scale_factor=2.0, mode="nearest")  # noqa: E731
    torch.testing.assert_close(doubled(up(x)), up(doubled(x)))
    for y in (x, x.contiguous(memory_format=torch.channels_last)):
        assert torch.equal(gan._doubled(y), doubled(y))
        assert gan._doubled(y).is_contiguous(memory_format=torch.channels_last)
    pooled = F.avg_pool2d(down.conv2(F.relu(down.conv1(x))) + down.shortcut(x), 2)
    torch.testing.assert_close(down(x), pooled)


# ---- the two-player step


def test_losses_are_the_papers(tiny):
    task = TASKS["cgan"](tiny, CPU, batch=4, seed=0, smoke=True)
    verdicts = {"real": torch.tensor([0.5, 3.0, -2.0, 1.0]), "fake": torch.tensor([-4.0, 0.25, -0.5, 2.0])}
    pair = SimpleNamespace(
        generator=lambda z, y: torch.zeros(len(z), 3, 32, 32),
        discriminator=lambda x, y: torch.cat([verdicts["real"], verdicts["fake"]]) if len(x) == 8 else verdicts["fake"],
    )
    batch = next(task.epoch(0))
    loss, sums = task.loss(pair, batch)
    # max(fake, -1): -1, .25, -.5, 2; min(real, 1): .5, 1, -2, 1
    assert loss.item() == pytest.approx(0.75 / 4 - 0.5 / 4)
    assert sums.tolist() == pytest.approx([0.25, 0, 4])
    loss, sums = task.generator_loss(pair, batch)
    assert loss.item() == pytest.approx(2.25 / 4)
    assert sums.tolist() == pytest.approx([0, 2.25, 0])


def begun(tiny, folder, name="cgan_madam_signed8", precision="bf16", **arguments):
    recipe = replace(recipes.get(name), precision=precision).as_smoke()
    return Run(recipe, 0, data=tiny, folder=folder / "runs", results=folder / "results", device=CPU, **arguments)


@pytest.mark.parametrize("name", ["cgan_adam", "cgan_madam_12bit"])
def test_in_a_turn_only_one_player_gets_gradients_and_moves(name, tiny, tmp_path):
    run = begun(tiny, tmp_path, name)
    turns = []
    noted = lambda *_: turns.append({n for n, p in run.model.named_parameters() if p.grad is not None})  # noqa: E731
    run.optimiser.register_step_pre_hook(noted)
    value = lambda: {n: p.detach().clone() * 1.0 for n, p in run.model.named_parameters()}  # noqa: E731
    values = [value()]
    run.optimiser.register_step_post_hook(lambda *_: values.append(value()))
    run.stepper.step(next(run.task.epoch(0)))
    names = {n for n, _ in run.model.named_parameters()}
    first = {n for n in names if n.startswith("discriminator")}
    assert turns == [first, names - first]
    for (before, after), theirs in zip(itertools.pairwise(values), turns, strict=True):
        assert all(torch.equal(before[n], after[n]) for n in names - theirs)
        assert any(not torch.equal(before[n], after[n]) for n in theirs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cgan_adam", "cgan_madam_12bit"])
def test_each_move_is_traced_as_a_whole_and_computes_what_it_does_untraced(name, tiny, tmp_path, monkeypatch):
    real = torch.compile
    traced = []

    def compile_(function, *, dynamic, fullgraph, options):  # without a code generator, which takes minutes
        traced.append(fullgraph)
        return real(function, dynamic=dynamic, fullgraph=fullgraph, backend="aot_eager")

    monkeypatch.setattr(torch, "compile", compile_)
    runs = [begun(tiny, tmp_path, name, "float32", compiled=compiled) for compiled in (False, True)]
    assert traced == [True, True]
    for run in runs:
        for batch in run.task.epoch(0):
            run.stepper.step(batch)
    torch.testing.assert_close(*(run.stepper.take_sums() for run in runs), rtol=1e-3, atol=1e-3)
    for (a, x), (_, y) in zip(*(run.model.named_buffers() for run in runs), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-2, atol=1e-3, msg=lambda m, a=a: f"{a}: {m}")


def test_noise_differs_between_turns_and_steps_and_only_whole_batches_come(tiny):
    task = TASKS["cgan"](tiny, CPU, batch=6, seed=0, smoke=True)
    batches = list(task.epoch(0))
    assert [len(b[0]) for b in batches] == [6, 6]
    noises = [b[i] for b in batches for i in (2, 4)]
    assert all(not torch.equal(a, b) for i, a in enumerate(noises) for b in noises[:i])
    assert float(batches[0][0].min()) >= -1
    assert float(batches[0][0].max()) <= 1


def test_making_pictures_repeats_itself_and_leaves_the_running_spectral_vectors(tiny, tmp_path):
    run = begun(tiny, tmp_path)
    run.stepper.step(next(run.task.epoch(0)))
    vectors = [b.clone() for n, b in run.model.named_buffers() if n.endswith("left")]
    first, second = run.stepper.pictures(), run.stepper.pictures()
    assert torch.equal(first, second)
    assert first.shape == (6 * 32, 10 * 32, 3)
    assert all(
        torch.equal(a, b)
        for a, b in zip(vectors, (b for n, b in run.model.named_buffers() if n.endswith("left")), strict=True)
    )
    assert all(m.momentum == 0.1 for m in run.model.modules() if isinstance(m, torch.nn.BatchNorm2d))


def test_statistics_of_batch_norm_are_measured_at_the_weights_at_hand(tiny, tmp_path):
    run = begun(tiny, tmp_path, "cgan_adam")
    task, model = run.task, run.model.eval()
    task._refresh(model)
    norm = model.generator.blocks[0].norm1.norm
    seen = []
    norm.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    z = task._noise(-2, task.refreshing * task.batch)
    with torch.no_grad():
        model(z, torch.arange(len(z)) % 10)
    torch.testing.assert_close(norm.running_mean, seen[0].mean((0, 2, 3)), rtol=1e-4, atol=1e-5)


def test_a_generator_that_makes_no_numbers_has_an_infinite_fid(tiny, tmp_path):
    run = begun(tiny, tmp_path, "cgan_adam")
    with torch.no_grad():
        run.model.generator.out.bias.fill_(float("nan"))
    assert run.stepper.scores(("train", "test")) == {"train": float("inf"), "test": float("inf")}
    assert run.stepper.pictures() is None


def test_a_record_has_both_fids_and_a_picture_beside_it(tiny, tmp_path):
    run = begun(tiny, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        record = run.train(Limits(), Progress("", 1, quiet=True))
    again = records.read(records.path_of(run.recipe.name, 0, tmp_path / "results"))
    assert again["metric"] == "FID"
    assert again["test"] == again["curve"][-1]["test"] == record["test"] >= 0
    assert again["train"] == again["curve"][-1]["train"] >= 0
    assert again["train"] != again["test"]
    shape, pixels = decoded(records.picture_of(run.recipe.name, 0, tmp_path / "results").read_bytes())
    assert shape == (192, 320)
    assert torch.equal(pixels, run.stepper.pictures())


# ---- pictures


def decoded(blob):
    """Height and width, and the pixels, of a PNG file in filter "up"."""
    assert blob[:8] == b"\x89PNG\r\n\x1a\n"
    at, chunks = 8, {}
    while at < len(blob):
        size, kind = struct.unpack(">I4s", blob[at : at + 8])
        data = blob[at + 8 : at + 8 + size]
        assert zlib.crc32(kind + data) == struct.unpack(">I", blob[at + 8 + size : at + 12 + size])[0]
        chunks[kind] = data
        at += 12 + size
    width, height, *rest = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert rest == [8, 2, 0, 0, 0]
    rows = torch.frombuffer(bytearray(zlib.decompress(chunks[b"IDAT"])), dtype=torch.uint8).view(height, 1 + 3 * width)
    assert (rows[:, 0] == 2).all()
    pixels = rows[:, 1:].long().cumsum(0).remainder(256).to(torch.uint8)
    return (height, width), pixels.view(height, width, 3)


@pytest.mark.parametrize("size", [(1, 1), (5, 3), (32, 64)])
def test_a_png_holds_the_pixels(size):
    picture = torch.randint(256, (*size, 3), dtype=torch.uint8)
    shape, pixels = decoded(png.encoded(picture))
    assert shape == size
    assert torch.equal(pixels, picture)


def test_only_bytes_in_three_colours_are_pictures():
    with pytest.raises(ValueError, match="height x width x 3 bytes"):
        png.encoded(torch.zeros(2, 2, 3))


def test_a_sheet_goes_row_by_row():
    pictures = torch.arange(6, dtype=torch.uint8).view(6, 1, 1, 1).expand(6, 2, 2, 3)
    whole = png.sheet(pictures, 3)
    assert whole[::2, ::2, 0].tolist() == [[0, 1, 2], [3, 4, 5]]
