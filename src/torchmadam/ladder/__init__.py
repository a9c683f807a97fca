"""Weights that are codes: number systems, packing, and the tensor that holds them."""
