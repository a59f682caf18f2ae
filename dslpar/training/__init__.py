"""The training program that launchers start on every rank: `python -m dslpar.training --config FILE`, or train.py.

Input: a command line and a launcher's environment. Output: a run folder (metrics, log, checkpoints) and an exit status.
`main` runs a rank from start to end, `loop` takes the steps, and `metrics` computes the numbers to report.
"""
