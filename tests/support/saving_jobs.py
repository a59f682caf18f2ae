"""The smallest job that saves a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dslpar.layout.resolve import Job, resolve
from dslpar.models.gpt import section
from dslpar.schema import sections as schema_sections

GPT = section.GPT(num_layers=2, hidden_size=8, num_heads=2, vocab_size=16, max_seq_len=4)


def job_of(output_dir: Path | str = "out", world: int = 1, **sections: Any) -> Job:
    plain: dict[str, Any] = {"model": GPT, "train": schema_sections.Train(output_dir=str(output_dir))}
    return resolve(schema_sections.Spec(**plain | sections), world, "cfg.py")
