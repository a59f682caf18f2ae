"""Random launch scripts, made of the constructs that `dslpar import` claims to read, and bash as their oracle."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

NAMES = ("A", "B", "OPTS", "CMD")
ARRAYS = ("ARGS", "MORE")
OUTSIDE = "FLAG"
"""Variable of the environment, which no script sets."""
WORDS = ("1", "2.5", "abc", "a/b", "1e-4", "x_y", "949,50,1")
OPTIONS = ("--num-layers", "--lr", "--save", "--fp16", "--bf16", "--swiglu", "--other", "--data-path")
LAUNCHERS = (
    "python train.py",
    "torchrun --nproc_per_node 8 train.py",
    "deepspeed --hostfile hosts train.py",
    "python -u -m torch.distributed.launch --nproc_per_node=2 train.py",
    "accelerate launch --num_processes 4 train.py",
    "srun -l --output=x.log python train.py",
)
STUBS = ("python", "torchrun", "deepspeed", "accelerate", "srun", "hostname")
STUB = '#!/bin/sh\n{ printf "%s\\001" "$@"; printf "\\002"; } >> "$RECORD"\n'


class Writer:
    """Writes one random script."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)

    def script(self) -> str:
        """Return a script with a launch, perhaps in a branch, a function, `eval` or `bash -c`."""
        lines = ["N=5", "A=1", "B='--x 2'", 'OPTS="--lr 3"', "CMD=abc", "ARGS=(--num-layers 4)", "MORE=()"]
        lines += [self.statement(2) for _ in range(self.draw.randint(1, 6))]
        return "\n".join([*lines, self.launch(), ""])

    def pick(self, items: Sequence[str]) -> str:
        return self.draw.choice(items)

    def option(self) -> str:
        """Return an option, with or without a value."""
        name = self.pick(OPTIONS)
        takes = name not in ("--fp16", "--bf16", "--swiglu")
        return f"{name}{self.pick((' ', ' ', '='))}{self.value()}" if takes else name

    def value(self) -> str:
        """Return a word that is one value."""
        plain = self.pick(WORDS)
        return self.pick(
            (
                plain,
                f"'{plain} b'",
                f'"{plain}"',
                f'"a $A {plain}"',
                "$A",
                '"${CMD}"',
                f'"${{B:-{plain}}}"',
                f"${{NOT_SET:-{plain}}}",
                f'${{NOT_SET:-"{plain} c"}}',
                "$((N + 3 * 2))",
                "$(( (7 - 2) / 2 % 3 ))",
                f"a\\ {plain}",
                "${#CMD}",
                "${CMD%c}",
                "${CMD##a}",
                "${CMD/b/z}",
                '"${ARGS[1]}"',
                "${CMD:1:1}",
                "$(hostname)",
                f'"${OUTSIDE}"',
                "$1",
                "${1:-one}",
            )
        )

    def expansion(self) -> str:
        """Return words that may be several arguments, or none."""
        return self.pick(
            (
                "$OPTS",
                "${B}",
                '"${ARGS[@]}"',
                "${ARGS[@]}",
                '"${MORE[@]}"',
                "${MORE[*]}",
                '"$@"',
                "${NOT_SET:+--swiglu}",
            )
        )

    def arguments(self) -> str:
        parts = [self.draw.choice((self.option, self.option, self.expansion))() for _ in range(self.draw.randint(1, 6))]
        return self.pick((" ", " \\\n    ")).join(parts)

    def statement(self, depth: int) -> str:
        kinds = [self.assignment, self.assignment, self.array, self.array, self.noise]
        if depth:
            kinds += [self.branch, self.branch, self.loop, self.case, self.function]
        return self.draw.choice(kinds)(depth)  # type: ignore[operator]

    def assignment(self, depth: int) -> str:
        name = self.pick(NAMES)
        return self.pick(
            (
                f"{name}={self.value()}",
                f'{name}="{self.option_text()}"',
                f'{name}="${{{name}}} {self.option_text()}"',
                f"{name}+=' {self.option_text()}'",
                f"export {name}={self.value()}",
                f": ${{{name}:={self.pick(WORDS)}}}",
                f"unset {name}",
                f'{name}=""',
                f"{name}={self.pick(WORDS)} # a comment",
            )
        )

    def option_text(self) -> str:
        name = self.pick(OPTIONS)
        return name if name in ("--fp16", "--bf16", "--swiglu") else f"{name} {self.pick(WORDS)}"

    def array(self, depth: int) -> str:
        name = self.pick(ARRAYS)
        return self.pick(
            (
                f"{name}=(\n  {self.option()}   # why\n  {self.option()}\n)",
                f"{name}+=({self.option()})",
                f'{name}+=("${{{self.pick(ARRAYS)}[@]}}" {self.option()})',
                f"{name}=()",
            )
        )

    def noise(self, depth: int) -> str:
        return self.pick(
            (
                "mkdir -p out && cd .",
                "echo starting $OPTS > /dev/null",
                "cat <<EOF > notes\npython train.py --not-me 1 2 3\nEOF",
                "cat <<-'END' >/dev/null\n\t$A `x` \"\n\tEND",
                'grep -q x <<< "$A" || true',
                "set -e -o pipefail",
                "[ -d out ] || mkdir out",
                "(A=5; CMD=sub)",
                "export CUDA_DEVICE_MAX_CONNECTIONS=1",
                "exec 3>&1",
                "true 2>&1 | cat",
            )
        )

    def condition(self) -> str:
        return self.pick(
            (
                '[ "$A" = "1" ]',
                "[[ $CMD == a* ]]",
                '[ -z "$MORE" ]',
                "[ ${#ARGS[@]} -gt 2 ]",
                "(( N > 0 ))",
                "true",
                "! false",
                '[[ -n "$CMD" && "$B" != "x" ]]',
                "[ 3 -lt 4 -a a = a ]",
                f'[ "${OUTSIDE}" = "1" ]',
                f'[[ -n "${{{OUTSIDE}:-}}" ]]',
                f'[ -n "${OUTSIDE}" ] && [ $A = 1 ]',
                "test -f /nowhere/at/all",
            )
        )

    def branch(self, depth: int) -> str:
        then, other, one = self.statement(depth - 1), self.statement(depth - 1), self.assignment(0)
        return self.pick(
            (
                f"if {self.condition()}; then\n{then}\nfi",
                f"if {self.condition()}\nthen\n{then}\nelse\n{other}\nfi",
                f"if {self.condition()}; then {one}\nelif {self.condition()}; then\n{then}\nelse\n{other}\nfi",
                f"{self.condition()} && {self.assignment(0)}".replace(" # a comment", ""),
                f"if {self.condition()}; then\n{then}\nelse\nexit 3\nfi",
            )
        )

    def loop(self, depth: int) -> str:
        body = self.statement(depth - 1)
        return self.pick(
            (
                f'for X in a "b c" $A; do\n{self.pick(NAMES)}="$X"\n{body}\ndone',
                f"for X in 1 2 3; do\nif [ $X = 2 ]; then {self.pick(('continue', 'break'))}; fi\n{body}\ndone",
                f'while [ -n "${OUTSIDE}" ]; do\n{body}\nbreak\ndone',
                f"I=0\nwhile (( I < 2 )); do\n{body}\nI=$((I + 1))\ndone",
                f"for ((I=0; I<2; I++)); do\n{body}\ndone",
            )
        )

    def case(self, depth: int) -> str:
        subject = self.pick(("$CMD", '"$A"', f"${OUTSIDE}"))
        return (
            f"case {subject} in\n  a*|z) {self.assignment(0)} ;;\n  1)\n{self.statement(depth - 1)}\n;;\n"
            f"  *) {self.array(0)}\n;;\nesac"
        ).replace(" # a comment ;;", " ;;")

    def function(self, depth: int) -> str:
        return (
            f'prepare() {{\nlocal A=$1\n{self.assignment(0)}\nif [ "$A" = "{self.pick(WORDS)}" ]; then return; fi\n'
            f"{self.statement(depth - 1)}\n}}\nprepare {self.value()} {self.value()}"
        )

    def launch(self) -> str:
        command = f"{self.pick(LAUNCHERS)} {self.arguments()}"
        flat = command.replace(" \\\n    ", " ")
        quoted = re.sub(r'([\\"$])', r"\\\1", flat)
        return self.pick(
            (
                command,
                f"{command} 2>&1 | tee out.log",
                f"{command} > out.log 2>&1 &\nwait",
                f"NCCL_DEBUG=INFO {command}",
                f'start() {{\n{command} "$@"\n}}\nstart --fp16',
                f"{{ {command}; }}",
                f'RUN="{quoted} &> out.log"\neval $RUN',
                'RUN="python train.py $OPTS --fp16"\n$RUN',
                'RUN="python train.py $OPTS --fp16"\nbash -c "$RUN"',
                "export OPTS\nsh -c 'python train.py $OPTS --save '\"$A\"",
                f"if {self.condition()}; then\n{command}\nelse\n{command} --swiglu\nfi",
            )
        )


def bash_argv(script: str, folder: Path, environment: Mapping[str, str]) -> list[list[str]]:
    """Return the words that each program after `train.py` receives when bash runs the script."""
    stubs = folder / "bin"
    if not stubs.exists():
        stubs.mkdir()
        for name in STUBS:
            (stubs / name).write_text(STUB if name != "hostname" else "#!/bin/sh\necho host-1\n")
            (stubs / name).chmod(0o755)
    work = folder / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    record = folder / "record"
    record.write_bytes(b"")
    (work / "run.sh").write_text(script)
    env = {"PATH": f"{stubs}:{os.environ['PATH']}", "RECORD": str(record), **environment}
    subprocess.run(["bash", "run.sh"], cwd=work, env=env, capture_output=True, timeout=20, check=False)
    found = []
    for chunk in record.read_bytes().decode(errors="replace").split("\2")[:-1]:
        words = chunk.split("\1")[:-1]
        if "train.py" in words:
            found.append(words[words.index("train.py") + 1 :])
    return found
