"""The paper's experiments, by command."""
