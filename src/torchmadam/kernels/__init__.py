"""Operators that PyTorch dispatches by device."""
