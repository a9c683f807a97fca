"""Train without tuning a learning rate: Madam, the multiplicative optimiser."""

from torchmadam.groups import param_groups, scales_of
from torchmadam.madam import Madam

__all__ = ["Madam", "param_groups", "scales_of"]
__version__ = "0.1.0"
