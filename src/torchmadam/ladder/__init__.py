"""Weights that are codes: number systems, packing, and the tensor that holds them."""

from torchmadam.ladder import moves, products

__all__ = ["moves", "products"]
