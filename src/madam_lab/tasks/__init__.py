"""What is learned: data, model, loss and metric. No optimiser is named here."""
