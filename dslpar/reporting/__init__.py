"""Output of a job: the run folder, the log, monitors and plots, and reading of run folders.

Input: a resolved `Job`, and the metrics of each step. Output: `config.yaml`, `metrics.jsonl` and `log.txt` in the run
folder, lines on the terminal, values for DeepSpeed's monitors, and a layout as a record for JSON. From existing run
folders the package reads the state of each run (`run_list`) and its curves (`curves`), and draws curves as SVG, PNG or
characters. The package does not import torch.
"""
