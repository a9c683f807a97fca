"""The registration with timm. It is tested where timm can be imported, which takes a torchvision that fits torch."""

import pytest
import torch

from torchmadam import LadderTensor, Madam, to_ladder_

try:
    import timm
except ImportError as error:
    # timm imports torchvision, and the newest of that brings another torch than the one that is tested here.
    pytest.skip(f"timm cannot be imported: {error}", allow_module_level=True)

from examples import with_timm  # its own errors are errors

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def test_madam_is_one_of_timms_optimisers_on_floats_and_on_codes():
    assert with_timm.Madam is Madam
    assert "madam" in timm.optim.list_optimizers()
    for bits in (None, 12):
        model = timm.create_model("resnet10t", num_classes=4)
        if bits:
            to_ladder_(model, bits)
        optimizer = timm.optim.create_optimizer_v2(model, "madam", lr=0.01, weight_decay=0.05)
        assert type(optimizer) is Madam
        assert sorted({group["weight_decay"] for group in optimizer.param_groups}) == [0.0, 0.05]
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        for _ in range(2):  # the norms that end the residual branches begin as zeros, so the first step stops at them
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(torch.randn(2, 3, 64, 64)), torch.tensor([0, 1])).backward()
            optimizer.step()
        still = [name for name, p in model.named_parameters() if torch.equal(before[name], p.detach())]
        assert not still
        assert any(isinstance(p, LadderTensor) for p in model.parameters()) == bool(bits)


def test_layer_wise_learning_rates_are_taken():
    model = timm.create_model("resnet10t", num_classes=4)
    optimizer = timm.optim.create_optimizer_v2(model, "madam", lr=0.01, layer_decay=0.8)
    assert len({group["lr_scale"] for group in optimizer.param_groups}) > 2
