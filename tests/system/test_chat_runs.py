"""train.py on conversations: one curve on every layout and after a resume on another, packed or not."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from dslpar.core.visible import visible_lines
from tests.support.forked_training import start_job, train_alone
from tests.support.runs import metrics, start
from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

if not HAS_TRANSFORMERS:
    pytest.skip(NO_TRANSFORMERS, allow_module_level=True)

pytestmark = pytest.mark.prove

GPT = "type='GPT', num_layers=2, hidden_size=16, num_heads=2, vocab_size=256, max_seq_len=256, positions='rotary'"
LLAMA = (
    "type='transformers.LlamaForCausalLM', config=dict(vocab_size=256, hidden_size=16, intermediate_size=32, "
    "num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=256)"
)
CONFIG = """\
model = dict({model})
optimizer = dict(type='SGD', lr=0.1, momentum=0.9)
batch = dict(global_size=4)
train = dict(steps=6, eval_interval=6, eval_steps=1, save_interval=3)
data = dict(type='chat', files=['chat.jsonl'], seq_len=256, packing={packing}, eval_fraction=0.2)
"""


def config(folder: Path, model: str, packing: bool) -> str:
    """Return a config with forty conversations; an epoch ends within the run, in the middle of a step."""
    lines = []
    for number in range(40):
        turns = [("user", f"{number}+{turn}?", "assistant", str(number + turn)) for turn in range(1 + number % 3)]
        said = [{"role": role, "content": text} for turn in turns for role, text in (turn[:2], turn[2:])]
        lines.append(json.dumps({"messages": said}))
    (folder / "chat.jsonl").write_text("\n".join(lines))
    (folder / "cfg.py").write_text(CONFIG.format(model=model, packing=packing))
    return str(folder / "cfg.py")


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in metrics(folder)] + [metrics(folder)[-1]["eval_loss"]]


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("layout", ["{'pipeline': 2}", "{'tensor': {'size': 2, 'mode': '1d'}}", "{'data': 2}"])
def test_the_curve_is_the_same_after_a_resume_elsewhere(tmp_path: Path, model: str, packing: bool, layout: str) -> None:
    written = config(tmp_path, model, packing)
    alone, spread = tmp_path / "alone", tmp_path / "spread"
    assert train_alone("--config", written, f"train.output_dir={alone}").status == 0
    half = ("train.steps=3", "train.eval_interval=3", f"train.output_dir={spread}")
    assert train_alone("--config", written, *half).status == 0
    said = tmp_path / "said.txt"
    changes = [f"parallel={layout}", f"train.output_dir={spread}"]
    with start_job(2, ["--config", written, "--resume", *changes], said) as job:
        assert job.wait(120) == [0, 0], said.read_text()
    assert losses(spread) == pytest.approx(losses(alone), rel=1e-5)
    assert losses(alone)[0] > losses(alone)[-2]


def test_another_template_is_another_run(tmp_path: Path) -> None:
    written = config(tmp_path, GPT, True)
    output = f"train.output_dir={tmp_path / 'out'}"
    assert train_alone("--config", written, output, "train.steps=3").status == 0
    template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    (tmp_path / "own.jinja").write_text(template)
    done = train_alone("--config", written, output, "--resume", "data.template=own.jinja")
    assert done.status == 1
    assert "CKP202" in done.output
    done = train_alone("--config", written, output, "--resume", "data.packing=False")
    assert done.status == 1
    assert "CKP202" in done.output


def test_a_prompt_is_asked_as_training_has_written_it(tmp_path: Path) -> None:
    written = config(tmp_path, GPT, False)
    assert train_alone("--config", written, f"train.output_dir={tmp_path / 'out'}", "train.steps=3").status == 0
    command = [sys.executable, "-m", "dslpar", "generate", str(tmp_path / "out"), "--max-tokens", "8"]
    asked = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    plain = start([*command, "--prompt", asked, "--stop", "<|im_end|>", "--format", "json"])
    chat = start([*command, "--chat", "--prompt", "1+1?", "--format", "json"])
    assert (plain.status, chat.status) == (0, 0), plain.output + chat.output
    assert json.loads(chat.output) == json.loads(plain.output)
    shown = start([*command, "--chat", "--prompt", "1+1?"]).output
    assert "im_start" not in shown, "the answer alone"
    assert shown == visible_lines(json.loads(chat.output)[0]["text"]) + "\n"
