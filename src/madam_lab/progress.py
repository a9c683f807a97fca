"""How a run shows where it is: a bar on a terminal, plain lines elsewhere."""

import math
import sys
import time
from collections.abc import Callable
from typing import Any


class Progress:
    """Epoch, loss, metric and time left of one run; ``left`` is told the latter after every epoch."""

    def __init__(
        self, title: str, epochs: int, quiet: bool = False, left: Callable[[float], None] | None = None
    ) -> None:
        self._title, self._epochs, self._left = title, epochs, left
        self._bar: Any = None
        self._begun: tuple[float, float] | None = None
        self._spoke = time.monotonic()
        self._quiet = quiet
        if not quiet and left is None and sys.stderr.isatty():  # bars of several runs would be one mess
            from tqdm import tqdm

            form = "{l_bar}{bar}| epoch {n:.1f}/{total} [{elapsed}<{remaining}{postfix}]"
            self._bar = tqdm(total=epochs, desc=title, bar_format=form)

    def step(self, done: float) -> None:
        """So many epochs are done, fractions included."""
        if self._begun is None:
            self._begun = (time.monotonic(), done)
        if self._bar is not None:
            self._bar.update(done - self._bar.n)

    def epoch(self, number: int, point: dict[str, Any]) -> None:
        """An epoch is over."""
        known = [name for name in ("loss", "train", "valid", "test") if not math.isnan(point.get(name, math.nan))]
        scores = {name: f"{point[name]:.4g}" for name in known}
        if self._bar is not None:
            self._bar.set_postfix(scores)
            return
        now = time.monotonic()
        begun, first = self._begun or (now, float(number))
        left = (now - begun) / max(number - first, 1e-9) * (self._epochs - number)
        if self._left is not None:
            self._left(left)
        if self._quiet or (now - self._spoke < 10 and number not in (1, self._epochs)):
            return
        self._spoke = now
        shown = ", ".join(f"{name} {value}" for name, value in scores.items())
        print(f"{self._title}: epoch {number}/{self._epochs}, {shown}, {left:.0f} s left", flush=True)

    def close(self) -> None:
        """Leave the terminal in order."""
        if self._bar is not None:
            self._bar.close()
