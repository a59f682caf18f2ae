"""Arguments of a Python program in a shell script, found without running a shell."""

from __future__ import annotations

import random
import re
import subprocess

import pytest

from dslpar.core.errors import Finding
from dslpar.language.yaml_io import scalar
from dslpar.migrate.shell.arguments import MISSING, load_arguments
from tests.support.paths import ROOT

SCRIPT = ROOT / "tests/support/foreign_configs/megatron/pretrain_gpt.sh"
RUN = "python a.py"


@pytest.mark.parametrize(
    ("script", "values", "unknown"),
    [
        ("python a.py --x 1 --y=two --flag", {"--x": 1, "--y": "two", "--flag": True}, set()),
        ("A=1\nB=$A\npython a.py --x ${B} --y ${C:-3} --z ${C-'4'}", {"--x": 1, "--y": 3, "--z": 4}, set()),
        ("A='--x 1'\nA+=' --y 2'\npython a.py $A", {"--x": 1, "--y": 2}, set()),
        ("A=(--x 1)\nA+=(--y 'a b')\npython a.py ${A[@]}", {"--x": 1, "--y": ["a", "b"]}, set()),
        ("A=(--x 1)\nA+=(--y 'a b')\npython a.py \"${A[@]}\"", {"--x": 1, "--y": "a b"}, set()),
        ("N=4\npython a.py --x $((N * 2 + 10 / 3)) --y $(( $N % 3 ))", {"--x": 11, "--y": 1}, set()),
        ("python a.py --x $((-7 / 2)) --y $((1 < 2 ? 8 : 9))", {"--x": -3, "--y": 8}, set()),
        ("python a.py --x 1 2 3 --y -1", {"--x": [1, 2, 3], "--y": -1}, set()),
        ("python a.py --x \\\n  1 # --y 2\n", {"--x": 1}, set()),
        ("cat <<EOF > f\npython b.py --z 1 --q 2 --r 3\nEOF\npython a.py --x 1 --y 2", {"--x": 1, "--y": 2}, set()),
        ("cat <<-'END'\n\tx\n\tEND\npython a.py --x 1 <<< text", {"--x": 1}, set()),
        ("cmd=\"python a.py --x 1\"\neval $cmd", {"--x": 1}, set()),
        ("cmd=\"python a.py --x 1 &> out.log\"\necho ${cmd}\neval ${cmd}", {"--x": 1}, set()),
        ("cmd='python a.py --x 1'\nsrun -l --output=x sh -c \"$cmd\"", {"--x": 1}, set()),
        ("export A=1; B=2\nbash -lc 'python a.py --x $A --y $B'", {"--x": 1}, {"--y"}),
        ("python a.py --x 1 > out 2>&1 < in", {"--x": 1}, set()),
        ("if [ a = a ]; then A='--x 1'; else A='--y 1'; fi\npython a.py $A", {"--x": 1}, set()),
        ("A=(1 2)\nif [[ ${#A[@]} -eq 2 && -n $A ]]; then B=3; fi\npython a.py --x $B", {"--x": 3}, set()),
        ("case b in a) A=1;; b|c) A=2;; *) A=3;; esac\npython a.py --x $A", {"--x": 2}, set()),
        ("for A in 1 2; do B+=\" $A\"; done\npython a.py --x 1${B:+0}", {"--x": 10}, set()),
        ("B=\nfor A in 1 2; do B+=\" $A\"; done\npython a.py --x $B", {"--x": [1, 2]}, set()),
        ("f() { local A=$1; python a.py --x $A; }\nf 5", {"--x": 5}, set()),
        ("A='a/b.txt'\npython a.py --x ${A##*/} --y ${A%.*} --z ${A/b/c} --w ${A:2:1} --v ${A^^}",
         {"--x": "b.txt", "--y": "a/b", "--z": "a/c.txt", "--w": "b", "--v": "A/B.TXT"}, set()),
        ("A=${1:-\"runs/my run\"}\nB=${2:-'logs'}\npython a.py --x \"$A\" --y $B",
         {"--x": "runs/my run", "--y": "logs"}, set()),
        ("A=<Specify path>\nB=<Specify path to file>/vocab.json\npython a.py --save $A --x $B --y 1",
         {"--y": 1}, {"--save", "--x"}),
        ("python a.py --x $1 --y $(hostname) --z `pwd` --w $((1 / 0))", {}, {"--x", "--y", "--z", "--w"}),
        ("if a; then\nA=2\nfi\npython a.py --x $A --y 3", {"--y": 3}, {"--x"}),
        ("python a.py --x 1 --x 2", {"--x": 2}, set()),
        ("python a.py --sequence-parallel true --fp16 --lr 1",
         {"--sequence-parallel": True, "--fp16": True, "--lr": 1}, set()),
        ("[ $# -gt 0 ] || exit 1\npython a.py --x 1", {"--x": 1}, set()),
        ("if [ -z \"${A:-}\" ]; then exit 1; fi\npython a.py --x 1", {"--x": 1}, set()),
        ("[[ ab =~ (^|x)a(b|$) ]] && A=1\npython a.py --x 1", {"--x": 1}, set()),
        ("T=$1\npython a.py --x 1 --$T --y 2", {"--x": 1, "--y": 2}, set()),
        ("A=b\nmegatron sft --load c \\\n --x $A", {"--load": "c", "--x": "b"}, set()),
        ("python -m torch.distributed.launch --nproc_per_node 2 a.py --x 1", {"--x": 1}, set()),
        ("accelerate launch --num_processes 2 -m pkg.train --x 1", {"--x": 1}, set()),
        ("export L='python -m torch.distributed.run'\nexport C=\"`pwd`/a.py --x 1\"\nsrun bash -c '$L --rank $ID $C'",
         {"--x": 1}, set()),
        ("f() { if a; then return; fi; A=2; }\nA=1\nf\npython a.py --x $A", {}, {"--x"}),
        ("f() { return; A=2; }\nA=1\nf\npython a.py --x $A", {"--x": 1}, set()),
        ("A=1\nfor B in 1 2; do if a; then break; fi; A=2; done\npython a.py --x $A", {}, {"--x"}),
        ("for B in 1 2 3; do if [ $B = 2 ]; then break; fi; A=$B; done\npython a.py --x $A", {"--x": 1}, set()),
        ("for B in 1 2 3; do if [ $B = 3 ]; then continue; fi; A=$B; done\npython a.py --x $A", {"--x": 2}, set()),
        ("A=0\nwhile a; do A=1; done\npython a.py --x $A", {}, {"--x"}),
        ("A=0\nf() { A=1; }\nfor ((i = 0; i < 2; i++)); do f; done\npython a.py --x $A --y $i", {}, {"--x", "--y"}),
        ("A=1\nf() { local A=2; }\nf\npython a.py --x $A", {"--x": 1}, set()),
        ("A=1\n(A=2)\n{ A=3; } | cat\npython a.py --x $A", {"--x": 1}, set()),
        ("A=1 B=2 python a.py --x ${A:-5}", {"--x": 5}, set()),
        ("set -- 7 8\nshift\npython a.py --x $1 --y $#", {"--x": 8, "--y": 1}, set()),
    ],
)  # fmt: skip
def test_what_a_script_hands_over(script: str, values: dict[str, object], unknown: set[str]) -> None:
    config, _ = load_arguments(script, "run.sh")
    assert (config.root.plain(), config.unknown) == (values, unknown)


@pytest.mark.parametrize(
    ("script", "line", "message"),
    [
        ("if a; then\nB='--fp16'\nfi\npython a.py --x 1 $B", 4,
         f"{MISSING}: `if` of line 1 decides: '--fp16' or nothing"),
        ("E=()\nif [[ $X == 1 ]]; then E+=( --swiglu ); fi\npython a.py --sequence-parallel \"${E[@]}\"", 3,
         f"{MISSING}: `if` of line 2 decides: '--swiglu' or nothing"),
        ("python a.py --fp16 \"$@\"", 1, f"{MISSING}: $@ is what the script is called with"),
        ("python a.py --fp16 $EXTRA", 1, f"{MISSING}: the script does not set EXTRA"),
        ("python a.py --fp16 ${EXTRA:-}", 1, f"{MISSING}: the script does not set EXTRA"),
        ("O=\"--lr 1\n$EXTRA\"\nR=\"python a.py $O\"\neval $R", 2, f"{MISSING}: the script does not set EXTRA"),
        ("python a.py --fp16 data/*.bin", 1, f"{MISSING}: `data/*.bin` is a pattern of file names"),
        ("A=1\nif a; then A=2; fi\npython a.py --lr $A", 3,
         "`if` of line 2 decides: '2' or '1': write the value here"),
        ("source env.sh\npython a.py --lr 1", 1, "env.sh is not read: what it sets may change arguments"),
        ("source venv/bin/activate\npython a.py --lr 1 more", 2, "'more' is not the value of an argument"),
        ("for A in 1 2; do\npython a.py --lr $A\ndone", 2,
         "this starts a.py with other arguments each time: they are not in the result"),
        ("if a; then python a.py --lr 1\nelse python a.py --lr 2; fi", 2,
         "this starts a.py with other arguments than on line 1: they are not in the result"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_a_finding_at_its_place(script: str, line: int, message: str) -> None:
    config, _ = load_arguments(script, "run.sh")
    assert [(item.location.line, item.message) for item in config.findings] == [(line, message)]


def followed(script: str, finding: Finding) -> str:
    """Carry out the help of a finding to the letter; the author's values are stand-ins."""
    lines = script.split("\n")
    place = finding.location
    line, start, end = lines[place.line - 1], place.column - 1, place.end_column - 1
    values = {
        "write the value here": "7",
        "write them out": "--fp16",
        "leave it out": "",
        "write out what it sets": "A=1",
    }
    if finding.help == "write out what it sets":
        line = "A=1"
    elif finding.help in values:
        line = line[:start] + values[finding.help] + line[end:]
    else:
        assert finding.help == "import a script of its own that has only this command"
        line = RUN + " --lr 1"
        lines = [line if RUN in other else "" for other in lines[:1]] + [""] * (len(lines) - 1)
    lines[place.line - 1] = line
    return "\n".join(lines)


@pytest.mark.parametrize(
    "script",
    [
        "python a.py --save $1 --lr ${LR} --seed $(date +%s)",
        "A=<path>\npython a.py --save $A --load $A",
        "if a; then\nB='--swiglu'\nfi\npython a.py --lr 1 $B",
        'E=()\nif a; then E+=( --swiglu ); fi\npython a.py --fp16 "${E[@]}"',
        'python a.py --fp16 "$@" ${MORE} --save ~/runs',
        'O="--lr $LR $MORE"\nR="python a.py $O"\neval $R',
        "python a.py --data-path data/{a,b}.bin --lr 1 --fp16 data/*.bin",
        "source env.sh\npython a.py --lr 1 more",
    ],
)
def test_the_helps_work_when_they_are_followed_literally(script: str) -> None:
    config, _ = load_arguments(script, "run.sh")
    assert config.findings
    for _ in range(10):
        if not config.findings:
            break
        script = followed(script, config.findings[0])
        config, _ = load_arguments(script, "run.sh")
    assert (config.findings, config.unknown) == ((), frozenset()), script


def test_the_words_are_those_that_bash_hands_over() -> None:
    script = SCRIPT.read_text()
    printed = script.replace("torchrun", "printf '%s\\n'").replace("2>&1 | tee train.log", "")
    ended = subprocess.run(["bash", "-c", printed, "run.sh", "c", "d"], capture_output=True, text=True, check=True)
    words = ended.stdout.split()
    theirs = [scalar(word) for word in words[words.index("pretrain_gpt.py") + 1 :]]
    config, _ = load_arguments(script.replace("=$1", "=c").replace("=$2", "=d"), "run.sh")
    ours = [item for key, value in config.root.plain().items() for item in ((key,) if value is True else (key, value))]
    assert ours == theirs


ADDS = "A+=(${A[@]})\n"


@pytest.mark.parametrize(
    "text",
    [
        "A=xx\n" + "A=$A$A\n" * 60 + "python a.py --x $A",
        "A=(1 2)\n" + ADDS * 40,
        "f() { f; }\nf",
        "if a; then b; " + "elif a; then b; " * 2000 + "fi",
        "a" + " && a" * 3000,
        "A=$((" + "(" * 240 + ")" * 240 + "))",
        "for A in 1 2 3 4 5 6 7 8 9 0; do " * 8 + ":" + "; done" * 8,
    ],
)
def test_expansion_is_bounded(text: str) -> None:
    config, _ = load_arguments(text, "run.sh")
    assert [item.code for item in config.findings] == ["CFG005"]


@pytest.mark.parametrize("text", ["", "make all", "python a.py", "echo python a.py --x 1", "cat <<E\n"])
def test_no_arguments_are_a_finding(text: str) -> None:
    config, _ = load_arguments(text, "run.sh")
    assert not config.complete
    assert [item.code for item in config.findings] == ["CFG009"]
    assert config.findings[0].help


@pytest.mark.parametrize(
    ("first", "second", "code", "start"),
    [
        ("python a.py --x 1", "python b.py --y 2", "CFG010", MISSING),
        ("./a --x 1", "./b --y 2", "CFG009", "this command is not known"),
    ],
)
def test_an_unknown_command_is_a_finding_at_its_place(first: str, second: str, code: str, start: str) -> None:
    config, _ = load_arguments(f"if a; then C='{first}'; else C='{second}'; fi\neval $C", "run.sh")
    choices = f"{first.removeprefix('python ')!r} or {second.removeprefix('python ')!r}"
    assert [(item.code, item.location.line, item.message) for item in config.findings] == [
        (code, 2, f"{start}: `if` of line 1 decides: {choices}")
    ]


@pytest.mark.parametrize("text", ["(((", "'", '"$(', "a ${", "A=(", "if a; then b", "a | ", "a; ; b", "fi", "x <"])
def test_what_bash_cannot_parse_is_a_finding_at_its_place(text: str) -> None:
    assert subprocess.run(["bash", "-n", "-c", text], capture_output=True, check=False).returncode
    config, _ = load_arguments(f"{text}", "run.sh")
    assert not config.complete
    assert [item.code for item in config.findings] == ["CFG001"]
    assert config.findings[0].message.startswith("bash cannot parse this script: ")


def test_any_text_is_read_or_refused() -> None:
    pieces = re.findall(
        r"\S+ ?", "$ ( ) { } ' \" \\ A= --x python a.py ${A} $(( ` <<E # [[ ]] if then fi for in do done"
    )
    for seed in range(500):
        chosen = random.Random(seed)
        load_arguments("".join(chosen.choice([*pieces, "\n"]) for _ in range(50)), "run.sh")
