"""Scales from a file: by name and shape, for floats and codes, from the command line to the record."""

import warnings

import pytest
import torch
from safetensors.torch import save_file

from madam_lab import recipes, records, scales
from madam_lab.cli import main
from madam_lab.report.numbers import problems
from madam_lab.trainer import Run
from torchmadam import LadderTensor, save, to_ladder_

CPU = torch.device("cpu")


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 4))


@pytest.mark.parametrize("form", ["safetensors", "coded", "state dict", "wrapped"])
def test_every_kind_of_file_lends_its_scales(form, tmp_path):
    donor = model()
    with torch.no_grad():
        donor[0].weight.fill_(0.5)
    state = donor.state_dict()
    path = tmp_path / ("x.safetensors" if form in ("safetensors", "coded") else "x.pt")
    if form == "safetensors":
        save_file(state, path)
    elif form == "coded":
        save(to_ladder_(donor, "paper12", init="nearest"), path)
    else:
        torch.save(
            state if form == "state dict" else {"epoch": 3, "state_dict": {f"module.{k}": v for k, v in state.items()}},
            path,
        )
    found, without = scales.matched(model(), scales.read(path))
    assert not without
    assert found["0.weight"] == pytest.approx(0.5, rel=1e-3)
    assert found["1.weight"] == pytest.approx(float(state["1.weight"].square().mean().sqrt()), rel=1e-2)


def test_tensors_that_do_not_match_are_listed_with_the_reason():
    tensors = {"0.weight": torch.ones(6, 5), "0.bias": torch.zeros(5), "1.weight": torch.ones(4, 5), "x": torch.ones(1)}
    found, without = scales.matched(model(), tensors)
    assert found == {"1.weight": 1.0}
    assert without == ["0.weight is (6, 5) there and (5, 6) here", "0.bias is all zeros there", "1.bias is not there"]


def test_what_a_file_has_and_a_model_has_not_is_named(tiny, tmp_path):
    path, recipe = tmp_path / "x.pt", recipes.get("imagenette_madam").as_smoke()
    plain = Run(recipe, 0, data=tiny, folder=tmp_path, results=tmp_path, device=CPU)
    torch.save({**plain.model.state_dict(), "surplus": torch.ones(3)}, path)
    with pytest.warns(UserWarning, match="has 1 tensors that .* does not have: surplus"):
        begun(tiny, tmp_path, "imagenette_madam", path)


@pytest.mark.parametrize("content", [b"nothing", b""])
@pytest.mark.parametrize("name", ["x.safetensors", "x.pt"])
def test_a_file_that_is_no_model_says_so(name, content, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=r"is no safetensors file|neither a safetensors file"):
        scales.read(tmp_path / name)


@pytest.mark.parametrize("content", [[torch.ones(3)], torch.ones(3), {1: torch.ones(3)}])
def test_a_file_without_named_tensors_says_so(content, tmp_path):
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(ValueError, match="holds no tensors by name"):
        scales.read(tmp_path / "x.pt")


def test_what_wrappers_put_into_names_is_taken_out(tmp_path):
    torch.save({"module._orig_mod.0.weight": torch.ones(5, 6)}, tmp_path / "x.pt")
    assert list(scales.read(tmp_path / "x.pt")) == ["0.weight"]


def begun(tiny, folder, name, path):
    recipe = recipes.get(name).overridden({"scales": scales.digest(path)}).as_smoke()
    return Run(recipe, 0, data=tiny, folder=folder, results=folder, device=CPU, scales=path)


@pytest.mark.parametrize("name", ["imagenette_madam", "imagenette_madam_12bit"])
def test_a_run_takes_the_scales_of_a_file(name, tiny, tmp_path):
    plain = Run(recipes.get(name).as_smoke(), 0, data=tiny, folder=tmp_path, results=tmp_path, device=CPU)
    state = {n: torch.full(p.shape, 0.25) for n, p in plain.model.named_parameters() if n != "fc.weight"}
    state["conv1.weight"] = torch.full((3, 3), 0.25)
    save_file(state, tmp_path / "x.safetensors")
    with pytest.warns(
        UserWarning, match=r"no scale for 2 tensors.*conv1.weight is \(3, 3\) there.*fc.weight is not there"
    ):
        run = begun(tiny, tmp_path, name, tmp_path / "x.safetensors")
    batch = next(run.task.epoch(0))
    run.stepper.step(batch)
    for n, p in run.model.named_parameters():
        mine = float(p.limit) / 3 if isinstance(p, LadderTensor) else float(run.optimiser.state[p]["scale"])
        if n in ("conv1.weight", "fc.weight"):
            assert mine != pytest.approx(0.25, rel=1e-3)
        else:
            assert mine == pytest.approx(0.25, rel=1e-6)


def test_scales_without_their_file_and_of_other_optimisers_are_refused(tiny, tmp_path):
    recipe = recipes.get("imagenette_madam").overridden({"scales": "0123456789abcdef"}).as_smoke()
    with pytest.raises(ValueError, match="give --scales FILE"):
        Run(recipe, 0, data=tiny, folder=tmp_path, results=tmp_path, device=CPU)
    with pytest.raises(ValueError, match="only Madam has scales"):
        recipes.get("imagenette_sgd").overridden({"scales": "0123456789abcdef"})


def test_from_the_command_line_weights_are_kept_and_lend_their_scales(tiny, tmp_path, capsys):
    where = ["--smoke", "--quiet", "--device", "cpu", "--data", str(tiny), "--runs", str(tmp_path / "u")]
    results = ["--results", str(tmp_path / "r")]
    assert main(["run", "imagenette_sgd", "--keep", str(tmp_path / "kept"), *where, *results]) == 0
    path = tmp_path / "kept" / "imagenette_sgd+smoke-0.safetensors"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert main(["run", "imagenette_madam_12bit", "--scales", str(path), *where, *results]) == 0
    name = f"imagenette_madam_12bit+scales={scales.digest(path)}+smoke"
    record = records.read(tmp_path / "r" / name / "0.json")
    assert record["settings"]["scales"] == record["overrides"]["scales"] == scales.digest(path)
    assert problems(tmp_path / "r") == ([], 2)
    capsys.readouterr()
    for more in ([], ["--at-once", "2"]):
        assert main(["run", "imagenette_sgd", "--keep", str(tmp_path / "kept"), *where, *results, *more]) == 0
        assert "weights" not in capsys.readouterr().out
        assert main(["run", "imagenette_sgd", "--keep", str(tmp_path / "else"), *where, *results, *more]) == 0
        assert "done before, and its weights are not in" in capsys.readouterr().out
