"""Lint many files in one process, and long files: CPU time per file and per line, with all rules and printing.

The files are random: GPT in all tensor modes, pipelines and ZeRO stages, in plain form, in LiBai's form and as lists of
layers. Every third has a mistake. The cost must grow no faster than a file's statements, layers or mistakes.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from math import log
from statistics import mean, stdev

from benchmarks.measure import Ratio, ratio
from dslpar.linter import check
from dslpar.linter.report import text as report_text

FILES = 1000
MOST_MS = 5.0
MOST_EXPONENT = 1.1
"""Largest exponent of a file's length in its cost. 1 is linear; fixed costs make it smaller."""
FACTORS = (1, 2, 4, 8, 16)
WORLDS = (8, 16, 64)


def ratios() -> Iterator[Ratio]:
    """Yield milliseconds per file, and the growth of the cost with a file's length."""
    rng = random.Random(0)
    costs = [1e3 * cost_s(config(rng), rng.choice(WORLDS)) for _ in range(FILES)]
    yield ratio(f"dslpar lint, ms of CPU a file, median of {FILES}", costs, MOST_MS)
    middle, around = mean(costs), 1.96 * stdev(costs) / FILES**0.5
    yield Ratio(f"dslpar lint, ms of CPU a file, mean of {FILES}", middle, middle - around, middle + around, MOST_MS)
    for name, long_file in LONG.items():
        of_lengths = costs_of_lengths(long_file)
        print(f"  {name}: " + ", ".join(f"{1e6 * each:.0f} us a line of {n}" for n, each in of_lengths.items()))
        grows = exponent({lines: each * lines for lines, each in of_lengths.items()})
        yield Ratio(f"dslpar lint, exponent of a file's length: {name}", grows, grows, grows, MOST_EXPONENT)


def cost_s(text: str, world: int, path: str = "cfg.py") -> float:
    """Return the CPU seconds to read, lint and print one file."""
    began = time.process_time()
    config = check.load_text(text, path)
    report_text.text(check.lint(config, world), config.sources)
    return time.process_time() - began


def costs_of_lengths(long_file: Callable[[int], str], times: int = 5) -> dict[int, float]:
    """Return CPU seconds by number of lines: the smallest of several, in turns."""
    texts = [long_file(FACTORS[-1] * 4 * factor) for factor in FACTORS]
    costs = [[cost_s(text, 8) for text in texts] for _ in range(times)]
    return {text.count("\n"): min(each) / text.count("\n") for text, *each in zip(texts, *costs, strict=True)}


def exponent(costs: Mapping[int, float]) -> float:
    """Return the slope of log(cost) over log(length), by least squares."""
    points = [(log(length), log(cost)) for length, cost in costs.items()]
    x, y = (mean(each) for each in zip(*points, strict=True))
    return float(sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points))


# Files of every kind ----------------------------------------------------------------------------------------------

_TENSORS = (
    "None",
    "dict(size=2, mode='1d')",
    "dict(size=4, mode='1d', sequence=True)",
    "dict(size=4, mode='2d')",
    "dict(size=8, mode='2.5d', depth=2)",
    "dict(size=8, mode='3d')",
    "dict(size=6, mode='cuboid', shape=(1, 2, 3))",
    "dict(size=4, mode='sequence', impl='ulysses')",
)
_MISTAKES = (
    "parallel.pipline = 2",
    "train.stepz = 10",
    "optimizer = dict(type='AdmaW', lr=-1)",
    "deepspeed = dict(gradient_cliping=1.0, zero_optimisation=dict(stage=1))",
    "model.num_heads = 7",
    "zero = dict(stage=9)",
    "lr_scheduler = dict(type='cosine', warmup_steps=10**6)",
    "batch = dict(global_size=7, micro_size=2)",
    "unused = dict(a=1)\nalso = undefined + 1",
)


def config(rng: random.Random) -> str:
    """Return a realistic config; every third has a mistake."""
    text = rng.choice((_plain, _libai, _listed))(rng)
    return text + (rng.choice(_MISTAKES) + "\n" if rng.random() < 1 / 3 else "")


def _plain(rng: random.Random) -> str:
    heads, layers = rng.choice((12, 16, 24)), rng.choice((8, 12, 24, 48))
    llama = rng.choice(("", ", norm='rmsnorm', activation='swiglu', positions='rotary', bias=False"))
    stages = rng.choice(("1", "2", "4", "dict(size=2, method='uniform')"))
    return f"""# A GPT of {layers} layers.
HEADS, LAYERS = {heads}, {layers}
WIDTH = HEADS * {rng.choice((32, 64))}
parallel = dict(pipeline={stages}, tensor={rng.choice(_TENSORS)})
model = dict(type='GPT', num_layers=LAYERS, hidden_size=WIDTH, num_heads=HEADS, vocab_size={rng.choice((256, 50304))},
             max_seq_len={rng.choice((512, 1024))}{llama})
optimizer = dict(type={rng.choice(("AdamW", "SGD", "RMSprop", "Lamb"))!r}, lr=3e-4, weight_decay=0.01)
lr_scheduler = dict(type={rng.choice(("constant", "linear", "cosine"))!r}, warmup_steps=10)
zero = dict(stage={rng.randrange(4)}, overlap_comm={rng.random() < 0.5})
precision = {rng.choice(("'fp32'", "'bf16'", "dict(dtype='fp16', loss_scale_window=500)"))}
batch = dict(micro_size={rng.choice((1, 4, 12))}, accumulation={rng.choice((1, 8, 16))})
activation_checkpoint = {rng.choice((None, 1, 2))}
train = dict(steps=1000, seed={rng.randrange(1000)}, clip_grad_norm=1.0, log_interval=10, save_interval=100)
checkpoint = dict(keep=3)
monitor = dict(csv=True)
"""


def _libai(rng: random.Random) -> str:
    return f"""from dslpar import LazyCall, get_config
from dslpar.models import GPT
train = get_config("common/train.py").train
cfg = dict(hidden_layers={rng.choice((8, 12))}, hidden_size=384, num_attention_heads=12, vocab_size=50304,
           max_seq_length=1024)
model = LazyCall(GPT)(cfg=cfg)
train.dist.tensor_parallel_size = {rng.choice((1, 2, 4))}
train.dist.pipeline_parallel_size = {rng.choice((1, 2))}
train.dist.pipeline_num_layers = model.cfg.hidden_layers
train.steps, train.seed = 200, {rng.randrange(1000)}
batch = dict(global_size=64, micro_size={rng.choice((1, 2))})
"""


def _listed(rng: random.Random) -> str:
    return f"""WIDTHS = [784] + [{rng.choice((64, 256))}] * {rng.randrange(2, 30)} + [10]
layers = []
for index in range(len(WIDTHS) - 1):
    layers.append(dict(type='Linear', in_features=WIDTHS[index], out_features=WIDTHS[index + 1]))
    layers.append(dict(type='ReLU'))
model = dict(type='Sequential', layers_cfg=layers)
parallel = dict(pipeline={rng.choice((1, 2))})
optimizer = dict(type='SGD', lr=0.1, momentum=0.9)
batch = dict(micro_size=8, accumulation={rng.choice((1, 8))})
"""


# Long files -------------------------------------------------------------------------------------------------------

_GPT = "model = dict(type='GPT', num_layers=8, hidden_size=96, num_heads=24, vocab_size=256, max_seq_len=96)\n"


def _statements(lines: int) -> str:
    return _GPT + "".join(f"_n{index} = dict(a={index}, b=[{index} * 2, 'x'])\n" for index in range(lines))


def _layers(lines: int) -> str:
    layers = "".join(f"    dict(type='Linear', in_features=8, out_features=8),  # {index}\n" for index in range(lines))
    return f"model = dict(type='Sequential', layers_cfg=[\n{layers}])\nparallel = dict(pipeline=4)\n"


def _mistakes(lines: int) -> str:
    wrong = "".join(f"    gradient_cliping_{index}=1.0,\n" for index in range(lines))
    return f"{_GPT}deepspeed = dict(\n{wrong})\n"


LONG: Mapping[str, Callable[[int], str]] = {"statements": _statements, "layers": _layers, "mistakes": _mistakes}
"""By the growing part: a function from a number of lines to the text of a file."""
