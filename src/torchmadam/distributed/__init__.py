"""Training on several devices with PyTorch's own engine: DDP, FSDP2 and distributed checkpoints on coded weights.

``fully_shard`` takes coded models as it takes others; DDP does through :func:`data_parallel`. See docs/distributed.md.
"""

from torchmadam.distributed.checkpoint import export, load, save
from torchmadam.distributed.meta import materialise_
from torchmadam.distributed.replicas import compare_replicas, data_parallel, synchronise_, watch_replicas

__all__ = [
    "compare_replicas",
    "data_parallel",
    "export",
    "load",
    "materialise_",
    "save",
    "synchronise_",
    "watch_replicas",
]
