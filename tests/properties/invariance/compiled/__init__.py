"""The table with layers that torch compiles: `make prove PART=compiled`."""
