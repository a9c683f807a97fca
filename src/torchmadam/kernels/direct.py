"""Launches that are made again and again with other tensors: the second time around straight to the compiled kernel."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from torchmadam.kernels import resident


class Direct:
    """A kernel with its grid, numbers and constants; the tensors, its first arguments, come with each call.

    Triton looks at every argument of a launch, which takes longer than a small kernel. What it would find is known here
    but for the tensors' dtypes and whether 16 divides their addresses: for each such case it compiles once.
    """

    def __init__(
        self, kernel: Any, programs: int, tensors: int, numbers: Sequence[float], constants: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """``tensors``: how many; the numbers follow them, and then such of the constants as the kernel knows."""
        self.kernel, self.programs, self.options = kernel, programs, options
        # In their order: compiled kernels know no names.
        self.rest = *numbers, *(constants[name] for name in kernel.arg_names[tensors + len(numbers) :])
        self._compiled: dict[Any, Callable[..., None]] = {}

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        """Launch on the device of the first tensor."""
        device, places = tensors[0].device, [tensor.data_ptr() for tensor in tensors]
        case = (device, *(tensor.dtype for tensor in tensors), *(place % 16 == 0 for place in places))
        run = self._compiled.get(case)
        with resident.on(device):
            if run is not None:
                run(*places, *self.rest)
                return
            made = self.kernel[(self.programs,)](*tensors, *self.rest, **self.options)
            if made is not None:  # as it is under Triton's interpreter
                self._compiled[case] = made[(self.programs, 1, 1)]
