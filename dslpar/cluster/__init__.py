"""Which hosts there are: hostfiles, node lists of schedulers, filters over them, addresses; a row for each launcher.

In: a hostfile in any launcher's syntax, or the environment of Slurm or PBS. Out: a `Cluster` of hosts with slots.
"""
