"""What people see of a job: the run folder, the log, monitors, and `dslpar show`.

In: a resolved `Job`, and the numbers of each step. Out: `config.yaml`, `metrics.jsonl`, `log.txt`, lines on the
terminal, DeepSpeed's monitors, and a layout as text or JSON. Nothing here imports torch.
"""
