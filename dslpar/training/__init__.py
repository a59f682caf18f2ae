"""The training program that launchers start on every rank: `python -m dslpar.training --config FILE`, or train.py.

In: a command line and the environment of a launcher. Out: a run folder (metrics, log, checkpoints) and an exit status.
`main` is a rank from start to end, `loop` takes the steps, and `metrics` computes what they report.
"""
