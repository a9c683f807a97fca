"""Runs that stop and go on, end badly, and leave records that can be trusted."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compiler import needs_a_compiler
from madam_lab import queue, recipes, records, trainer
from madam_lab.cli import main
from madam_lab.progress import Progress
from madam_lab.report.numbers import is_traceable
from madam_lab.stepping import Stepper
from madam_lab.trainer import Limits, Run, Stopped
from stopping import StopAfter

KEPT = ("test", "train", "curve", "codes", "status", "weights", "bytes", "settings", "source")


CPU = torch.device("cpu")


def small(name="digits_madam_signed8", **changes):
    """A real recipe, short."""
    return replace(recipes.get(name), epochs=4, batch=128, **changes)


def run_whole(recipe, folder, seed=0, **arguments):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcome = queue.work([recipe], [seed], results=folder, folder=folder / "runs", quiet=True, **arguments)
    return outcome, records.path_of(recipe.name, seed, folder)


def same(a, b):
    return {k: a[k] for k in KEPT} == {k: b[k] for k in KEPT}


@pytest.mark.parametrize(
    "name",
    [
        "digits_madam_signed8",
        "digits_adam",
        "digits_60e_prodigy",
        "digits_60e_schedule_free_radam",
        "wikitext2_20e_schedule_free_adamw",
        "wikitext2_madam_12bit",
        "wikitext2_20e_crossing_1_average",
        "cifar10_100e_crossing_1_average",
        "cifar10_100e_signed8_bound_5_decay_0.2_momentum_constant_recent",
        "cifar10_sgd",
        "cgan_madam_12bit",
        "imagenette_madam_8bit",
    ],
)
def test_a_run_stopped_again_and_again_ends_bit_for_bit_as_one_that_never_was(name, tiny, tmp_path):
    recipe = small(name) if name.startswith("digits") else replace(recipes.get(name).as_smoke(), epochs=4)
    _, path = run_whole(recipe, tmp_path / "whole", data=tiny)
    whole = records.read(path)
    stops = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while True:
            run = Run(
                recipe, 0, data=tiny, folder=tmp_path / "runs", results=tmp_path / "parts", device=torch.device("cpu")
            )
            try:
                run.train(StopAfter(7), Progress("", 1, quiet=True))
                break
            except Stopped:
                stops += 1
    assert stops >= 1
    assert same(whole, records.read(tmp_path / "parts" / recipe.name / "0.json"))
    assert not run.checkpoint.exists()


@pytest.mark.parametrize("name", ["digits_madam", "digits_madam_signed8"])
@pytest.mark.parametrize("how", [{"average": 0.9}, {"recent": 0.2}], ids=["average", "recent"])
def test_an_averaged_run_trains_as_any_other_and_is_evaluated_with_its_mean(name, how, tmp_path):
    own, averaged = (records.read(run_whole(small(name, **a), tmp_path / str(len(a)))[1]) for a in ({}, how))
    pairs = list(zip(own["curve"], averaged["curve"], strict=True))
    assert all(a["loss"] == b["loss"] and a["train"] == b["train"] for a, b in pairs)
    assert any(a["test"] != b["test"] for a, b in pairs if "test" in a)
    assert own["codes"] == averaged["codes"]
    assert averaged["settings"] == {**own["settings"], **how}


def command(*arguments, **options):
    return subprocess.Popen([sys.executable, "-m", "madam_lab", *map(str, arguments)], **options)


def digits_command(folder):
    where = ("--results", folder / "results", "--runs", folder / "runs")
    how = ("--save-every", "0.2s", "--device", "cpu", "--quiet")
    return ("run", "digits_madam_12bit", "--set", "epochs=8", *where, *how)


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    assert command(*digits_command(folder)).wait() == 0
    return records.read(folder / "results" / "digits_madam_12bit+epochs=8" / "0.json")


def test_kill_9_in_an_epoch_loses_nothing_but_time(uninterrupted, tmp_path):
    checkpoint = tmp_path / "runs" / "digits_madam_12bit+epochs=8" / "0.pt"
    killed = []
    for _ in range(2):
        if killed and not killed[-1]:
            break  # it was faster than the signal
        process = command(*digits_command(tmp_path))
        before = checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0
        wait_for(lambda before=before: is_newer(checkpoint, before) or process.poll() is not None)
        process.kill()
        killed.append(process.wait() == -signal.SIGKILL)
    assert killed[0]
    assert command(*digits_command(tmp_path)).wait() == 0
    assert same(uninterrupted, records.read(tmp_path / "results" / "digits_madam_12bit+epochs=8" / "0.json"))


def is_newer(path, than):
    try:
        return path.stat().st_mtime_ns > than
    except FileNotFoundError:
        return False


# The second checkpoint is written, and has not replaced the first.
KILLED_IN_A_SAVE = """
import os, signal, sys
replace, saves = os.replace, []
def replace_or_die(source, target):
    saves.append(str(target).endswith(".pt"))
    if sum(saves) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)
os.replace = replace_or_die
from madam_lab.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_kill_9_in_a_save_loses_nothing_but_time(uninterrupted, tmp_path):
    folder = tmp_path / "runs" / "digits_madam_12bit+epochs=8"
    process = subprocess.Popen([sys.executable, "-c", KILLED_IN_A_SAVE, *map(str, digits_command(tmp_path))])
    assert process.wait() == -signal.SIGKILL
    assert (folder / "0.pt").exists()
    assert len(list(folder.glob(".*.part"))) == 1
    assert command(*digits_command(tmp_path)).wait() == 0
    assert same(uninterrupted, records.read(tmp_path / "results" / "digits_madam_12bit+epochs=8" / "0.json"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_before_leaving(number, uninterrupted, tmp_path):
    checkpoint = tmp_path / "runs" / "digits_madam_12bit+epochs=8" / "0.pt"
    process = command(*digits_command(tmp_path), stdout=subprocess.PIPE, text=True)
    wait_for(checkpoint.exists)
    process.send_signal(number)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "1 left" in said
    assert "the same command goes on" in said
    assert not list((tmp_path / "results").glob("*/*.json"))
    assert command(*digits_command(tmp_path)).wait() == 0
    assert same(uninterrupted, records.read(tmp_path / "results" / "digits_madam_12bit+epochs=8" / "0.json"))


def test_a_queue_stops_in_time_goes_on_and_never_repeats_a_record(tmp_path):
    three = [small("digits_sgd"), small("digits_adam"), small("digits_madam")]
    arguments = {"results": tmp_path / "r", "folder": tmp_path / "runs", "quiet": True, "say": lambda line: None}
    outcome = queue.work(three, [0, 1], budget=0.0, **arguments)
    assert len(outcome.left) == 6
    assert outcome.left[0] == "digits_sgd seed 0"
    outcome = queue.work(three, [0], **arguments)
    assert len(outcome.done) == 3
    stamps = {p: p.stat().st_mtime_ns for p in (tmp_path / "r").glob("*/*.json")}
    outcome = queue.work(three, [0, 1], **arguments)
    assert outcome.skipped == ["digits_sgd seed 0", "digits_adam seed 0", "digits_madam seed 0"]
    assert len(outcome.done) == 3
    assert all(p.stat().st_mtime_ns == t for p, t in stamps.items())


def test_seeds_differ_and_repeat(tmp_path):
    results = []
    for folder, seed in (("a", 0), ("b", 0), ("c", 1)):
        _, path = run_whole(small(), tmp_path / folder, seed)
        results.append(records.read(path))
    assert same(results[0], results[1])
    assert results[0]["curve"] != results[2]["curve"]


def test_a_loss_that_is_not_finite_ends_the_run_with_a_record_that_says_so(tmp_path):
    recipe = small("digits_sgd", schedule=((0, 1e30),))
    _, path = run_whole(recipe, tmp_path)
    record = records.read(path)
    assert record["status"] == "diverged"
    assert record["test"] is None
    assert len(record["curve"]) < 4
    assert record["curve"][-1]["loss"] is None


def test_the_best_validation_epoch_is_the_one_that_is_tested(tiny, tmp_path):
    recipe = replace(recipes.get("wikitext2_lr_adam_0.1").as_smoke(), epochs=5)
    run = Run(recipe, 0, data=tiny, folder=tmp_path / "runs", results=tmp_path, device=torch.device("cpu"))
    record = run.train(Limits(), Progress("", 1, quiet=True))
    valid = [p["valid"] for p in record["curve"]]
    assert run.best["valid"] == min(valid)
    assert run.best["epoch"] == 1 + valid.index(min(valid))
    run.model.load_state_dict(run.best["model"])
    assert record["test"] == pytest.approx(run.stepper.evaluate("test"))


def test_gradient_clipping_limits_the_norm(tiny, tmp_path):
    recipe = recipes.get("wikitext2_sgd").as_smoke()
    run = Run(recipe, 0, data=tiny, folder=tmp_path / "runs", results=tmp_path, device=torch.device("cpu"))
    before = [p.detach().clone() for p in run.model.parameters()]
    run.stepper.step(next(run.task.epoch(0)))
    moved = math.sqrt(
        sum((a - b.detach()).square().sum().item() for a, b in zip(before, run.model.parameters(), strict=True))
    )
    assert moved == pytest.approx(0.25, rel=1e-3)  # lr = 1


def test_only_full_batches_are_compiled_even_when_a_run_goes_on_with_a_smaller_one(tiny, tmp_path, monkeypatch):
    compiled = []

    def compile_(function, **_):
        def counted(batch):
            compiled.append(len(batch[0]))
            return function(batch)

        return counted

    monkeypatch.setattr(torch, "compile", compile_)
    recipe = recipes.get("cifar10_sgd").as_smoke()
    run = Run(recipe, 0, data=tiny, folder=tmp_path / "runs", results=tmp_path / "results", compiled=True)
    run.step = run.task.steps - 1  # the last batch of an epoch comes first
    run.train(Limits(), Progress("", recipe.epochs, quiet=True))
    assert compiled == [recipe.batch] * (run.task.steps - 1)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("name", "own"), [("cifar10_madam_12bit", torch.bfloat16), ("digits_madam", torch.float32)])
def test_a_cpu_computes_in_a_recipes_precision_where_it_compiles(name, own, compiled, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    recipe = recipes.get(name).as_smoke()
    run = Run(
        recipe, 0, data=tiny, folder=tmp_path, results=tmp_path, device=torch.device("cpu"), compiled=compiled or None
    )
    seen = []
    last = [m for m in run.model.modules() if isinstance(m, torch.nn.Linear)][-1]
    last.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    run.stepper.step(next(iter(run.task.epoch(0))))
    assert seen == [own if compiled else torch.float32]
    assert [group["compile"] for group in run.optimiser.param_groups] == [compiled]


@needs_a_compiler
def test_a_compiled_run_that_stops_goes_on_as_if_it_had_not_and_says_that_it_was_compiled(tmp_path):
    recipe = small()
    whole = records.read(run_whole(recipe, tmp_path / "whole", compiled=True)[1])
    assert whole["device"] == "CPU, compiled"

    def going_on(compiled, limits):
        run = Run(recipe, 0, folder=tmp_path / "runs", results=tmp_path, device=torch.device("cpu"), compiled=compiled)
        return run.train(limits, Progress("", 1, quiet=True))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(Stopped):
            going_on(True, StopAfter(7))
        with pytest.raises(ValueError, match="go on with it"):
            going_on(False, Limits())
        assert same(whole, going_on(True, Limits()))


def checkpoint_of(recipe, folder, change):
    """A run that was stopped, with its saved state changed."""
    begun = Run(recipe, 0, folder=folder / "runs", results=folder, device=CPU)
    with pytest.raises(Stopped):
        begun.train(StopAfter(3), Progress("", 1, quiet=True))
    state = torch.load(begun.checkpoint, weights_only=True)
    change(state)
    torch.save(state, begun.checkpoint)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_checkpoint_from_before_runs_said_where_they_were_goes_on_as_it_was_begun(compiled, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(trainer, "_require_a_compiler", lambda: None)
    recipe = small("digits_sgd")

    def older(state):
        del state["devices"]
        if compiled:
            state["compiled"] = True

    checkpoint_of(recipe, tmp_path, older)
    other = Run(recipe, 0, folder=tmp_path / "runs", results=tmp_path, device=CPU, compiled=not compiled)
    with pytest.raises(ValueError, match="begun with --compile" if compiled else "without --compile"):
        other.train(Limits(), Progress("", 1, quiet=True))
    same_way = Run(recipe, 0, folder=tmp_path / "runs", results=tmp_path, device=CPU, compiled=compiled)
    record = same_way.train(Limits(), Progress("", 1, quiet=True))
    assert record["device"] == ("CPU, compiled" if compiled else "CPU")


def test_a_checkpoint_of_a_gpu_that_did_not_say_so_is_one(tmp_path):
    def older(state):
        del state["devices"]
        state["random_cuda"] = [torch.zeros(16, dtype=torch.uint8)]

    recipe = small("digits_sgd")
    checkpoint_of(recipe, tmp_path, older)
    run = Run(recipe, 0, folder=tmp_path / "runs", results=tmp_path, device=CPU)
    assert run.train(Limits(), Progress("", 1, quiet=True))["device"] == "a GPU, then CPU"


@pytest.mark.parametrize(("name", "changed"), [("digits_sgd", {}), ("digits_adam", {"capturable": True})])
def test_a_run_that_goes_on_elsewhere_has_the_optimiser_of_that_place(name, changed, tmp_path, monkeypatch):
    """As on a GPU, where the learning rate is a tensor that a captured graph reads."""
    recipe = small(name)
    checkpoint_of(recipe, tmp_path, lambda state: None)
    run = Run(recipe, 0, folder=tmp_path / "runs", results=tmp_path, device=CPU)
    (group,) = run.optimiser.param_groups
    group |= {"lr": torch.tensor(0.5), "fused": True, **changed}
    run._restore()
    (group,) = run.optimiser.param_groups
    assert isinstance(group["lr"], torch.Tensor)
    assert group["fused"]
    assert all(group[key] == value for key, value in changed.items())
    lr = group["lr"]
    run.stepper.set_lr(0.25)
    assert lr == 0.25


@pytest.mark.parametrize("compiled", [False, True])
def test_a_run_may_go_on_on_another_kind_of_device_and_its_record_names_both(compiled, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(trainer, "_require_a_compiler", lambda: None)
    recipe = small("digits_sgd")
    checkpoint_of(recipe, tmp_path, lambda state: state.update(devices=["NVIDIA H200"]))
    run = Run(recipe, 0, folder=tmp_path / "runs", results=tmp_path, device=CPU, compiled=compiled)
    own = "CPU, compiled" if compiled else "CPU"
    assert run.train(Limits(), Progress("", 1, quiet=True))["device"] == f"NVIDIA H200, then {own}"


def test_the_command_line_compiles_networks_and_optimisers_where_it_is_told_to(tmp_path, monkeypatch):
    compiled, fused, evaluated = [], [], []
    monkeypatch.setattr(torch, "compile", lambda function, **_: compiled.append(function) or function)
    monkeypatch.setattr(trainer, "_require_a_compiler", lambda: None)
    scores = Stepper.scores
    real = torch.nn.functional.cross_entropy

    def looked_at(stepper, splits):
        fused.append(stepper.optimiser.defaults["fused"])
        with monkeypatch.context() as inner:
            inner.setattr(
                torch.nn.functional, "cross_entropy", lambda x, *a, **k: evaluated.append(x.dtype) or real(x, *a, **k)
            )
            return scores(stepper, splits)

    monkeypatch.setattr(Stepper, "scores", looked_at)
    for how in ([], ["--compile"]):
        places = ["--results", f"{tmp_path}/{len(how)}", "--runs", f"{tmp_path}/runs{len(how)}"]
        settings = ["--set", "precision=bf16", "--set", "epochs=1"]
        assert main(["run", "digits_sgd", *how, *settings, *places, "--device", "cpu", "--quiet"]) == 0
    assert len(compiled) == 1
    assert fused[0] is None
    assert fused[-1] is True
    assert set(evaluated) == {torch.float32, torch.bfloat16}
    devices = [records.read(path)["device"] for path in sorted(tmp_path.glob("[01]/*/0.json"))]
    assert devices == ["CPU", "CPU, compiled"]


def test_compiling_without_a_compiler_and_compiling_studies_end_in_a_line(monkeypatch, capsys, tmp_path):
    from torch._inductor.exc import InvalidCxxCompiler

    def none():
        raise InvalidCxxCompiler

    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", none)
    places = ["--results", str(tmp_path), "--runs", str(tmp_path / "runs"), "--device", "cpu"]
    assert main(["run", "digits_sgd", "--compile", *places]) == 1
    assert "install g++" in capsys.readouterr().err
    assert main(["run", "breakdown_tanh", "--compile", *places]) == 1
    assert "breakdown_tanh is a study" in capsys.readouterr().err
    assert not list(tmp_path.glob("*/*.json"))


def test_a_checkpoint_of_other_settings_is_refused(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = Run(small(), 0, folder=tmp_path, results=tmp_path, device=torch.device("cpu"))
        with pytest.raises(Stopped):
            run.train(StopAfter(3), Progress("", 1, quiet=True))
        other = Run(replace(small(), batch=64), 0, folder=tmp_path, results=tmp_path, device=torch.device("cpu"))
        with pytest.raises(ValueError, match="begun with other settings"):
            other.train(Limits(), Progress("", 1, quiet=True))


def test_codes_are_looked_at_before_during_and_after_training(tmp_path):
    _, path = run_whole(small(), tmp_path)
    codes = records.read(path)["codes"]
    assert [c["epoch"] for c in codes] == [0, 1, 2, 4]
    assert all(sum(c["histogram"]) == pytest.approx(1.0, abs=1e-3) for c in codes)


# ---- records


@pytest.fixture
def record(tmp_path):
    _, path = run_whole(small(), tmp_path / "made")
    return records.read(path)


def test_a_record_has_everything_needed_to_trust_it(record):
    assert len(record["commit"]) == 40
    assert isinstance(record["dirty"], bool)
    assert record["versions"]["torch"] == str(torch.__version__)
    assert record["device"] == "CPU"
    assert record["seconds"] > 0
    assert record["weights"] == 26_122
    assert record["bytes"]["float32"] == 4 * 26_122
    assert record["bytes"]["weights"] == pytest.approx(26_122, rel=0.01)  # signed 8-bit: a byte a weight
    assert record["source"] == records.source_hash(Path(records.__file__).parents[1])


def test_a_record_is_written_once(record, tmp_path):
    records.write(record, tmp_path)
    with pytest.raises(FileExistsError, match="written once"):
        records.write(record, tmp_path)
    assert os.listdir(tmp_path / record["recipe"]) == ["0.json"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda r: r.pop("commit"), "missing"),
        (lambda r: r.update(note="better than it looks"), "unknown"),
        (lambda r: r.update(test="2.5"), "test is '2.5'"),
        (lambda r: r.update(test=None), "has a result"),
        (lambda r: r.update(seed=True), "seed is True"),
        (lambda r: r.update(schema=2), "its schema is 2"),
        (lambda r: r.update(status="great"), "finished or diverged"),
        (lambda r: r["curve"].append({"epoch": 1}), "a point of the curve"),
        (lambda r: r["curve"][0].update(loss="low"), "which is no number"),
        (lambda r: r.update(test=0.5 * r["test"]), "its curve ends at"),
        (lambda r: r.update(bytes={}), "bytes is"),
        (lambda r: r.update(codes=[1]), "no histogram"),
        (lambda r: r["settings"].update(ladder="signed8"), "the ladder is"),
        (lambda r: r.update(weights=0), "positive"),
    ],
)
def test_a_record_that_is_not_whole_is_refused(record, change, says, tmp_path):
    change(record)
    with pytest.raises(records.RecordError, match=says):
        records.write(record, tmp_path)
    path = tmp_path / "digits_madam_signed8" / "0.json"
    path.parent.mkdir()
    path.write_text(json.dumps(record))
    with pytest.raises(records.RecordError, match=says):
        records.read(path)


def test_a_moved_record_is_noticed(record, tmp_path):
    path = records.write(record, tmp_path)
    other = tmp_path / "cifar10_madam" / "0.json"
    other.parent.mkdir()
    path.rename(other)
    with pytest.raises(records.RecordError, match="it was moved"):
        records.read(other)


def test_the_commit_comes_from_the_environment_else_from_git_else_it_is_unknown(monkeypatch):
    monkeypatch.setenv("MADAM_COMMIT", "abc123")
    assert records._commit() == ("abc123", False)
    monkeypatch.setenv("MADAM_COMMIT", "abc123-dirty")
    assert records._commit() == ("abc123", True)
    monkeypatch.delenv("MADAM_COMMIT")
    answers = {"rev-parse": b"def456\n", "status": b" M src/x.py\n", "ls-files": b"records.py\n"}
    monkeypatch.setattr(records, "_git", lambda *a: answers[a[0]])
    assert records._commit() == ("def456", True)
    answers["status"] = b""
    assert records._commit() == ("def456", False)

    def no_git(*arguments):
        raise FileNotFoundError("git")

    monkeypatch.setattr(records, "_git", no_git)
    assert records._commit() == ("unknown", True)


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_code_is_found_again_in_the_history_by_its_hash(monkeypatch, tmp_path):
    source = tmp_path / "src" / "torchmadam" / "kernels"
    source.mkdir(parents=True)

    def git(*arguments):
        identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        command = ["git", *identity, *arguments]
        return subprocess.run(command, cwd=tmp_path / "src", capture_output=True, check=True).stdout

    git("init", "-q")
    hashes = []
    for python, c in (("a = 1", "int a;"), ("a = 2", "int a;"), ("a = 2", "int b;")):
        (source / "x.py").write_text(python)
        (source / "x.c").write_text(c)
        (source / "notes.txt").write_text(python + c)
        git("add", "-A")
        git("commit", "-qm", python)
        hashes.append(records.source_hash(tmp_path / "src"))
    assert len(set(hashes)) == 3
    monkeypatch.setattr(records, "_git", git)
    records.commit_with.cache_clear()
    newest, second, first = git("rev-list", "HEAD").decode().split()
    assert [records.commit_with(h) for h in (*hashes, "0" * 16)] == [first, second, newest, None]
    of_python = records._hashed({"torchmadam/kernels/x.py": b"a = 1"})  # as the first records have it
    assert records.commit_with(of_python) == first
    records.commit_with.cache_clear()


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_record_is_not_held_against_a_history_that_is_not_there(monkeypatch, tmp_path):
    def git(*arguments, cwd=tmp_path):
        return subprocess.run(["git", *arguments], cwd=cwd, capture_output=True, check=True).stdout

    git("init", "-q", "whole")
    (tmp_path / "whole" / "records.py").write_text("")
    git("add", "-A", cwd=tmp_path / "whole")
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    for message in ("one", "two"):
        git(*identity, "commit", "-qm", message, "--allow-empty", cwd=tmp_path / "whole")
    git("clone", "-q", "--depth", "1", (tmp_path / "whole").as_uri(), "shallow")
    (tmp_path / "none").mkdir()
    changed = {"dirty": True, "source": "0" * 16}
    for folder, knows in (("whole", True), ("shallow", False), ("none", False)):
        at = tmp_path / folder
        monkeypatch.setattr(records, "__file__", str(at / "records.py"))
        monkeypatch.setattr(records, "_git", lambda *arguments, at=at: git(*arguments, cwd=at))
        records.knows_commits.cache_clear()
        records.commit_with.cache_clear()
        assert records.knows_commits() == knows
        assert is_traceable(changed) == (not knows)
        assert not is_traceable({"dirty": True, "source": "mixed"})
    records.knows_commits.cache_clear()
    records.commit_with.cache_clear()


def test_a_run_that_other_code_began_is_marked(monkeypatch, tmp_path):
    recipe = replace(recipes.get("digits_madam"), epochs=2)

    class AfterAStep(Limits):
        looks = 0

        def reached(self):
            self.looks += 1
            return self.looks > 1

    def run():
        return Run(recipe, 0, folder=tmp_path / "runs", results=tmp_path, device=torch.device("cpu"))

    with pytest.raises(Stopped):
        run().train(AfterAStep(), Progress("", 2, quiet=True))
    now = records.provenance()
    monkeypatch.setattr(records, "provenance", lambda: {**now, "dirty": False, "source": "f" * 16})
    record = run().train(Limits(), Progress("", 2, quiet=True))
    assert (record["source"], record["dirty"]) == ("mixed", True)


def test_a_damaged_checkpoint_says_so(tmp_path):
    recipe = replace(recipes.get("digits_madam"), epochs=2)
    run = Run(recipe, 0, folder=tmp_path / "runs", results=tmp_path, device=torch.device("cpu"))
    run._save()
    whole = run.checkpoint.read_bytes()
    for content in (b"PK nothing", b"\xff\xfe\xff\xfe" + whole[4:], whole[:500], b""):
        run.checkpoint.write_bytes(content)
        with pytest.raises(ValueError, match="is damaged; remove it"):
            run.train(Limits(), Progress("", 2, quiet=True))


def test_a_checkpoint_that_cannot_be_opened_is_not_called_damaged(tmp_path):
    """Nobody should remove a run's state because a disk was away."""
    run = Run(small("digits_sgd"), 0, folder=tmp_path / "runs", results=tmp_path, device=torch.device("cpu"))
    run.checkpoint.mkdir(parents=True)  # which nobody may read as a file, root included
    with pytest.raises(IsADirectoryError):
        run.train(Limits(), Progress("", 2, quiet=True))


def test_a_run_that_another_process_is_at_is_left_alone(tmp_path):
    fcntl = pytest.importorskip("fcntl")
    recipe = replace(recipes.get("digits_madam"), epochs=1)
    lock = tmp_path / "runs" / recipe.name / "0.lock"
    lock.parent.mkdir(parents=True)
    said = []
    arguments = {"results": tmp_path, "folder": tmp_path / "runs", "quiet": True, "say": said.append}
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        outcome = queue.work([recipe], [0], **arguments)
    assert outcome.left == ["digits_madam seed 0"]
    assert "another process" in said[0]
    assert queue.work([recipe], [0], **arguments).done == ["digits_madam seed 0"]
    assert not lock.exists()


def test_a_lock_that_its_owner_removes_between_opening_and_locking_is_not_ours(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")
    path = tmp_path / "0.lock"
    others = []

    def slow(file, how):
        if not others:  # as if another process had it, removed it, and a third one made the next
            path.unlink()
            others.append(path.open("w"))
            flock(others[0], how)
        flock(file, how)

    flock = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", slow)
    with queue._claim(path) as ours:
        assert not ours
    others[0].close()
    with queue._claim(path) as ours:
        assert ours
    assert not path.exists()


def test_a_record_that_could_not_be_written_fails_before_its_run(tmp_path, monkeypatch):
    (tmp_path / "digits_madam").write_text("a file where the record's folder should be")
    monkeypatch.setattr(queue, "Run", lambda *_, **__: pytest.fail("a run began"))
    with pytest.raises(OSError, match="digits_madam"):
        queue.work([recipes.get("digits_madam")], [0], results=tmp_path, folder=tmp_path / "runs", quiet=True)


def test_a_run_that_took_too_long_to_begin_makes_no_step(tmp_path):
    run = Run(small("digits_sgd"), 0, folder=tmp_path / "runs", results=tmp_path, device=torch.device("cpu"))
    with pytest.raises(Stopped):
        run.train(Limits(deadline=time.monotonic()), Progress("", 2, quiet=True))
    assert run.step == 0
