"""The command `madam`."""

import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn

import torchmadam
from madam_lab import data, records
from madam_lab.cli import main


def test_list_shows_the_papers_number_and_ours(capsys, tmp_path):
    assert main(["list", "cifar10_madam*", "--results", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["recipe", "the", "paper's", "ours"]
    assert lines[1].split() == ["cifar10_madam", "7.8", "±0.2", "missing"]
    assert len(lines) == 5


def test_run_trains_reports_and_does_not_repeat(capsys, tmp_path):
    where = ["--results", str(tmp_path / "r"), "--runs", str(tmp_path / "u"), "--device", "cpu"]
    arguments = ["run", "digits_sgd", "digits_adam", "--seeds", "0,1", "--set", "epochs=1", "--quiet", *where]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "digits_sgd+epochs=1 seed 0: test error %" in said
    assert "4 done, 0 were done before, 0 left" in said
    assert main(arguments) == 0
    assert "0 done, 4 were done before, 0 left" in capsys.readouterr().out
    assert records.read(tmp_path / "r" / "digits_adam+epochs=1" / "1.json")["overrides"] == {"epochs": 1}


def test_progress_without_a_terminal_is_plain_lines(capsys, tmp_path):
    main(
        [
            "run",
            "digits_sgd",
            "--set",
            "epochs=2",
            "--device",
            "cpu",
            "--results",
            str(tmp_path / "r"),
            "--runs",
            str(tmp_path),
        ]
    )
    out = capsys.readouterr().out
    assert "digits_sgd+epochs=2 seed 0: epoch 1/2, loss" in out
    assert "s left" in out
    assert "\r" not in out


def test_a_budget_is_kept(capsys, tmp_path):
    arguments = [
        "run",
        "digits_madam",
        "--budget",
        "0s",
        "--results",
        str(tmp_path / "r"),
        "--runs",
        str(tmp_path / "u"),
    ]
    assert main(arguments) == 0
    assert "0 done, 0 were done before, 1 left\nnext: digits_madam seed 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "cifar10_madm"], "madam: no recipe matches 'cifar10_madm'; did you mean cifar10_madam"),
        (["run", "digits_sgd", "--set", "epochs"], "use FIELD=VALUE"),
        (["run", "digits_sgd", "--set", "epoch=3"], "a recipe has no field 'epoch'"),
        (["run", "cifar10_sgd", "--data", "/nowhere"], "is missing; `madam data cifar10` downloads it"),
        (["data", "mnist"], "no data set is called 'mnist'"),
        (["run", "digits_madam", "--set", "task=foo"], "task 'foo' is unknown; use one of digits"),
        (["run", "digits_madam", "--set", "arguments.foo=1"], "mistaken arguments"),
        (["run", "digits_sgd", "--set", "arguments.bound=2"], "mistaken arguments"),
        (["run", "digits_sgd", "--set", "model.depth=2"], "mistaken model"),
        (["run", "digits_sgd", "--device", "xla:7"], "--device xla:7: "),
        (["run", "digits_madam", "--scales", __file__], "neither a safetensors file nor a state dict"),
        (["verify", "--results", "/nowhere"], "there is no folder /nowhere with records"),
        (["report", "--results", "/nowhere"], "there is no folder /nowhere with records"),
        (["inspect", "/nowhere.safetensors"], "nowhere"),
    ],
)
def test_mistakes_end_with_a_message_and_not_a_traceback(arguments, says, capsys, tmp_path):
    if arguments[0] == "run":
        arguments = [*arguments, "--results", str(tmp_path), "--runs", str(tmp_path)]
    assert main(arguments) == 1
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("seeds", ["a", "0,", "-1", ""])
def test_seeds_are_numbers(seeds, capsys):
    with pytest.raises(SystemExit):
        main(["run", "digits_sgd", "--seeds", seeds])
    assert "are no seeds; use 0, or several such as 0,1,2" in capsys.readouterr().err


def test_a_folder_for_records_is_tried_and_left_as_it_was(tmp_path):
    """Runs of one recipe share a folder, so that none may remove it; what is no folder fails before training."""
    path = records.path_of("digits_madam", 0, tmp_path / "results")
    records.check_writable(path)
    assert list(tmp_path.iterdir()) == []
    path.parent.mkdir(parents=True)
    records.check_writable(path)
    assert list(path.parent.iterdir()) == []
    path.parent.rmdir()
    path.parent.write_text("a file in the way")
    with pytest.raises(NotADirectoryError):
        records.check_writable(path)


def test_verify_and_report(capsys, tmp_path):
    main(
        [
            "run",
            "digits_lr_madam_0.01",
            "--smoke",
            "--quiet",
            "--device",
            "cpu",
            "--results",
            str(tmp_path / "r"),
            "--runs",
            str(tmp_path),
        ]
    )
    assert main(["verify", "--results", str(tmp_path / "r")]) == 0
    assert "1 records, 0 problems" in capsys.readouterr().out
    page = tmp_path / "p.html"
    assert main(["report", "--results", str(tmp_path / "r"), "--page", str(page), "--tables"]) == 0
    assert page.exists()
    (tmp_path / "r" / "digits_lr_madam_0.01+smoke" / "0.json").write_text("{}")
    assert main(["verify", "--results", str(tmp_path / "r")]) == 1


def test_inspect_prints_a_coded_file_and_export_writes_floats(capsys, tmp_path):
    from safetensors.torch import load_file

    model = torchmadam.to_ladder_(nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5)), "paper12")
    torchmadam.save(model, tmp_path / "m.safetensors")
    assert main(["inspect", str(tmp_path / "m.safetensors")]) == 0
    out = capsys.readouterr().out
    assert "0.weight" in out
    assert "12-bit, spacing 0.001" in out
    assert "1.running_mean" in out
    assert main(["export", str(tmp_path / "m.safetensors"), str(tmp_path / "dense.safetensors")]) == 0
    dense = load_file(tmp_path / "dense.safetensors")
    assert torch.equal(dense["0.weight"], model[0].weight.decode())
    plain = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5))
    plain.load_state_dict(dense)


def test_data_that_is_whole_is_left_alone_and_damaged_data_is_fetched_anew(tiny, tmp_path, monkeypatch, capsys):
    fetched = []
    monkeypatch.setattr(data, "download", lambda name, folder: fetched.append(name))
    shutil.copytree(tiny, tmp_path / "d")
    arguments = ["data", "cifar10", "wikitext2", "--data", str(tmp_path / "d")]
    assert main(arguments) == 0
    assert fetched == []
    assert "cifar10 is there, and whole" in capsys.readouterr().out
    batch = tmp_path / "d" / "cifar-10-batches-py" / "data_batch_3"
    batch.write_bytes(batch.read_bytes()[:100])
    assert main(arguments) == 0
    assert fetched == ["cifar10"]
    assert "data_batch_3 cannot be read" in capsys.readouterr().out


def test_without_the_labs_packages_the_command_says_what_to_install():
    command = "import sys; sys.modules['numpy'] = None; from madam_lab.cli import main; sys.exit(main(['demo']))"
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", command], capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith("madam: this needs numpy; pip install 'torchmadam[lab]'")
