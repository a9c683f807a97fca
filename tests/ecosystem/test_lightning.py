"""The Lightning example: checkpoints, schedules, mixed precision and accumulation, on floats and on codes."""

import pytest
import torch
from torch.utils.data import DataLoader

lightning = pytest.importorskip("lightning", reason='needs pip install ".[lightning]"')

from examples.with_lightning import Digits, loaders, main  # noqa: E402

from torchmadam import LadderTensor  # noqa: E402

# Lightning's advice about workers and devices, and its deprecations.
pytestmark = pytest.mark.filterwarnings("ignore")


def trainer(folder, epochs, **arguments):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    return lightning.Trainer(max_epochs=epochs, default_root_dir=folder, **quiet, **arguments)


def fitted(bits, folder, epochs=4, path=None, seed=0, shuffle=True, **arguments):
    lightning.seed_everything(seed)
    model = Digits(bits, lr=0.05, epochs=4)
    lightning.seed_everything(0)
    run = trainer(folder, epochs, **arguments)
    train, valid = loaders()
    if not shuffle:
        train = DataLoader(train.dataset, train.batch_size)
    run.fit(model, train, valid, ckpt_path=path)
    return model, run


def assert_same(a, b):
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert isinstance(p, LadderTensor) == isinstance(q, LadderTensor)
        assert torch.equal(p.codes(), q.codes()) if isinstance(p, LadderTensor) else torch.equal(p, q), name


@pytest.mark.parametrize("bits", [None, 12])
def test_a_run_learns_and_its_checkpoint_is_the_same_model(bits, tmp_path):
    model, run = fitted(bits, tmp_path)
    assert run.callback_metrics["accuracy"] > 0.85
    (optimizer,) = run.strategy.optimizers
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-6)  # the schedule has ended
    run.save_checkpoint(tmp_path / "last.ckpt")
    assert_same(model, Digits.load_from_checkpoint(tmp_path / "last.ckpt"))


@pytest.mark.parametrize("bits", [None, 12])
def test_a_resumed_run_goes_on_with_its_weights_its_moments_and_its_schedule(bits, tmp_path):
    model, run = fitted(bits, tmp_path, epochs=1, shuffle=False)
    run.save_checkpoint(tmp_path / "half.ckpt")
    resumed, again = fitted(bits, tmp_path, epochs=1, path=tmp_path / "half.ckpt", seed=1, shuffle=False)
    assert_same(model, resumed)
    (before,), (after,) = run.strategy.optimizers, again.strategy.optimizers
    assert after.param_groups[0]["lr"] == before.param_groups[0]["lr"] < 0.05
    for p, q in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(before.state[p]["second_moment"], after.state[q]["second_moment"])
        assert before.state[p]["step"] == after.state[q]["step"] == 23
    final, _ = fitted(bits, tmp_path, epochs=2, path=tmp_path / "half.ckpt", seed=1, shuffle=False)
    whole, _ = fitted(bits, tmp_path, epochs=2, shuffle=False)
    assert_same(final, whole)


@pytest.mark.parametrize("bits", [None, "signed8"])
def test_mixed_precision_accumulation_and_clipping_together(bits, tmp_path):
    model, run = fitted(bits, tmp_path, precision="bf16-mixed", accumulate_grad_batches=2, gradient_clip_val=1.0)
    (optimizer,) = run.strategy.optimizers
    assert {int(state["step"]) for state in optimizer.state.values()} == {4 * 12}  # 23 batches, two at a time
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert run.callback_metrics["accuracy"] > 0.8


def test_the_command_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(["--bits", "12", "--epochs", "1"])
    assert "signed 12-bit, crossing 1" in capsys.readouterr().out
