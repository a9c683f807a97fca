"""One thread a test process: `make` runs as many processes as there are cores."""

import torch

torch.set_num_threads(1)
