"""Photographs: trees with every fault, crops on the device, the cache, ResNet-50 and its recipes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from madam_lab import pictures, queue, recipes, records
from madam_lab.cli import main
from madam_lab.models.resnet50 import ResNet50
from madam_lab.pictures import Ragged, TreeError
from madam_lab.progress import Progress
from madam_lab.tasks import TASKS, imagenet
from madam_lab.tasks.imagenet import cropped, middle_boxes, random_boxes
from madam_lab.trainer import Limits, Run, Stopped
from torchmadam import LadderFormat

CPU = torch.device("cpu")


def image(size, mode="RGB", seed=0):
    """A picture that Pillow can write."""
    pil = pytest.importorskip("PIL.Image")
    channels = {"RGB": 3, "CMYK": 4, "L": 0}[mode]
    shape = (size[1], size[0], channels) if channels else (size[1], size[0])
    return pil.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8), mode=mode)


@pytest.fixture
def tree(tmp_path):
    """A sound tree, in PNG so that nothing is lost: three classes, of seven pictures and four for validation."""
    root = tmp_path / "data"
    for split, count in (("train", 7), ("val", 4)):
        for label, name in enumerate(("n01", "n02", "n03")):
            folder = root / "imagenette" / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # Pillow means to drop mode=
                    image((40 + 3 * i, 45 - i), seed=100 * label + i).save(folder / f"{i}.png")
    return root


def task(root, name="imagenette", batch=6, **arguments):
    return TASKS[name](root, CPU, batch=batch, seed=0, smoke=True, **arguments)


# ---- the network and its recipes


def test_resnet50_has_torchvisions_weights_by_number_and_by_name():
    with torch.device("meta"):
        whole, bare = ResNet50(), ResNet50(affine=False)
    names = dict(whole.named_parameters())
    assert sum(p.numel() for p in names.values()) == 25_557_032
    assert sum(p.numel() for p in bare.parameters()) == 25_557_032 - 53_120
    assert len(names) == 161
    assert names["layer1.0.downsample.0.weight"].shape == (256, 64, 1, 1)
    assert names["layer4.2.bn3.bias"].shape == (2048,)
    assert names["fc.weight"].shape == (1000, 2048)
    assert ResNet50(3, width=2, stages=(1, 1, 1, 1))(torch.randn(2, 3, 32, 32)).shape == (2, 3)


def test_zeros_begin_elsewhere_where_the_recipe_says_so(tiny):
    zeros = lambda model: [n for n, p in model.named_parameters() if not p.any()]  # noqa: E731
    assert zeros(task(tiny).model())
    moved = task(tiny, zeros=0.2).model()
    assert not zeros(moved)
    biases = torch.cat([p.detach() for n, p in moved.named_parameters() if n.endswith("bias") and "fc" not in n])
    assert float(biases.std()) == pytest.approx(0.2, rel=0.3)
    assert not [n for n, _ in task(tiny, affine=False).model().named_parameters() if "bn" in n]


@pytest.mark.parametrize(
    ("name", "rates", "ladder"),
    [
        ("imagenet_sgd", [0.1, 0.01, 0.001], None),
        ("imagenet_adam", [1e-3, 1e-4, 1e-5], None),
        ("imagenet_madam", [0.01, 0.001, 0.0001], None),
        ("imagenet_madam_12bit", [0.016, 0.004, 0.001], LadderFormat.paper(levels=2048, spacing=0.001)),
        ("imagenet_madam_10bit", [0.016, 0.004, 0.004], LadderFormat.paper(10)),
        ("imagenet_madam_8bit", [0.016, 0.016, 0.016], LadderFormat.paper(8)),
        ("imagenette_madam_12bit", [0.016, 0.004, 0.001], LadderFormat.paper(12)),
    ],
)
def test_recipes_state_the_papers_schedule_and_warm_up(name, rates, ladder):
    recipe = recipes.get(name)
    assert recipe.epochs == 90
    assert [recipe.lr_at(e) for e in (29.9, 30, 59.9, 60)] == pytest.approx([rates[0], rates[1], rates[1], rates[2]])
    climbing = [recipe.lr_at(e) for e in (0, 2.5, 5)]
    assert climbing == pytest.approx([rates[0]] * 3 if ladder else [0, rates[0] / 2, rates[0]])
    assert recipe.ladder == ladder
    assert recipe.model.get("zeros") == (0.2 if recipe.optimiser == "madam" else None)


def test_records_from_before_warm_up_and_scales_have_the_same_settings():
    settings = recipes.get("cifar10_madam").settings()
    assert not {"warm_up", "scales"} & settings.keys()
    assert recipes.get("imagenet_sgd").settings()["warm_up"] == 5


# ---- crops


def gradient(height, width):
    """Every pixel knows where it came from: row in red, column in green."""
    picture = torch.zeros(height, width, 3, dtype=torch.uint8)
    picture[..., 0] = torch.arange(height).view(-1, 1)
    picture[..., 1] = torch.arange(width)
    return picture


def ragged(*drawn):
    sizes = torch.tensor([p.shape[:2] for p in drawn])
    areas = sizes.prod(1)
    return Ragged(torch.cat([p.reshape(-1, 3) for p in drawn]), areas.cumsum(0) - areas, sizes, torch.zeros(len(drawn)))


def test_a_box_of_the_crops_own_size_is_copied_and_mirrored():
    held = ragged(gradient(9, 7), gradient(20, 30))
    boxes = torch.tensor([[2.0, 1.0, 5.0, 5.0], [15.0, 25.0, 5.0, 5.0]])
    out = cropped(held, boxes, torch.tensor([False, True]), 5)
    assert torch.equal(out[0], gradient(9, 7)[2:7, 1:6].float())
    assert torch.equal(out[1], gradient(20, 30)[15:, 25:].flip(1).float())


def test_scaling_is_bilinear_between_middles_of_pixels_and_never_leaves_the_picture():
    held = ragged(torch.full((6, 8, 3), 255, dtype=torch.uint8), gradient(40, 50))
    whole = torch.tensor([[0.0, 0.0, 6.0, 8.0], [0.0, 0.0, 40.0, 50.0]])
    out = cropped(held, whole, torch.tensor([False, False]), 10)
    assert (out[0] == 255).all()  # nothing of a neighbour
    expected = torch.nn.functional.interpolate(
        gradient(40, 50).permute(2, 0, 1)[None].float(), (10, 10), mode="bilinear", align_corners=False
    )
    torch.testing.assert_close(out[1], expected[0].permute(1, 2, 0), atol=1e-3, rtol=0)


def test_random_boxes_have_the_papers_areas_and_aspects_and_lie_inside():
    g = torch.Generator().manual_seed(0)
    sizes = torch.randint(100, 400, (20_000, 2), generator=g)
    boxes = random_boxes(sizes, torch.rand(20_000, 4, generator=g))
    top, left, tall, wide = boxes.unbind(1)
    assert (top >= -1e-3).all()
    assert (left >= -1e-3).all()
    assert (top + tall <= sizes[:, 0] + 1e-2).all()
    assert (left + wide <= sizes[:, 1] + 1e-2).all()
    aspect = wide / tall
    assert float(aspect.min()) >= 0.8 - 1e-3
    assert float(aspect.max()) <= 1.25 + 1e-3
    area = tall * wide / sizes.prod(1)
    square = (sizes[:, 0] - sizes[:, 1]).abs() < 5
    assert float(area[square].min()) < 0.12
    assert float(area[square].max()) > 0.9
    assert float(area.min()) > 0.0999 * 0.25  # even of the longest pictures


def test_evaluation_cuts_224_of_256_out_of_the_middle():
    boxes = middle_boxes(torch.tensor([[256, 341], [300, 256], [128, 128]]), 224, 256)
    assert boxes.tolist() == [[16, 58, 224, 224], [38, 16, 224, 224], [8, 8, 112, 112]]


# ---- trees


def test_a_cache_gives_the_batches_of_the_tree_it_was_made_from(tree):
    from_tree = task(tree, batch=5)
    expected = [*from_tree.epoch(3), *from_tree.batches("test")]
    tally = pictures.write_cache(tree / "imagenette", tree / "imagenette-cache", 40, say=lambda line: None)
    assert tally.counts == {"ignored": 0}
    from_cache = task(tree, batch=5)
    assert from_cache._held
    assert not from_tree._held
    for a, b in zip(expected, [*from_cache.epoch(3)], strict=False):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_workers_decode_what_the_main_process_would(tree, monkeypatch):
    monkeypatch.setenv("MADAM_WORKERS", "2")
    alone, helped = task(tree), task(tree)
    helped.smoke = False
    for a, b in zip(alone.epoch(1), helped.epoch(1), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_ranks_share_every_batch(tree):
    whole = task(tree, batch=6)
    shares = [task(tree, batch=6) for _ in range(3)]
    for rank, share in enumerate(shares):
        share.rank, share.ranks = rank, 3
    for batch, *parts in zip(whole.epoch(0), *(share.epoch(0) for share in shares), strict=True):
        for together, *apart in zip(batch, *parts, strict=True):
            assert torch.equal(together, torch.cat(apart))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (
            lambda root: (root / "val").rename(root / "validation"),
            r"val is missing; pictures belong into .*docs/imagenet",
        ),
        (lambda root: [p.unlink() for p in (root / "train" / "n02").iterdir()], "no pictures in the folder n02; fill"),
        (lambda root: [p.unlink() for p in (root / "val" / "n03").iterdir()], "val: no pictures in the folder n03"),
        (lambda root: (root / "val" / "n03").rename(root / "n03"), "val has no class n03; both splits"),
        (lambda root: (root / "val" / "n99").mkdir(), "val has the unknown class n99"),
        (lambda root: (root / "train").rename(root / "x") and (root / "train").mkdir(), "train has no folders"),
    ],
)
def test_a_tree_that_cannot_be_trained_on_says_why_and_what_to_do(spoil, says, tree, capsys):
    spoil(tree / "imagenette")
    with pytest.raises(TreeError, match=says):
        task(tree)
    assert main(["run", "imagenette_sgd", "--smoke", "--data", str(tree), "--results", str(tree), "--runs", str(tree)])
    assert "madam: " in capsys.readouterr().err


def test_a_tree_of_another_number_of_pictures_is_refused_outside_of_smoke_runs(tree):
    with pytest.raises(TreeError, match="21 pictures for training and 12 for validation, and imagenette has 9469"):
        TASKS["imagenette"](tree, CPU, batch=2, seed=0)
    assert TASKS["imagenette"](tree, CPU, batch=2, seed=0, complete=False).steps == 10


def test_a_fingerprint_survives_a_cache_and_one_that_does_not_know_it_has_its_own(tree):
    first = task(tree).fingerprint()
    assert task(tree).fingerprint() == first
    pictures.write_cache(tree / "imagenette", tree / "imagenette-cache", 40, say=lambda line: None)
    assert task(tree).fingerprint() == first
    index = tree / "imagenette-cache" / "index.json"
    about = json.loads(index.read_text())
    del about["tree"]  # which caches did not always note: then the cache's own stands for it
    index.write_text(json.dumps(about))
    own = task(tree).fingerprint()
    assert own not in (first, None)
    assert task(tree).fingerprint() == own
    shutil.rmtree(tree / "imagenette-cache")
    assert task(tree).fingerprint() == first


# Pictures stay in their order, which the fingerprint would notice as well.
@pytest.mark.parametrize(
    "change",
    [
        lambda root: (root / "train" / "n02" / "3.png").rename(root / "train" / "n02" / "3a.png"),
        lambda root: (root / "val" / "n02" / "3.png").rename(root / "val" / "n02" / "3a.png"),
        lambda root: [(root / split / "n02").rename(root / split / "n02a") for split in ("train", "val")],
        lambda root: (root / "train" / "n02" / "3.png").write_bytes(b"of another size"),
        lambda root: (root / "val" / "n02" / "3.png").write_bytes(b"of another size"),
    ],
    ids=["a picture's name", "a name in validation", "a class", "a picture's size", "a size in validation"],
)
def test_a_fingerprint_is_that_of_all_names_and_sizes(change, tree):
    first = task(tree).fingerprint()
    change(tree / "imagenette")
    assert task(tree).fingerprint() != first


@pytest.mark.skipif(sys.platform != "linux", reason="file names are bytes there")
def test_a_picture_may_have_a_name_that_is_not_utf8(tree):
    first = task(tree).fingerprint()
    picture = os.fsencode(tree / "imagenette" / "train" / "n02" / "3.png")
    os.rename(picture, picture.replace(b"3.png", b"\xe9t\xe9.png"))
    assert task(tree).fingerprint() != first


def test_a_run_goes_on_with_the_files_it_began_with_and_its_record_says_which(tree, tmp_path):
    def run():
        recipe = recipes.get("imagenette_sgd").as_smoke()
        return Run(recipe, 0, data=tree, folder=tmp_path, results=tmp_path, device=CPU)

    begun = run()
    with pytest.raises(Stopped):
        begun.train(Limits(deadline=-1.0), Progress("", 1, quiet=True))
    begun._save()
    moved = tree / "imagenette" / "train" / "n02" / "3.png"
    moved.rename(moved.with_name("9.png"))
    with pytest.raises(ValueError, match="begun with other files of imagenette than there are now"):
        run().train(Limits(), Progress("", 1, quiet=True))
    moved.with_name("9.png").rename(moved)
    state = torch.load(begun.checkpoint, weights_only=True)
    del state["data"]  # as it was before checkpoints noted which files they are of
    torch.save(state, begun.checkpoint)
    record = run().train(Limits(), Progress("", 1, quiet=True))
    assert record["data"] == begun.task.fingerprint()
    assert records.read(records.path_of(record["recipe"], 0, tmp_path)) == record


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for a process's children as Linux lists them")
def test_a_signal_to_all_processes_of_a_run_lets_it_save_itself(tree, tmp_path):
    """As timeout and torchrun send it: the workers go on bringing pictures, and the run saves itself."""
    places = ["--device", "cpu", "--data", str(tree), "--runs", str(tmp_path / "u"), "--results", str(tmp_path / "r")]
    settings = [text for each in ("batch=2", "epochs=1000", "model.complete=False") for text in ("--set", each)]
    command = [
        sys.executable,
        "-u",
        "-m",
        "madam_lab",
        "run",
        "imagenette_sgd",
        "--save-every",
        "1h",
        "--device",
        "cpu",
    ]
    with subprocess.Popen(
        [*command, *settings, *places], env={**os.environ, "MADAM_WORKERS": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")

        said = ""
        while "epoch 1/" not in said:
            line = process.stdout.readline()
            assert line, said
            said += line
        signalled = 0
        while signalled < 10 and process.poll() is None:
            before = set(children.read_text().split())
            time.sleep(0.2)  # by now it has begun to work, which it does for an epoch
            for worker in before & set(children.read_text().split()):
                for number in (signal.SIGTERM, signal.SIGINT):
                    os.kill(int(worker), number)
                    signalled += 1
        process.terminate()
        said = process.stdout.read()
    assert process.returncode == 130, said
    assert [path.name for path in (tmp_path / "u").rglob("*.pt")] == ["0.pt"]


CRASH = """
import sys
from madam_lab import cli
from madam_lab.tasks import imagenet
def fail(*_):
    raise RuntimeError("out of memory")
imagenet.cropped = fail
sys.exit(cli.main(sys.argv[1:]))
"""


def test_a_run_that_fails_ends_though_its_workers_ignore_signals(tree, tmp_path):
    places = ["--device", "cpu", "--data", str(tree), "--runs", str(tmp_path / "u"), "--results", str(tmp_path / "r")]
    settings = ["--set", "batch=2", "--set", "model.complete=False"]
    done = subprocess.run(
        [sys.executable, "-c", CRASH, "run", "imagenette_sgd", *settings, *places], capture_output=True, text=True,
        env={**os.environ, "MADAM_WORKERS": "2", "OMP_NUM_THREADS": "1"}, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert "RuntimeError: out of memory" in done.stderr


@pytest.mark.parametrize(("ranks", "cores", "workers"), [("1", 4, 4), ("8", 64, 2), ("8", 4, 1), (None, 64, 16)])
def test_ranks_of_a_machine_share_its_cores_for_decoding(ranks, cores, workers, monkeypatch):
    monkeypatch.delenv("MADAM_WORKERS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert imagenet.workers_here() == workers
    monkeypatch.setenv("MADAM_WORKERS", "3")
    assert imagenet.workers_here() == 3


@pytest.fixture
def faulty(tree):
    """The same with a broken JPEG, half of one, a grey and a CMYK one, a panorama, and a file that is no picture."""
    folder = tree / "imagenette" / "train" / "n01"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        image((60, 50)).save(folder / "cut.jpg", quality=95)
        image((50, 50), "L").save(folder / "grey.jpg")
        image((50, 60), "CMYK").save(folder / "cmyk.jpg")
        image((700, 40)).save(folder / "long.jpg")
    (folder / "cut.jpg").write_bytes((folder / "cut.jpg").read_bytes()[:900])
    (folder / "text.jpeg").write_bytes(b"this is no picture")
    (folder / "Thumbs.db").write_bytes(b"x")
    (tree / "imagenette" / "val" / "n02" / "empty.png").write_bytes(b"")
    return tree


def test_faults_are_counted_and_end_no_run(faulty, tmp_path, monkeypatch):
    recipe = recipes.get("imagenette_madam_8bit").as_smoke().overridden({"batch": 9})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        outcome = queue.work([recipe], [0], data=faulty, results=tmp_path, folder=tmp_path / "runs", quiet=True)
    assert outcome.done
    told = " ".join(str(w.message) for w in said if "left out" in str(w.message))
    assert "cut.jpg" in told
    assert "text.jpeg" in told
    assert "empty.png" in told
    record = records.read(records.path_of(recipe.name, 0, tmp_path))
    for point in record["curve"]:
        # 25 of 26 pictures make two batches of nine a smoke run, so not all faults are met in every epoch.
        assert point["broken"] >= 1
    assert sum(point.get("grey", 0) for point in record["curve"]) >= 1
    assert sum(point.get("other", 0) for point in record["curve"]) >= 1


def test_broken_pictures_are_replaced_in_training_and_left_out_of_evaluation(faulty):
    held = task(faulty, batch=13)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert [len(y) for _, y in held.epoch(0)] == [13, 13]
        assert held.notes()["broken"] == 2
        assert sum(len(y) for _, y in held.batches("test")) == 12


def test_parts_of_a_batch_make_the_batch_and_stand_in_for_each_other(faulty, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = [*task(faulty, batch=13).epoch(0), *task(faulty, batch=13).batches("test")]
        monkeypatch.setattr(imagenet, "_PART", 1)  # so that some parts are all broken
        for a, b in zip(
            whole, [*task(faulty, batch=13).epoch(0), *task(faulty, batch=13).batches("test")], strict=True
        ):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_batch_of_broken_pictures_is_left_out_of_evaluation_and_a_broken_split_is_refused(tree, monkeypatch):
    monkeypatch.setattr(imagenet, "_EVALUATION_BATCH", 4)
    for path in sorted((tree / "imagenette" / "val" / "n01").iterdir()):
        path.write_bytes(b"")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert [len(y) for _, y in task(tree).batches("test")] == [4, 4]
        for path in sorted((tree / "imagenette" / "val").rglob("*.png")):
            path.write_bytes(b"")
        with pytest.raises(TreeError, match=r"none of the 12 pictures in .*val can be read"):
            task(tree)


def test_hidden_files_are_no_pictures(tree):
    folder = tree / "imagenette" / "train" / "n01"
    (folder / ".ipynb_checkpoints").mkdir()
    for name in ("._0.png", ".ipynb_checkpoints/1-checkpoint.png"):
        (folder / name).write_bytes((folder / "0.png").read_bytes())
    found = pictures.listed(tree / "imagenette")
    assert len(found.files["train"]) == 21
    assert found.ignored == 2


def test_sixteen_bits_of_grey_become_eight(tmp_path):
    pil = pytest.importorskip("PIL.Image")
    values = np.arange(0, 65536, 16, dtype=np.uint16).reshape(64, 64)
    pil.fromarray(values).save(tmp_path / "deep.png")
    tally = pictures.Tally()
    found = pictures.decoded(tmp_path / "deep.png", 64, tally)
    assert found is not None
    assert torch.equal(found[:, :, 0], torch.from_numpy((values // 257).astype(np.uint8)))
    assert tally.counts == {"grey": 1}


def test_a_grey_picture_that_is_cut_off_is_broken_and_nothing_else(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        image((60, 50), "L").save(tmp_path / "cut.jpg", quality=95)
    (tmp_path / "cut.jpg").write_bytes((tmp_path / "cut.jpg").read_bytes()[:900])
    tally = pictures.Tally()
    assert pictures.decoded(tmp_path / "cut.jpg", 40, tally) is None
    assert tally.counts == {"broken": 1}


def test_a_cache_has_the_size_that_its_task_wants_or_is_refused(tree, capsys):
    assert main(["cache", "imagenette", "--data", str(tree)]) == 0
    assert json.loads((tree / "imagenette-cache" / "index.json").read_text())["short"] == 128
    assert main(["cache", "imagenette", "--data", str(tree), "--short", "30"]) == 0
    with pytest.raises(TreeError, match="were scaled down to 30 pixels, and 40 are wanted; make it again"):
        task(tree)


def test_a_cache_leaves_faults_out_and_says_how_many(faulty, capsys):
    assert main(["cache", "imagenette", "--data", str(faulty), "--short", "40"]) == 0
    said = capsys.readouterr().out
    assert "ignored: 1" in said
    assert "broken: 3" in said
    assert "grey: 1" in said
    assert "other: 1" in said
    index = json.loads((faulty / "imagenette-cache" / "index.json").read_text())
    assert index["listed"] == {"train": 26, "val": 13}
    sizes = [tuple(size) for part in index["parts"]["train"] for size in part["sizes"]]
    assert len(sizes) == 24
    assert (40, 120) in sizes  # the panorama's middle
    assert all(min(size) <= 40 for size in sizes)


def test_a_cache_comes_in_parts_and_notices_damage(tree, monkeypatch):
    monkeypatch.setattr(pictures, "PART", 20_000)
    pictures.write_cache(tree / "imagenette", tree / "imagenette-cache", 40, say=lambda line: None)
    parts = sorted((tree / "imagenette-cache").glob("train-*.npy"))
    assert len(parts) > 3
    assert all(path.stat().st_size < 20_200 for path in parts)
    _, splits, listed, _ = pictures.read_cache(tree / "imagenette-cache")
    assert len(splits["train"].labels) == listed["train"] == 21
    assert len(splits["train"].pixels) == int(splits["train"].sizes.prod(1).sum())
    blob = bytearray(parts[1].read_bytes())
    blob[500] ^= 1
    parts[1].write_bytes(blob)
    with pytest.raises(TreeError, match=r"train-001.npy is damaged\); make it again with `madam cache`"):
        task(tree)


def test_without_pillow_a_tree_says_what_to_install_and_a_cache_works(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "has_pillow", lambda: False)
    (tmp_path / "imagenet").mkdir()
    with pytest.raises(TreeError, match=r"needs Pillow: pip install 'torchmadam\[imagenet\]', or make the cache"):
        task(tmp_path, "imagenet")
    with pytest.raises(TreeError, match="needs Pillow"):
        pictures.write_cache(tmp_path, tmp_path, 40)
    assert next(task(tiny).epoch(0))[0].shape == (6, 3, 32, 32)


def test_a_run_saves_itself_after_every_epoch_of_imagenet(tiny, tmp_path, monkeypatch):
    assert TASKS["imagenet"].saves_epochs
    assert not TASKS["imagenette"].saves_epochs  # whose epochs take a second
    monkeypatch.setattr(TASKS["imagenette"], "saves_epochs", True)
    run = Run(recipes.get("imagenette_sgd").as_smoke(), 0, data=tiny, folder=tmp_path, results=tmp_path, device=CPU)
    seen = []

    class Watching(Progress):
        def step(self, done):
            seen.append((done, run.checkpoint.exists()))

    run.train(Limits(save_every=1e9), Watching("", 1, quiet=True))
    assert [there for done, there in seen if done <= 1] == [False, False]
    assert all(there for done, there in seen if done > 1)


def test_imagenette_says_everywhere_that_it_is_not_imagenet(tiny, tmp_path):
    assert "not ImageNet" in TASKS["imagenette"].metric
    assert recipes.get("imagenette_madam").paper is None
    assert recipes.get("imagenet_madam").paper is not None
