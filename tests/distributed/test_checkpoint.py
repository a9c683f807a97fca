"""Checkpoints that all ranks write, and any number of ranks reads."""

import pytest
import torch
from tests.distributed import work
from torch import nn
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

import torchmadam
from ranks import on_ranks
from torchmadam import LadderFileError, Madam
from torchmadam.distributed import export, load, save

CASES = [
    ("paper12", {"sign_seed": 4}, {"rounding": "stochastic", "momentum": 0.0}),
    ("signed8", {}, {}),
    pytest.param("signed8", {}, {"second_moment": "8bit"}, marks=pytest.mark.slow),
    pytest.param(torch.bfloat16, {}, {}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("ladder", "conversion", "arguments"), CASES, ids=str)
def test_what_four_ranks_save_two_ranks_one_rank_and_no_ranks_load(ladder, conversion, arguments, tmp_path):
    on_ranks(4, work.saved_on_all_ranks, tmp_path / "run", ladder, conversion, arguments)
    assert len([entry for entry in (tmp_path / "run").iterdir() if entry.is_dir()]) == 1
    reference = work.build(ladder, **conversion)
    theirs = Madam(reference.parameters(), lr=0.02, **arguments)
    work.step_given(reference, theirs, [0, 1, 2])
    model = work.build(ladder, **conversion)
    optimizer = Madam(model.parameters(), **arguments)
    load(tmp_path / "run", model, optimizer)
    if arguments.get("second_moment") != "8bit":
        work.assert_same(model, reference)
    work.goes_on(model, optimizer, reference, theirs)
    export(tmp_path / "run", tmp_path / "model.safetensors")
    plain = work.build(ladder, **conversion)
    torchmadam.load(tmp_path / "model.safetensors", plain)
    fresh = work.build(ladder, **conversion)
    load(tmp_path / "run", fresh)
    work.assert_same(plain, fresh)


def test_a_rank_that_dies_while_saving_leaves_the_checkpoint_before(tmp_path):
    with pytest.raises((ProcessExitedException, ProcessRaisedException)):
        on_ranks(2, work.dies_while_saving, tmp_path)
    assert len([entry for entry in tmp_path.iterdir() if entry.is_dir()]) == 2  # the one before, and a piece
    reference = work.build("paper12")
    work.step_given(reference, Madam(reference.parameters()), [0])
    model = work.build("paper12", seed=3)
    optimizer = Madam(model.parameters())
    load(tmp_path, model, optimizer)
    work.assert_same(model, reference)
    save(tmp_path, model, optimizer)
    assert len([entry for entry in tmp_path.iterdir() if entry.is_dir()]) == 1


def test_state_that_a_checkpoint_has_not_is_gone_after_loading_it(tmp_path):
    models = [nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)) for _ in range(2)]
    optimizers = [Madam(model.parameters()) for model in models]
    models[0][0].weight.grad = torch.ones(3, 3)
    for p in models[1].parameters():
        p.grad = torch.ones_like(p)
    for optimizer in optimizers:
        optimizer.step()
    save(tmp_path, models[0], optimizers[0])
    load(tmp_path, models[1], optimizers[1])
    assert list(optimizers[1].state) == [models[1][0].weight]


def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(tmp_path):
    model = work.build("paper12")
    with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
        load(tmp_path, model)
    save(tmp_path, model)
    for other in (work.build("signed8"), work.build(None), work.build("paper12", work.mlp)):
        before = [work.bits_of(p).clone() for p in other.parameters()]
        with pytest.raises(LadderFileError, match=r"no checkpoint of this model.*convert the model first"):
            load(tmp_path, other)
        assert all(torch.equal(work.bits_of(p), b) for p, b in zip(other.parameters(), before, strict=True))
    with pytest.raises(LadderFileError, match="holds no optimiser"):
        load(tmp_path, model, Madam(model.parameters()))


def test_a_checkpoint_that_is_older_than_momentum_has_none(tmp_path):
    model = work.build("paper12")
    optimizer = Madam.paper(model.parameters())
    work.step_given(model, optimizer, [0])
    del optimizer.param_groups[0]["momentum"]
    save(tmp_path, model, optimizer)
    resumed = Madam(model.parameters())
    load(tmp_path, model, resumed)
    names = ("momentum", "crossing", "bound", "weight_decay")
    assert [resumed.param_groups[0][name] for name in names] == [0.0, 0.0, 3.0, 0.0]


class Both(nn.Module):
    """Whose names would be one, without what wrappers add to them."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.module = nn.Sequential()
        self.module.fc = nn.Linear(8, 8)


def test_names_that_only_a_wrapper_s_prefix_tells_apart_stay_apart(tmp_path):
    models = [torchmadam.to_ladder_(Both(), "paper12", seed=seed) for seed in (1, 2)]
    optimizers = [Madam(model.parameters()) for model in models]
    for i, p in enumerate(models[0].parameters()):
        p.grad = torch.full(p.shape, float(i + 1))
    optimizers[0].step()
    save(tmp_path, models[0], optimizers[0])
    load(tmp_path, models[1], optimizers[1])
    work.assert_same(*models)
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(*(o.state[x]["second_moment"] for o, x in zip(optimizers, (p, q), strict=True)))


def test_saving_removes_earlier_checkpoints_and_nothing_else(tmp_path):
    for name in ("2024", "checkpoint-best", "logs"):
        (tmp_path / name).mkdir()
    model = work.build("paper12")
    save(tmp_path, model)
    save(tmp_path, model)
    found = {entry.name for entry in tmp_path.iterdir()}
    assert found == {"2024", "checkpoint-best", "logs", "checkpoint-2", "current"}
