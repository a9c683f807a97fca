"""timm: after this line ``--opt madam`` is one of its optimisers, in its factory and in its training script."""

import timm.optim
from timm.optim import OptimInfo

from torchmadam import Madam

timm.optim.default_registry.register(OptimInfo("madam", Madam, "multiplicative Adam: lr = 0.01", has_eps=False))
