"""Output of a job: the run folder, the log, monitors, and the report of `dslpar show`.

Input: a resolved `Job`, and the metrics of each step. Output: `config.yaml`, `metrics.jsonl`, `log.txt`, lines on the
terminal, DeepSpeed's monitors, and a layout as text or JSON. From run folders it reads the state of each run
(`run_list`), and its curves (`curves`) as SVG, PNG or characters. Nothing here imports torch.
"""
