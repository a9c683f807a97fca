"""timm: after this line ``--opt madam`` is one of its optimisers, in its factory and in its training script."""

from timm.optim._optim_factory import OptimInfo, default_registry

from torchmadam import Madam

default_registry.register(OptimInfo("madam", Madam, "multiplicative Adam, lr = 0.01 everywhere", has_eps=False))
