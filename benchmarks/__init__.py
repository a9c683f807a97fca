"""How fast a step is, beside the peers and beside what memory allows. Run with `make bench`."""
