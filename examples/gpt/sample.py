"""Text from a trained model."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from examples.gpt.data import restored
from examples.gpt.methods import Method, autocast, build
from examples.gpt.model import GPT, Shape


def read(path: Path) -> dict[str, Any]:
    """A checkpoint, on the CPU. Only tensors and plain values are read; nothing in it is executed."""
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:  # the reader's own errors are of many kinds
        raise ValueError(f"{path} is no checkpoint of this program, or is damaged ({error})") from error
    return state


def sample(path: Path, prompt: str, count: int, temperature: float, top: int, seed: int, device: torch.device) -> str:
    """The prompt and what a checkpoint's model makes of it."""
    state = read(path)
    settings = state["settings"]
    method = Method.of(settings["method"]["name"])
    model, _ = build(Shape(**settings["shape"]), method, device, seed=settings["seed"])
    model.load_state_dict(state["model"])
    tokenizer = restored(state["tokenizer"])
    # A model continues something: without a prompt, a new line.
    tokens = torch.from_numpy(tokenizer.encode(prompt.encode() or b"\n").astype("int64")).to(device)
    random = torch.Generator(device).manual_seed(seed)
    with autocast(device, method):
        tokens = continued(model, tokens, count, temperature, top, random)
    return tokenizer.decode(tokens.tolist())


@torch.no_grad()
def continued(model: GPT, tokens: Tensor, count: int, temperature: float, top: int, random: torch.Generator) -> Tensor:
    """So many more tokens, each drawn from the ``top`` likeliest, or from all if 0; at temperature 0, the likeliest.

    Every token runs the whole context again, which keeps the model free of a cache of keys and values.
    """
    for _ in range(count):
        logits = model(tokens[None, -model.shape.length :])[0, -1]
        if temperature == 0:
            drawn = logits.argmax()[None]
        else:
            best, places = logits.topk(min(top or len(logits), len(logits)))
            drawn = places[torch.multinomial(torch.softmax(best / temperature, 0), 1, generator=random)]
        tokens = torch.cat([tokens, drawn])
    return tokens
