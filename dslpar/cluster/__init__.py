"""Which hosts there are, and the launchers that start ranks on them, a module each.

In: a hostfile in any launcher's syntax, or the environment of Slurm or PBS; a request to start a job on them. Out: a
`Cluster` of hosts with slots; a launcher's command lines, and where a rank beneath it stands.
"""
