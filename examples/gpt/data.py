"""Text to tokens and back; batches that depend on nothing but the seed and the step."""

import functools
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Tokens = NDArray[Any]
Batch = tuple[Tensor, Tensor]


class Tokenizer(Protocol):
    """What turns bytes into tokens. ``saved`` restores it, with :func:`restored`."""

    vocabulary: int
    saved: str | None

    def encode(self, text: bytes) -> Tokens:
        """The tokens of a text."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens; what is no UTF-8 shows as a replacement character."""


class Bytes:
    """Every byte is a token."""

    vocabulary: int = 256
    saved: str | None = None

    def encode(self, text: bytes) -> Tokens:
        """The tokens of a text."""
        return np.frombuffer(text, dtype=np.uint8)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        return bytes(tokens).decode(errors="replace")


class BPE:
    """Byte-level byte-pair encoding: frequent sequences of bytes are tokens. Needs the package ``tokenizers``."""

    def __init__(self, saved: str) -> None:
        self._tokenizer = _package().Tokenizer.from_str(saved)
        self.saved: str | None = saved
        self.vocabulary: int = self._tokenizer.get_vocab_size()

    @classmethod
    def trained(cls, text: bytes, vocabulary: int) -> "BPE":
        """An encoding with at most this many tokens, made for a text."""
        package = _package()
        fresh = package.Tokenizer(package.models.BPE())
        fresh.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
        fresh.decoder = package.decoders.ByteLevel()
        every_byte = package.pre_tokenizers.ByteLevel.alphabet()
        trainer = package.trainers.BpeTrainer(
            vocab_size=vocabulary, initial_alphabet=every_byte, special_tokens=[], show_progress=False
        )
        fresh.train_from_iterator(_pieces(text), trainer)
        return cls(fresh.to_str())

    def encode(self, text: bytes) -> Tokens:
        """The tokens of a text."""
        encoded = self._tokenizer.encode_batch(list(_pieces(text)))
        return np.fromiter((i for piece in encoded for i in piece.ids), dtype=np.int32)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        return str(self._tokenizer.decode(list(tokens)))


def _package() -> Any:
    try:
        import tokenizers  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise ImportError(
            "--tokens bpe:N needs the package tokenizers: pip install tokenizers, or use --tokens bytes"
        ) from error
    return tokenizers


def _pieces(text: bytes, size: int = 100_000) -> Iterator[str]:
    """A text in pieces of whole lines, each of about so many characters, so that they are encoded side by side."""
    try:
        lines = text.decode().splitlines(keepends=True)
    except UnicodeDecodeError as error:
        raise ValueError(f"the text is no UTF-8 ({error}), which --tokens bpe needs; use --tokens bytes") from error
    piece: list[str] = []
    held = 0
    for line in lines:
        piece.append(line)
        held += len(line)
        if held >= size:
            yield "".join(piece)
            piece, held = [], 0
    if piece:
        yield "".join(piece)


def restored(saved: str | None) -> Tokenizer:
    """The tokenizer whose ``saved`` this is."""
    return Bytes() if saved is None else BPE(saved)


class Corpus:
    """A text in two parts, the last of which is for validation, as tokens.

    Attributes:
        digest: a hash of the text.
        bytes_per_token: of the validation text, to turn a loss into bits per byte.
    """

    def __init__(
        self, paths: Sequence[Path], kind: str, valid_share: float, tokenizer: Tokenizer | None = None
    ) -> None:
        text = b"\n".join(path.read_bytes() for path in paths)
        self.digest = hashlib.sha256(text).hexdigest()
        cut = int(len(text) * (1 - valid_share))
        while cut < len(text) and text[cut] & 0xC0 == 0x80:  # inside a character
            cut += 1
        self.tokenizer = tokenizer or _tokenizer(kind, text[:cut])
        self.train, self.valid = self.tokenizer.encode(text[:cut]), self.tokenizer.encode(text[cut:])
        self.bytes_per_token = (len(text) - cut) / max(len(self.valid), 1)

    def batch(self, step: int, batch: int, length: int, seed: int) -> Batch:
        """Inputs and targets of a step. An epoch sees every window once, in an order and at an offset of its own."""
        windows = (len(self.train) - length) // length
        if windows < batch or len(self.valid) <= length:
            raise ValueError(
                f"the text has {len(self.train):,} tokens to train on and {len(self.valid):,} to validate with, too "
                f"few for {batch} windows of {length}; use more text, a smaller --batch or a smaller --length"
            )
        epoch, at = divmod(step, windows // batch)
        offset, order = _order(seed, epoch, windows, length)
        return self._rows(self.train, offset + length * order[at * batch : (at + 1) * batch], length)

    def valid_batches(self, batch: int, length: int, tokens: int) -> Iterator[Batch]:
        """The validation text from its beginning, up to so many tokens, in full batches where there are any."""
        windows = max(min((len(self.valid) - 1) // length, tokens // length), 1)
        windows = windows - windows % batch if windows > batch else windows
        for start in range(0, windows, batch):
            yield self._rows(self.valid, length * np.arange(start, min(start + batch, windows)), length)

    @staticmethod
    def _rows(tokens: Tokens, starts: Tokens, length: int) -> Batch:
        rows = torch.from_numpy(np.stack([tokens[s : s + length + 1] for s in starts]).astype(np.int64))
        return rows[:, :-1], rows[:, 1:]


@functools.lru_cache(2)
def _order(seed: int, epoch: int, windows: int, length: int) -> tuple[int, Tokens]:
    random = np.random.default_rng((seed, epoch))
    return int(random.integers(length)), random.permutation(windows)


def _tokenizer(kind: str, text: bytes) -> Tokenizer:
    name, _, count = kind.partition(":")
    if kind == "bytes":
        return Bytes()
    if name == "bpe" and count.isdecimal() and int(count) >= 256:
        return BPE.trained(text, int(count))
    raise ValueError(f"--tokens {kind} is unknown; use bytes, or bpe:8192 for at most 8,192 tokens (256 or more)")
