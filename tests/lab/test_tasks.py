"""Readers, augmentation and metrics."""

import pickle

import numpy as np
import pytest
import torch

from madam_lab.data import DataError
from madam_lab.models.resnet import ResNet18
from madam_lab.models.transformer import WordTransformer
from madam_lab.tasks import TASKS
from madam_lab.tasks.cifar import augmented, read_batch
from madam_lab.tasks.task import error_percent, perplexity
from madam_lab.tasks.wikitext import read_words

CPU = torch.device("cpu")


def test_models_have_the_papers_number_of_weights():
    count = lambda model: sum(p.numel() for p in model.parameters())  # noqa: E731
    with torch.device("meta"):
        assert count(ResNet18(10, affine=False)) == 11_164_362
        assert count(ResNet18(100, affine=False)) == 11_210_532
    assert count(WordTransformer(33_278)) == 13_828_478


def test_the_transformer_does_not_look_ahead():
    torch.manual_seed(0)
    model = WordTransformer(30, width=8, hidden=8).eval()
    words = torch.randint(30, (9, 2))
    changed = words.clone()
    changed[5:] = (changed[5:] + 1) % 30
    before, after = model(words), model(changed)
    torch.testing.assert_close(before[:5], after[:5])
    assert not torch.allclose(before[5:], after[5:])


# ---- CIFAR


def test_cifar_reads_the_official_layout_in_either_pickle_protocol(tiny):
    images, labels = read_batch(tiny / "cifar-10-batches-py" / "data_batch_1", b"labels", "cifar10", 10)
    raw = pickle.loads((tiny / "cifar-10-batches-py" / "data_batch_1").read_bytes())
    assert images.shape == (9, 32, 32, 3)
    assert labels.tolist() == raw[b"labels"]
    assert images[3, 5, 7, 2] == raw[b"data"][3].reshape(3, 32, 32)[2, 5, 7]
    assert len(read_batch(tiny / "cifar-10-batches-py" / "test_batch", b"labels", "cifar10", 10)[0]) == 9


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        import os

        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_a_hostile_pickle_is_refused_and_does_nothing(tmp_path, protocol):
    path = tmp_path / "data_batch_1"
    path.write_bytes(pickle.dumps({b"data": Evil(tmp_path / "evil"), b"labels": []}, protocol=protocol))
    with pytest.raises(DataError, match=r"only arrays of bytes are read.*madam data cifar10"):
        read_batch(path, b"labels", "cifar10", 10)
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda blob: blob[: len(blob) // 2],
        lambda blob: b"not a pickle",
        lambda blob: pickle.dumps({b"labels": [1]}),
        lambda blob: pickle.dumps({b"labels": [1], b"data": np.zeros((2, 3072), np.uint8)}),
        lambda blob: pickle.dumps({b"labels": [1], b"data": np.zeros((1, 3072), np.float32)}),
        lambda blob: pickle.dumps({b"labels": [1], b"data": np.zeros((1, 3000), np.uint8)}),
        lambda blob: pickle.dumps({b"labels": [1], b"data": np.zeros((1, 3072), object)}),
        lambda blob: pickle.dumps({b"labels": [1], b"data": np.asfortranarray(np.zeros((2, 3072), np.uint8))}),
        lambda blob: pickle.dumps({b"fine_labels": [200], b"data": np.zeros((1, 3072), np.uint8)}),
    ],
)
def test_damaged_data_says_which_command_mends_it(damage, tiny, tmp_path):
    path = tmp_path / "train"
    path.write_bytes(damage((tiny / "cifar-100-python" / "train").read_bytes()))
    with pytest.raises(DataError, match=r"cannot be read.*`madam data cifar100` downloads it"):
        read_batch(path, b"fine_labels", "cifar100", 100)


def test_an_array_cannot_be_given_another_type_afterwards(tmp_path):
    """NumPy's own dtype would believe this state, and take the bytes of a file for addresses of objects."""

    class Forged:
        def __reduce__(self):
            return np.dtype, ("u1", False, True), (3, "|", None, ("x",), {"x": (np.dtype("O"), 0)}, 8, 1, 27)

    path = tmp_path / "data_batch_1"
    path.write_bytes(pickle.dumps({b"data": Forged(), b"labels": []}))
    with pytest.raises(DataError, match="cannot be read"):
        read_batch(path, b"labels", "cifar10", 10)


@pytest.mark.parametrize(("name", "says"), [("cifar10", "45 pictures"), ("wikitext2", r"train.txt has \d+ words")])
def test_data_that_is_not_whole_is_refused_outside_of_smoke_runs(name, says, tiny, monkeypatch):
    monkeypatch.undo()  # the tiny sizes
    with pytest.raises(DataError, match=says):
        TASKS[name](tiny, CPU, batch=4, seed=0)


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "wikitext2"])
def test_missing_data_says_which_command_fetches_it(name, tmp_path):
    with pytest.raises(DataError, match=rf"is missing; `madam data {name}` downloads it.*MADAM_DATA"):
        TASKS[name](tmp_path, CPU, batch=4, seed=0)
    with pytest.raises(DataError, match="no folder"):
        TASKS[name](None, CPU, batch=4, seed=0)


def gradient_image():
    """Every pixel knows where it came from: row in red, column in green."""
    image = torch.zeros(1, 32, 32, 3, dtype=torch.uint8)
    image[0, :, :, 0] = torch.arange(32).view(32, 1) + 100
    image[0, :, :, 1] = torch.arange(32).view(1, 32) + 100
    image[..., 2] = 255
    return image


def test_a_crop_moves_the_window_and_fills_with_black():
    out = augmented(gradient_image(), torch.tensor([[-4, 3]]), torch.tensor([False]), None)[0]
    assert torch.all(out[:4] == 0)
    assert torch.all(out[:, 29:] == 0)
    assert out[10, 10].tolist() == [106, 113, 255]


def test_a_flip_mirrors_columns():
    out = augmented(gradient_image(), torch.zeros(1, 2, dtype=torch.long), torch.tensor([True]), None)[0]
    assert out[10, 3].tolist() == [110, 128, 255]


def test_a_turn_is_about_the_middle_and_nearest():
    quarter = augmented(
        gradient_image(), torch.zeros(1, 2, dtype=torch.long), torch.tensor([False]), torch.tensor([torch.pi / 2])
    )
    assert quarter[0, 0, 0].tolist() in ([100, 131, 255], [131, 100, 255])
    small = augmented(
        gradient_image(), torch.zeros(1, 2, dtype=torch.long), torch.tensor([False]), torch.tensor([0.2])
    )[0]
    assert torch.all((small[15:17, 15:17, :2].int() - torch.tensor([115, 115])).abs() <= 1)
    assert (small[0, 0] == 0).all() or (small[0, -1] == 0).all()


@pytest.mark.parametrize("name", ["digits", "cifar10", "cifar100", "wikitext2"])
def test_an_epoch_is_the_same_for_the_same_seed_and_resumes_anywhere(name, tiny):
    task = TASKS[name](tiny, CPU, batch=6, seed=3, smoke=True)
    whole = list(task.epoch(2))
    assert len(whole) == task.steps
    later = list(task.epoch(2, 1))
    for a, b in zip(whole[1:], later, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    if name != "wikitext2":  # a text is read in its own order
        other = list(TASKS[name](tiny, CPU, batch=6, seed=4, smoke=True).epoch(2))
        assert not torch.equal(whole[0][0], other[0][0])
        assert not torch.equal(whole[0][0], next(task.epoch(3))[0])


def test_every_picture_appears_once_an_epoch(tiny):
    task = TASKS["cifar100"](tiny, CPU, batch=7, seed=0)
    labels = torch.cat([y for _, y in task.epoch(0)])
    assert labels.sort().values.tolist() == task.train[1].sort().values.tolist()
    assert [len(y) for _, y in task.epoch(0)] == [7] * 5 + [5]


def test_pictures_are_normalised_and_channels_last(tiny):
    task = TASKS["cifar10"](tiny, CPU, batch=5, seed=0)
    x, _ = next(task.batches("test"))
    raw = task.test[0].float() / 255
    expected = (raw - torch.tensor(task.mean)) / torch.tensor(task.std)
    torch.testing.assert_close(x, expected.permute(0, 3, 1, 2), rtol=1e-4, atol=1e-5)
    assert x.is_contiguous(memory_format=torch.channels_last)


# ---- WikiText-2


def test_words_are_counted_over_all_splits_with_an_end_for_every_line(tmp_path):
    folder = tmp_path / "wikitext-2"
    folder.mkdir()
    (folder / "train.txt").write_text(" \n = A = \n b b c \n", encoding="utf-8")
    (folder / "valid.txt").write_text("d\n", encoding="utf-8")
    (folder / "test.txt").write_text("b", encoding="utf-8")
    splits, count = read_words(tmp_path)
    # <eos> = A = <eos> b b c <eos>
    assert splits["train"].tolist() == [0, 1, 2, 1, 0, 3, 3, 4, 0]
    assert splits["valid"].tolist() == [5, 0]
    assert splits["test"].tolist() == [3, 0]
    assert count == 6


def test_targets_are_the_next_words_and_columns_are_pieces_of_the_text(tiny):
    task = TASKS["wikitext2"](tiny, CPU, batch=4, seed=0)
    words = read_words(tiny)[0]["train"]
    seen = torch.cat([x for x, _ in task.epoch(0)])
    rows = len(words) // 4
    assert torch.equal(seen[:, 1], words[rows : 2 * rows - 1])
    for x, y in task.epoch(0):
        assert x.shape == y.shape
    assert torch.equal(torch.cat([y for _, y in task.epoch(0)])[:-1], seen[1:])


def test_damaged_text_says_which_command_mends_it(tmp_path):
    folder = tmp_path / "wikitext-2"
    folder.mkdir()
    (folder / "train.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match=r"is damaged.*`madam data wikitext2`"):
        read_words(tmp_path)


# ---- metrics


def test_metrics():
    assert error_percent(torch.tensor([1.0, 3.0, 12.0])) == 25.0
    assert perplexity(torch.tensor([2.0, 0.0, 2.0])) == pytest.approx(2.718281828)
    assert perplexity(torch.tensor([5000.0, 0.0, 2.0])) == float("inf")


@pytest.mark.parametrize("name", ["digits", "cifar10", "wikitext2"])
def test_evaluation_over_batches_is_the_mean_over_answers(name, tiny):
    torch.manual_seed(0)
    task = TASKS[name](tiny, CPU, batch=6, seed=3, smoke=True)
    model = task.model().eval()
    score = task.evaluate(model, "test")
    total = wrong = count = 0.0
    with torch.no_grad():
        for x, y in task.batches("test"):
            logits = model(x).flatten(0, -2)
            y = y.flatten()
            total += torch.nn.functional.cross_entropy(logits, y, reduction="sum").item()
            wrong += (logits.argmax(-1) != y).sum().item()
            count += len(y)
    expected = np.exp(total / count) if name == "wikitext2" else 100 * wrong / count
    assert score == pytest.approx(expected, rel=1e-5)


def test_pieces_of_text_side_by_side_give_the_perplexity_of_each_alone(tiny):
    task = TASKS["wikitext2"](tiny, torch.device("cpu"), batch=4, seed=0, smoke=True)
    torch.manual_seed(0)
    model = task.model().eval()
    alone = torch.zeros(3)
    with torch.no_grad():
        for x, y in task._pieces("test"):
            alone += task.loss(model, (x, y))[1]
    assert max(x.shape[1] for x, _ in task.batches("test")) > task.columns["test"]
    assert task.evaluate(model, "test") == pytest.approx(task.score(alone), rel=1e-5)
