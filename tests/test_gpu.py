"""What only a CUDA device can show. Run with `pytest -m gpu`."""

import copy
import warnings

import pytest
import torch
import torch._functorch.config
from torch import nn
from torch._functorch import config as functorch_config

import torchmadam
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


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_float_lr_under_capture_raises():
    params = fresh()
    optimizer = Madam(params)
    put_gradients(params, 0)
    optimizer.step()
    with pytest.raises(RuntimeError, match="lr is not a CUDA tensor"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
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


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_weights_at_their_bound_are_warned_of_without_waiting_for_the_gpu():
    p = nn.Parameter(torch.randn(50, device="cuda"))
    optimizer = Madam([p], lr=1.0)
    p.grad = -torch.ones_like(p)
    optimizer.step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(12):
                optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        optimizer.step()
    assert any("is at its bound, 5 x its scale" in str(w.message) for w in caught)


def test_a_step_can_be_captured_while_a_look_at_the_weights_is_on_its_way():
    p = nn.Parameter(torch.randn(50, device="cuda"))
    optimizer = Madam([p], lr=torch.tensor(0.01, device="cuda"))
    p.grad = torch.ones_like(p)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.device("cuda"):  # and whatever the default device is
        for _ in range(10):
            optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        optimizer.step()
    graph.replay()
    torch.cuda.synchronize()
    assert float(optimizer.state[p]["step"]) == 11


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
        torch.testing.assert_close(p.detach().cpu(), q.detach(), rtol=1e-5, atol=1e-7)  # some are about to cross zero


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


# ---- codes on a GPU


def coded_net(ladder):
    torch.manual_seed(0)
    # No bias before batch norm: its gradient would be rounding errors.
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 10)
    )
    return torchmadam.to_ladder_(net, ladder)


@pytest.mark.parametrize("ladder", ["paper12", "paper10", "paper8", "signed8", "signed12", "synapse"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("moment", ["float32", "8bit"])
def test_codes_on_the_gpu_are_exactly_those_of_the_cpu_given_equal_gradients(ladder, rounding, last, moment):
    here = coded_net(ladder)
    there = copy.deepcopy(here).cuda()
    if last:
        here.to(memory_format=torch.channels_last)
        there.to(memory_format=torch.channels_last)
    lr = 2.5 * next(here.parameters()).coding.format.spacing
    optimizers = [Madam(m.parameters(), lr=lr, rounding=rounding, second_moment=moment) for m in (here, there)]
    for t in range(5):
        put_gradients(list(here.parameters()), t)
        put_gradients(list(there.parameters()), t)
        for optimizer in optimizers:
            optimizer.step()
        for p, q in zip(here.parameters(), there.parameters(), strict=True):
            assert torch.equal(p.codes(), q.codes().cpu())
            states = [optimizer.state[w] for optimizer, w in zip(optimizers, (p, q), strict=True)]
            assert torch.equal(states[0]["second_moment"], states[1]["second_moment"].cpu())


@pytest.mark.parametrize("ladder", ["paper12", "signed8"])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
# Until 2.12 PyTorch took what it had compiled under one autocast dtype for another's.
@functorch_config.patch(enable_autograd_cache=False)
def test_a_coded_network_computes_on_the_gpu_and_autograd_holds_codes(ladder, autocast, compiled):
    net = coded_net(ladder).cuda()
    dense = torchmadam.to_dense_(copy.deepcopy(net))
    x = torch.randn(8, 3, 8, 8, device="cuda")
    torch._dynamo.reset()
    run = torch.compile(net, fullgraph=True, options=torchmadam.compile_options()) if compiled else net
    saved = []

    def keep(t):
        saved.append(t)
        return t

    with torch.autocast("cuda", autocast or torch.bfloat16, enabled=autocast is not None):
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            out = run(x)
        expected = dense(x)
    tolerance = {"rtol": 1e-3, "atol": 1e-3} if autocast is None else {"rtol": 0.05, "atol": 0.1}
    torch.testing.assert_close(out, expected, **tolerance)
    out.float().square().mean().backward()
    expected.float().square().mean().backward()
    for p, q in zip(net.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0.1, atol=0.1 * float(q.grad.abs().max()) + 1e-4)
    sizes = {p.numel() for p in net.parameters() if p.dim() > 1}
    floats = [t for t in saved if type(t) is torch.Tensor and t.is_floating_point() and t.numel() in sizes]
    assert floats == []


def test_a_captured_step_of_codes_replays():
    captured, eager = coded_net("signed8").cuda(), coded_net("signed8").cuda()
    lr = torch.tensor(0.02, device="cuda")
    replayed, plain = Madam(captured.parameters(), lr=lr), Madam(eager.parameters(), lr=lr.clone())
    for t in range(2):
        put_gradients(list(captured.parameters()), t)
        put_gradients(list(eager.parameters()), t)
        replayed.step()
        plain.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed.step()
    for _ in range(3):
        for p, q in zip(captured.parameters(), eager.parameters(), strict=True):
            new = torch.randn_like(q.grad)
            p.grad.copy_(new)
            q.grad.copy_(new)
        graph.replay()
        plain.step()
    for p, q in zip(captured.parameters(), eager.parameters(), strict=True):
        assert torch.equal(p.codes(), q.codes())


@pytest.mark.parametrize("ladder", [None, "paper12", "signed8"])
def test_steps_that_are_made_again_follow_every_change(ladder):
    """What a step depends on is changed under way; a fresh process would do what the reference on the CPU does."""
    torch.manual_seed(0)
    here = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(72, 5))
    if ladder:
        torchmadam.to_ladder_(here, ladder)
    there = copy.deepcopy(here).cuda()
    pair = [(m, Madam(m.parameters(), lr=0.02)) for m in (here, there)]
    for t in range(24):
        for m, optimizer in pair:
            group = optimizer.param_groups[0]
            group["lr"] = 0.02 / (1 + t % 3)
            if t == 8:
                group["max_step"] = 2.0
            if t == 12:
                optimizer.state.clear()
            if t == 16:
                m.to(memory_format=torch.channels_last)
            if t == 20:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            put_gradients(list(m.parameters()), t)
            if t % 5 == 4:
                m[2].bias.grad = None
            optimizer.step()
        for p, q in zip(here.parameters(), there.parameters(), strict=True):
            if ladder:
                assert torch.equal(p.codes(), q.codes().cpu()), t
            else:
                torch.testing.assert_close(p.detach(), q.detach().cpu(), rtol=1e-4, atol=1e-6)


def test_a_coded_lstm_runs_on_cudnn():
    cell = torchmadam.to_ladder_(nn.LSTM(6, 5), "paper12").cuda()
    with pytest.warns(UserWarning, match="single contiguous chunk"):  # decoded weights are not
        out, _ = cell(torch.randn(4, 2, 6, device="cuda"))
    out.sum().backward()
    assert all(p.grad is not None for p in cell.parameters())
    Madam(cell.parameters()).step()


def test_codes_that_no_kernel_takes_step_as_on_a_cpu():
    """Signs from a seed in another order than row-major: the reference steps them, with the default's momentum."""
    torch.manual_seed(0)
    conv = nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last)
    there = torchmadam.to_ladder_(conv, "paper12", sign_seed=1)
    here = copy.deepcopy(there).cuda()
    for model in (there, here):
        optimizer = Madam(model.parameters())
        for seed in range(3):
            put_gradients(model.parameters(), seed)
            optimizer.step()
    assert torch.equal(there.weight.decode(), here.weight.decode().cpu())
    # A kernel takes the biases, and what it drops goes into their means, nearly as the reference has it.
    torch.testing.assert_close(there.bias.decode(), here.bias.decode().cpu(), rtol=1.5 * 0.001, atol=0)


def test_a_model_that_was_float64_goes_on_in_float32():
    torch.manual_seed(0)
    there = nn.Linear(8, 8).double()
    here = copy.deepcopy(there).cuda()
    for model in (there, here):
        optimizer = Madam(model.parameters())
        for dtype in (torch.float64, torch.float32):
            model.to(dtype)
            put_gradients(model.parameters(), 1)
            optimizer.step()
    for p, q in zip(there.parameters(), here.parameters(), strict=True):
        torch.testing.assert_close(q.cpu(), p)


def test_a_backward_through_a_weight_that_a_kernel_changed_raises():
    for make in (lambda: nn.Linear(16, 16), lambda: torchmadam.to_ladder_(nn.Linear(16, 16), "paper12")):
        net = nn.Sequential(make(), nn.Tanh(), make()).cuda()
        optimizer = Madam(net.parameters())
        x = torch.randn(2, 16, device="cuda")
        net(x).sum().backward()
        out = net(x)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@pytest.fixture
def inductor_chooses_without_timing():
    """It times some reductions and takes the fastest, which need not be the same one every time."""
    import torch._inductor.config as inductor

    with inductor.patch(deterministic=True):
        yield


def test_a_whole_lab_run_on_the_gpu_resumes_bit_for_bit(tmp_path, inductor_chooses_without_timing):
    from dataclasses import replace

    from madam_lab import recipes, records
    from madam_lab.progress import Progress
    from madam_lab.trainer import Run, Stopped
    from stopping import StopAfter

    recipe = replace(recipes.get("digits_madam_signed8"), epochs=4, batch=128)

    for name, left in (("whole", 10**9), ("parts", 17)):
        while True:
            try:
                Run(recipe, 0, folder=tmp_path / name, results=tmp_path / name).train(
                    StopAfter(left), Progress("", 1, quiet=True)
                )
                break
            except Stopped:
                pass
    whole, parts = (records.read(tmp_path / n / recipe.name / "0.json") for n in ("whole", "parts"))
    assert whole["curve"] == parts["curve"]
    assert whole["codes"] == parts["codes"]


def test_the_bytes_we_count_are_those_the_gpu_holds():
    nn.Linear(1024, 1024).cuda()(torch.randn(4, 1024, device="cuda")).sum().backward()  # cuBLAS takes its workspace
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    model = torchmadam.to_ladder_(nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)]), "paper12").cuda()
    optimizer = Madam(model.parameters())
    model(torch.randn(4, 1024, device="cuda")).sum().backward()
    optimizer.step()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - before
    assert torchmadam.memory(model, optimizer).total == pytest.approx(held, rel=0.01)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_large_step_of_floats_is_that_of_its_pieces(momentum):
    """In one launch, of more elements than any other test's; each program reckons for itself what step it is."""
    size = 2**27 + 4096
    whole = torch.randn(size, device="cuda")
    pieces = [piece.clone() for piece in whole.split(2**22)]
    ours, theirs = (Madam(params, scale=1.0, momentum=momentum) for params in ([whole], pieces))
    for _ in range(2):
        whole.grad = torch.randn(size, device="cuda")
        for piece, grad in zip(pieces, whole.grad.split(2**22), strict=True):
            piece.grad = grad
        ours.step()
        theirs.step()
    if momentum:  # means are rounded to bfloat16 by where in its tensor a weight lies
        torch.testing.assert_close(whole, torch.cat(pieces), rtol=0, atol=0.01 * 5 * 2**-7)
    else:
        assert torch.equal(whole, torch.cat(pieces))
    assert ours.state[whole]["step"].item() == 2


def test_released_gradients_never_pile_up_on_a_gpu():
    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(16)]).cuda()
    x = torch.randn(4, 1024, device="cuda")
    optimizer = Madam(model.parameters())
    torchmadam.release_gradients(model, optimizer)
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(x).sum().backward()
        optimizer.step()
    assert torch.cuda.max_memory_allocated() - before < 4 * 4 * 1024 * 1024  # of sixteen gradients


@pytest.mark.parametrize(
    "name",
    [
        "cifar10_sgd",
        "cifar10_madam_12bit",
        "wikitext2_madam",
        "wikitext2_madam_12bit",
        "cgan_madam_12bit",
        "imagenette_madam_8bit",
    ],
)
def test_two_runs_of_a_smoke_recipe_are_equal_bit_for_bit(name, tmp_path):
    import numpy as np

    from madam_lab import queue, recipes, records
    from tiny_data import lay_cifar, lay_inception, lay_photographs, lay_wikitext

    rng = np.random.default_rng(0)
    lay_cifar(tmp_path / "data", rng)
    lay_wikitext(tmp_path / "data", rng)
    lay_inception(tmp_path / "data")
    lay_photographs(tmp_path / "data", rng)
    recipe = recipes.get(name).as_smoke()
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zero biases that stay: the paper's own choice
        for i in range(2):
            queue.work(
                [recipe], [0], data=tmp_path / "data", results=tmp_path / str(i), folder=tmp_path / "r", quiet=True
            )
            found.append(records.read(tmp_path / str(i) / recipe.name / "0.json"))
    assert found[0]["curve"] == found[1]["curve"]
    assert found[0]["codes"] == found[1]["codes"]


@pytest.mark.parametrize("name", ["cgan_adam", "cgan_madam_12bit"])
def test_players_whose_turns_are_replayed_train_as_those_that_are_not(name, tmp_path, inductor_chooses_without_timing):
    """Ten steps, of which six are replays of a graph that has both turns in it."""
    import numpy as np

    from madam_lab import recipes
    from madam_lab.trainer import Run
    from tiny_data import lay_cifar, lay_inception

    lay_cifar(tmp_path, np.random.default_rng(0))
    lay_inception(tmp_path)
    found = []
    for captured in (True, False):
        run = Run(recipes.get(name).as_smoke(), 0, data=tmp_path, folder=tmp_path, results=tmp_path)
        run.model.train()
        before = [p.detach().float().clone() for p in run.model.parameters()]
        for number in range(10):
            batch = next(iter(run.task.epoch(number)))
            run.stepper.step(batch) if captured else run.stepper._run(batch)
        assert bool(run.stepper._graphs) == captured
        found.append([p.detach().float() for p in run.model.parameters()])
    # Sums in another order turn gradients next to zero (of biases that a normalisation follows, all of them), and such
    # rules' steps with them. So: how far are they apart, of how far they went?
    moved, apart = (
        torch.stack([(p - q).norm() for p, q in zip(found[0], to, strict=True)]) for to in (before, found[1])
    )
    assert torch.all(moved > 0)
    assert apart.norm() < 0.1 * moved.norm()


def test_photographs_that_workers_decode_feed_a_captured_step(tmp_path, inductor_chooses_without_timing):
    """Workers, the thread that pins their memory, and a capture in the midst of it."""
    import numpy as np

    from madam_lab import queue, recipes, records

    pil = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    for split, label, number in ((s, c, i) for s in ("train", "val") for c in ("a", "b") for i in range(12)):
        folder = tmp_path / "imagenette" / split / label
        folder.mkdir(parents=True, exist_ok=True)
        pil.fromarray(rng.integers(0, 256, (140, 150, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    changes = {"epochs": 3, "batch": 4, "model.complete": False}
    recipe = recipes.get("imagenette_madam_12bit").overridden(changes)
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")  # zero biases that stay: the paper's own choice
        patch.setenv("MADAM_WORKERS", "2")
        queue.work([recipe], [0], data=tmp_path, results=tmp_path / "r", folder=tmp_path / "u", quiet=True)
    record = records.read(records.path_of(recipe.name, 0, tmp_path / "r"))
    assert record["status"] == "finished"
    assert len(record["curve"]) == 3


def test_a_monitored_run_looks_between_replays_and_ends_as_one_without_a_monitor(
    tmp_path, monkeypatch, inductor_chooses_without_timing
):
    from dataclasses import replace

    from madam_lab import queue, recipes, records
    from madam_lab.stepping import Stepper

    recipe = replace(recipes.get("digits_trust_signed8"), epochs=4, batch=128, monitor=5)
    found = []
    plainly, run = [], Stepper._run
    monkeypatch.setattr(Stepper, "_run", lambda self, batch: (plainly.append(batch), run(self, batch)))
    for i, monitor in enumerate((None, 5)):
        kind = replace(recipe, monitor=monitor)
        queue.work([kind], [0], results=tmp_path / str(i), folder=tmp_path / "runs", quiet=True)
        found.append(records.read(tmp_path / str(i) / kind.name / "0.json"))
    plain, watched = found
    assert [seen["step"] for seen in watched["trust"]] == list(range(0, 4 * 12, 5))
    for seen in watched["trust"]:
        assert all(0 < layer["cosine"] <= 1 and 0 <= layer["moved"] <= 1 for layer in seen["layers"].values())
    assert (plain["curve"], plain["codes"]) == (watched["curve"], watched["codes"])
    assert len(plainly) == 2 * 2 * (3 + 1)  # two runs with two shapes of batches each: warming up, and the capture


@pytest.mark.parametrize("ladder", [None, "paper12", "signed8"])
def test_a_monitor_sees_in_a_replayed_step_what_it_sees_in_a_plain_one(ladder):
    from torchmadam.theory import TrustMonitor

    seen = []
    for replayed in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(37, 53) if ladder is None else torchmadam.to_ladder_(nn.Linear(37, 53), ladder)
        model.cuda()
        optimizer = Madam(model.named_parameters(), lr=torch.tensor(0.02, device="cuda"))
        put_gradients(model.parameters(), 0)
        for _ in range(2):
            optimizer.step()  # kernels are compiled outside of the graph
        graph = torch.cuda.CUDAGraph()
        if replayed:
            with torch.cuda.graph(graph):
                optimizer.step()
        with TrustMonitor(optimizer, every=2) as monitor:
            for _ in range(3):
                if replayed:
                    with monitor.step():
                        graph.replay()
                else:
                    optimizer.step()
        seen.append(monitor.observations)
    assert seen[0] == seen[1]
    assert [each.step for each in seen[0]] == [0, 2]
    assert all(each.layers["weight"].relative_size > 0 for each in seen[0])


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_monitor_sees_on_a_gpu_what_it_sees_on_a_cpu_and_refuses_to_be_captured():
    from torchmadam.theory import TrustMonitor

    seen = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = torchmadam.to_ladder_(nn.Linear(37, 53), "signed8").to(device)
        optimizer = Madam(model.named_parameters(), lr=torch.tensor(0.02, device=device))
        put_gradients(model.parameters(), 0)
        with TrustMonitor(optimizer, every=1) as monitor:
            optimizer.step()
        seen.append(monitor.observations[0].layers["weight"])
    here, there = seen
    assert (here.moved, here.rungs, here.upper, here.lower) == (there.moved, there.rungs, there.upper, there.lower)
    assert there.cosine == pytest.approx(here.cosine, rel=1e-5)
    assert there.relative_size == pytest.approx(here.relative_size, rel=1e-4)
    refused = pytest.raises(RuntimeError, match="attach it after the capture")
    with TrustMonitor(optimizer, every=1), refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()


# ---- linear layers with coded weights, for generation


@pytest.mark.parametrize("ladder", ["paper8", "paper10", "paper12", "signed8", "signed12"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 16, 17, 33, 64, 65])
def test_a_linear_layer_of_codes_gives_the_product_of_the_decoded_weights(ladder, dtype, batch):
    """4,096 columns, as the kernels like them; 4,128 and 96, which end within a block; 100, which they decline."""
    small = [(129, 96), (40, 100)] if batch in (1, 17) else []  # compiling for each takes a second or two
    for rows, columns in [(2053, 4096), (37, 4128), *small]:
        torch.manual_seed(0)
        net = torchmadam.to_ladder_(nn.Linear(columns, rows), ladder, dtype=dtype).cuda()
        weight, bias = (p.detach().decode(torch.float32).double() for p in (net.weight, net.bias))
        x = torch.randn(batch, columns, device="cuda").to(dtype)
        with torch.no_grad():
            found = net(x)
        expected = x.double() @ weight.T + bias
        rounding = {torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
        bound = 2 * rounding * expected.abs() + rounding * (x.double().abs() @ weight.abs().T) + rounding * bias.abs()
        assert torch.all((found.double() - expected).abs() <= bound), (rows, columns)
        assert found.dtype == dtype


@pytest.mark.parametrize("batch", [1, 17])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_captured_linear_layer_of_codes_replays_and_makes_no_float_matrix(batch, mode):
    net = torchmadam.to_ladder_(nn.Linear(4096, 4096, bias=False), "signed8", dtype=torch.bfloat16).cuda()
    x = torch.randn(batch, 4096, device="cuda").bfloat16()
    with mode():
        net(x)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        eager = net(x)
        assert torch.cuda.max_memory_allocated() - before < 2**21  # decoded, the weight would take 2^25 bytes
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = net(x)
        graph.replay()
        assert torch.equal(out, eager)
        x.neg_()
        graph.replay()
        assert torch.equal(out, -eager)


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
def test_a_compiled_model_of_codes_generates_with_the_operator():
    net = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 64))
    net = torchmadam.to_ladder_(net, "paper8", dtype=torch.bfloat16).cuda()
    x = torch.randn(1, 256, device="cuda").bfloat16()
    torch._dynamo.reset()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(net, fullgraph=True)(x), net(x), rtol=0.05, atol=0.02)
