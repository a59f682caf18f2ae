"""Cluster: a job's hosts, and the launchers that start ranks on them, one module per launcher.

Input: a hostfile in any launcher's syntax or the environment of Slurm or PBS, and a request to start a job. Output: a
`Cluster` of hosts with slots (places for one rank each), a launcher's command lines, and each rank's rank, local rank
and world size.
"""
