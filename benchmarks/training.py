"""Pictures a second when a network trains on random pictures: ResNet-18 on those of CIFAR-10's size, or another."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from madam_lab import recipes
from madam_lab.looks import step_looked_at
from madam_lab.models.resnet import ResNet18
from madam_lab.optimisers import build_optimiser
from madam_lab.recipes import Recipe
from madam_lab.stepping import Stepper, settle
from madam_lab.tasks.task import Batch, Task, classification_sums, error_percent
from torchmadam import to_ladder_


class RandomPictures(Task):
    """One batch, again and again."""

    name, metric = "random", "error"

    def __init__(
        self,
        device: torch.device,
        batch: int,
        side: int = 32,
        classes: int = 10,
        make: Callable[[int], nn.Module] = ResNet18,
    ) -> None:
        self.device, self.steps, self._classes, self._make = device, 1, classes, make
        pictures = torch.randn(batch, 3, side, side, device=device).to(memory_format=torch.channels_last)
        self._batch = pictures, torch.randint(classes, (batch,), device=device)

    def model(self) -> nn.Module:
        """The network, channels_last."""
        net = self._make(self._classes)
        return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """The batch."""
        yield self._batch

    batches = epoch  # type: ignore[assignment]

    def loss(self, forward: Callable[[Tensor], Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
        """Cross entropy."""
        logits = forward(batch[0]).float()
        loss = F.cross_entropy(logits, batch[1])
        return loss, classification_sums(logits, batch[1], loss)

    def score(self, sums: Tensor) -> float:
        """Error in per cent."""
        return error_percent(sums)


def kinds() -> dict[str, Recipe]:
    """What is compared, first the peer."""
    return {
        "AdamW fused, float32": replace(recipes.get("cifar10_adam"), optimiser="adamw"),
        "Madam float32": recipes.get("cifar10_madam"),
        "Madam 12-bit": recipes.get("cifar10_madam_12bit"),
        "Madam signed 8-bit": replace(
            recipes.get("cifar10_madam_12bit"), ladder=recipes.get("digits_madam_signed8").ladder, conversion={}
        ),
    }


class Training:
    """A run that has made its first steps: compiled, and on a GPU captured."""

    def __init__(self, recipe: Recipe, device: torch.device, task: Task | None = None) -> None:
        settle(device)
        task = task or RandomPictures(device, recipe.batch if device.type == "cuda" else 16)
        torch.manual_seed(0)
        model = task.model()
        if recipe.ladder is not None:
            to_ladder_(model, recipe.ladder, **{"bound": 3.0, **recipe.conversion})
        model.to(device)
        self._device, on_gpu = device, device.type == "cuda"
        self._stepper = Stepper(recipe, task, model, build_optimiser(recipe, model, device), compiled=on_gpu)
        self._stepper.set_lr(recipe.lr_at(recipe.warm_up or 0))
        (self._batch,) = task.epoch(0)
        for _ in range(5):
            self._stepper.step(self._batch)

    def pictures_a_second(self, steps: int) -> float:
        """Forward, backward and step; the median of five stretches of ``steps``."""
        return len(self._batch[0]) / self._seconds_a_step(steps)

    def monitor_share(self, steps: int, every: int = 100) -> float:
        """The part of training time that a TrustMonitor takes which looks every so many steps."""
        step_looked_at(self._stepper, self._batch)
        step = self._seconds_a_step(steps)
        look = _seconds(lambda: step_looked_at(self._stepper, self._batch), self._device)
        return (look - step) / (every * step)

    def _seconds_a_step(self, steps: int) -> float:
        return _seconds(lambda: [self._stepper.step(self._batch) for _ in range(steps)], self._device) / steps


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """The median of five."""
    stretches = []
    for _ in range(5):
        _synchronise(device)
        begun = time.perf_counter()
        work()
        _synchronise(device)
        stretches.append(time.perf_counter() - begun)
    return sorted(stretches)[2]


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
