"""A language model, end to end: text to tokens, training, sampling, and what fits into memory."""
