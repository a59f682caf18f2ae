"""Which hosts there are: hostfiles, node lists of schedulers, the hosts chosen among them, and their addresses.

In: a hostfile in any launcher's syntax, or the environment of Slurm or PBS. Out: a `Cluster` of hosts with slots.
"""
