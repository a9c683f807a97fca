"""Runs that are asked to stop."""

from madam_lab.trainer import Limits


class StopAfter(Limits):
    """Asks a run to stop after so many steps."""

    def __init__(self, steps):
        super().__init__()
        self.steps = steps

    def reached(self):
        self.steps -= 1
        return self.steps < 0
