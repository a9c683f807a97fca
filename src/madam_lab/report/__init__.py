"""Pictures and tables made from results."""
