"""Cluster: a job's hosts, and the launchers that start ranks on them, one module per launcher.

Input: a hostfile in any launcher's syntax or the environment of Slurm or PBS, and a request to start a job. Output: a
`Cluster` of hosts with slots, a launcher's command lines, and a rank's place in its job.
"""
