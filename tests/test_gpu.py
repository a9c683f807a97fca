"""What only a CUDA device can show. Run with `pytest -m gpu`."""

import copy
import warnings

import pytest
import torch
from torch import nn

from torchmadam import Madam

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def put_gradients(params, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p)


def fresh(dtype=torch.float32):
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(s).to("cuda", dtype)) for s in ((37, 53), (7,), ())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("crossing", [0.0, 1.0])
def test_the_gpu_walks_the_path_of_the_cpu(dtype, crossing):
    there = fresh(dtype)
    here = [nn.Parameter(p.detach().cpu()) for p in there]
    optimizers = [Madam(ps, crossing=crossing) for ps in (there, here)]
    for t in range(10):
        put_gradients(there, t)
        put_gradients(here, t)
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(there, here, strict=True):
        torch.testing.assert_close(
            p.detach().cpu(), q.detach(), rtol=1e-4 if dtype == torch.float32 else 2**-6, atol=1e-6
        )
        if dtype != torch.float32:  # equal random bits: nearly every weight rounds alike
            assert (p.detach().cpu() != q.detach()).float().mean() < 0.02


def test_a_captured_step_replays_with_the_lr_of_the_moment():
    captured, eager = fresh(), fresh()
    lr = torch.tensor(0.01, device="cuda")
    replayed, plain = Madam(captured, lr=lr, weight_decay=0.1), Madam(eager, weight_decay=0.1)
    put_gradients(captured, 0)
    put_gradients(eager, 0)
    replayed.step()
    plain.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed.step()
    for t, rate in enumerate((0.01, 0.02, 0.005), start=1):
        lr.fill_(rate)
        plain.param_groups[0]["lr"] = rate
        for p, q in zip(captured, eager, strict=True):
            new = torch.randn_like(q)
            p.grad.copy_(new)
            q.grad.copy_(new)
        graph.replay()
        plain.step()
        assert int(replayed.state[captured[0]]["step"]) == t + 1
        for p, q in zip(captured, eager, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=0)


def test_a_float_lr_under_capture_raises():
    params = fresh()
    optimizer = Madam(params)
    put_gradients(params, 0)
    optimizer.step()
    with pytest.raises(RuntimeError, match="lr is not a CUDA tensor"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()


def test_the_first_step_synchronises_once_and_later_ones_never():
    params = [nn.Parameter(torch.randn(50, device="cuda")) for _ in range(20)]
    optimizer = Madam(params)
    put_gradients(params, 0)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([w for w in caught if "synchroniz" in str(w.message)]) == 1
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_state_saved_on_the_cpu_continues_on_the_gpu():
    there = fresh()
    here = [nn.Parameter(p.detach().cpu()) for p in there]
    put_gradients(here, 0)
    source = Madam(here)
    source.step()
    with torch.no_grad():
        for p, q in zip(there, here, strict=True):
            p.copy_(q)
    target = Madam(there)
    target.load_state_dict(copy.deepcopy(source.state_dict()))
    assert all(v.is_cuda for s in target.state.values() for v in s.values() if isinstance(v, torch.Tensor))
    put_gradients(there, 1)
    put_gradients(here, 1)
    source.step()
    target.step()
    for p, q in zip(there, here, strict=True):
        torch.testing.assert_close(p.detach().cpu(), q.detach(), rtol=1e-5, atol=0)


def test_autocast_and_grad_scaler_train_a_float16_forward():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4)).cuda()
    x, y = torch.randn(256, 32, device="cuda"), torch.randint(4, (256,), device="cuda")
    optimizer, scaler = Madam(net.parameters()), torch.amp.GradScaler("cuda")
    losses = []
    for _ in range(100):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = nn.functional.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
