"""Several processes that talk to each other with gloo, for tests: a function runs on every rank."""

import os
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Imported once, by a server that forks: a rank then starts in milliseconds.
PRELOAD = ["torch", "torch.distributed.fsdp", "torch.distributed.tensor", "torchmadam.distributed"]


def on_ranks(world, function, *arguments, backend="gloo"):
    """Run function(rank, *arguments) on this many ranks; an error on any of them raises here."""
    mp.get_context("forkserver").set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        every = (world, backend, os.path.join(folder, "store"), function, arguments)
        mp.start_processes(_rank, every, nprocs=world, start_method="forkserver")


def _rank(rank, world, backend, store, function, arguments):
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    for theirs in ("is deprecated", "is experimental", "no default device", "is not writable"):
        warnings.filterwarnings("ignore", f".*{theirs}")
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
    try:
        function(rank, *arguments)
        dist.barrier()
    finally:
        dist.destroy_process_group()
