"""Hugging Face: Trainer, Accelerate, LoRA adapters, and going on from trained weights. docs/huggingface.md."""
