"""Which hosts there are: hostfiles, node lists of schedulers, what was chosen of them, and their addresses."""
