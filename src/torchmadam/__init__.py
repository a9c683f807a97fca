"""Train without tuning a learning rate, on weights that may be 8- to 12-bit codes from the first step on."""

import importlib
from typing import TYPE_CHECKING, Any

from torchmadam.average import Average, average
from torchmadam.groups import param_groups
from torchmadam.ladder.checkpoint import load, save
from torchmadam.ladder.compiling import compile_options
from torchmadam.ladder.convert import to_dense_, to_ladder_
from torchmadam.ladder.format import LadderFormat
from torchmadam.ladder.plain import LadderFileError, plain_state_dict_
from torchmadam.ladder.summary import summary
from torchmadam.ladder.tensor import LadderTensor
from torchmadam.madam import Madam
from torchmadam.memory import Memory, memory
from torchmadam.release import Released, release_gradients
from torchmadam.start import scales_of

__all__ = [
    "Average",
    "LadderFileError",
    "LadderFormat",
    "LadderTensor",
    "Madam",
    "Memory",
    "Released",
    "average",
    "compile_options",
    "load",
    "memory",
    "param_groups",
    "plain_state_dict_",
    "release_gradients",
    "save",
    "scales_of",
    "summary",
    "to_dense_",
    "to_ladder_",
]
__version__ = "0.2.0"


# Imported when they are first asked for: two of them take a moment, and hf needs Transformers.
_LATER = ("distributed", "hf", "theory")
if TYPE_CHECKING:
    from torchmadam import distributed as distributed
    from torchmadam import hf as hf
    from torchmadam import theory as theory
else:

    def __getattr__(name: str) -> Any:
        if name not in _LATER:
            raise AttributeError(f"module 'torchmadam' has no attribute {name!r}")
        try:
            return importlib.import_module(f"torchmadam.{name}")
        except ModuleNotFoundError as error:
            raise AttributeError(f"torchmadam.{name} needs {error.name}, which is not installed") from error

    def __dir__() -> list[str]:
        return sorted({*globals(), *_LATER})
