"""Pictures as PNG files, written with what Python brings along."""

import struct
import zlib

import torch
from torch import Tensor


def encoded(picture: Tensor) -> bytes:
    """A picture, height x width x 3 bytes, as a PNG file. Rows are stored as differences from the row above."""
    if picture.dtype != torch.uint8 or picture.dim() != 3 or picture.shape[2] != 3:
        raise ValueError(f"a picture is height x width x 3 bytes, and this is {tuple(picture.shape)} {picture.dtype}")
    height, width, _ = picture.shape
    rows = picture.cpu().reshape(height, 3 * width)
    above = torch.cat([torch.zeros_like(rows[:1]), rows[:-1]])
    filtered = torch.cat([torch.full((height, 1), 2, dtype=torch.uint8), rows - above], 1)  # 2: the filter "up"
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits a channel, RGB
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(filtered.numpy().tobytes(), 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in parts)


def sheet(pictures: Tensor, columns: int) -> Tensor:
    """Pictures, n x side x side x 3, side by side and row by row, as one."""
    count, height, width, channels = pictures.shape
    rows = pictures.view(count // columns, columns, height, width, channels)
    return rows.transpose(1, 2).reshape(-1, columns * width, channels)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
