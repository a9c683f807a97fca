"""What is learned: data, model, loss and metric. No optimiser is named here."""

from collections.abc import Callable

from madam_lab.tasks.cifar import Cifar10, Cifar100
from madam_lab.tasks.digits import Digits
from madam_lab.tasks.gan import ConditionalGan
from madam_lab.tasks.imagenet import ImageNet, Imagenette
from madam_lab.tasks.small import SMALL
from madam_lab.tasks.task import Task
from madam_lab.tasks.wikitext import WikiText2

# Called with (folder of the data sets, device, batch=, seed=, smoke=, and arguments of the model).
TASKS: dict[str, Callable[..., Task]] = {
    task.name: task for task in (Digits, Cifar10, Cifar100, WikiText2, ConditionalGan, ImageNet, Imagenette, *SMALL)
}

__all__ = ["TASKS", "Task"]
