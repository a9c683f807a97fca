"""Networks. They know nothing of data, optimisers or codes."""
