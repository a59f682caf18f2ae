"""The table with collectives cut into parts under products: `make prove PART=overlap`."""
