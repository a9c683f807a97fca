"""Coded files from the command line: what is in them, and their weights as floats."""

from pathlib import Path

from torch import Tensor, nn

from torchmadam import LadderTensor, summary
from torchmadam.ladder import checkpoint


def table(path: Path) -> str:
    """A table of the parameters and buffers of a coded file."""
    state = checkpoint.unflatten(*checkpoint.read(path))
    holder = nn.ParameterDict()
    for name, value in state.items():
        # A ParameterDict takes no dots in its names.
        holder[name.replace(".", "/")] = nn.Parameter(value, requires_grad=False)
    return str(summary(holder)).replace("/", ".")


def export(path: Path, target: Path) -> None:
    """Write the decoded weights, and everything else in the file, to an ordinary safetensors file."""
    from safetensors.torch import save_file

    state = checkpoint.unflatten(*checkpoint.read(path))
    dense: dict[str, Tensor] = {
        name: (value.decode() if isinstance(value, LadderTensor) else value).contiguous().clone()
        for name, value in state.items()
    }
    if not target.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {target.parent} to write {target.name} into")
    save_file(dense, target)
