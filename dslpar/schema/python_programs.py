"""Tell Python programs from configs, and find the config that a program reads.

    program = program_in(text, "train.py", root.value)
    program.config                                         # 'cfg.py', from dslpar.arguments(config="cfg.py")

A config is evaluated, and a program is run. A file is a program if it starts itself, calls a function that starts a
run, or defines functions and classes but no section.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from dslpar.core.errors import Location
from dslpar.language.errors import ConfigError
from dslpar.language.load_session import parsed
from dslpar.schema.frameworks import imported_packages
from dslpar.schema.sections_reader import SECTIONS

CLASSES_OF_ARGUMENTS: Sequence[str] = (
    *("TrainingArguments", "Seq2SeqTrainingArguments", "SFTConfig", "DPOConfig", "GRPOConfig", "KTOConfig"),
    *("ORPOConfig", "CPOConfig", "RewardConfig", "RLOOConfig", "OnlineDPOConfig", "NashMDConfig", "XPOConfig"),
    *("BCOConfig", "GKDConfig", "PRMConfig"),
)
"""Classes of transformers (src/transformers/training_args*.py), and those TRL derives (trl/trainer/*_config.py)."""
TRAINING_ARGUMENTS: Collection[str] = frozenset(
    f"{package}{name}" for name in CLASSES_OF_ARGUMENTS for package in ("", "transformers.", "trl.")
)
"""Names by which programs call these."""
STARTS: Collection[str] = frozenset(
    {
        *("dslpar.arguments", "dslpar.start", "dslpar.initialize", "dslpar.fit"),
        *("colossalai.launch", "colossalai.launch_from_torch", "colossalai.launch_from_slurm"),
        *("colossalai.launch_from_openmpi", "colossalai.initialize", "colossalai.get_default_parser"),
        *("deepspeed.initialize", "deepspeed.init_distributed", "deepspeed.add_config_arguments"),
        *("torch.distributed.init_process_group", "dist.init_process_group", "argparse.ArgumentParser"),
        *("transformers.Trainer", "Trainer", "Seq2SeqTrainer", "transformers.Seq2SeqTrainer", "HfArgumentParser"),
        *("SFTTrainer", "DPOTrainer", "GRPOTrainer", "KTOTrainer", "ORPOTrainer", "RewardTrainer"),
        *("ArgumentParser", "Accelerator", "accelerate.Accelerator", "notebook_launcher"),
        *TRAINING_ARGUMENTS,
    }
)
"""Functions and classes that programs call, and no config: they start a run, or read a command line."""
_ARGUMENTS = (
    "TrainingArguments(...) with keyword arguments, the YAML or JSON file of HfArgumentParser, "
    "the shell script that starts the program, and DeepSpeed's JSON file"
)
READ_OF: Mapping[str, tuple[str, str]] = {
    "megatron.bridge": (
        "Megatron-Bridge",
        "functions that return a ConfigContainer, what a program changes in a recipe "
        "(cfg = llama3_8b_pretrain_config(); cfg.train.train_iters = 10), and YAML overrides",
    ),
    "megatron": ("Megatron-LM", "the shell script that starts the program, with its arguments"),
    "torchtitan": ("torchtitan", "TOML files, and functions that return a Trainer.Config"),
    "accelerate": ("Accelerate", "the YAML file that `accelerate config` writes, and DeepSpeed's JSON file"),
    "trl": ("TRL", _ARGUMENTS),
    "transformers": ("transformers", _ARGUMENTS),
    "deepspeed": ("DeepSpeed", "the JSON file that the program gives to deepspeed.initialize"),
}
"""Package -> the title of its framework, and what dslpar reads of it."""
_NAMES_OF_CONFIGS = ("config", "config_file", "cfg")
_ENDINGS = (".py", ".yaml", ".yml", ".json")


class PythonProgram(NamedTuple):
    """A program, and what it says about its config."""

    location: Location
    """The statement that makes it a program."""
    is_certain: bool
    """Whether it starts itself or a run. Other frameworks' configs may define functions and classes."""
    is_ours: bool
    """Whether it imports dslpar or ColossalAI, so that dslpar reads its config."""
    config: str = ""
    """The path of its config, if the program names one."""
    package: str = ""
    """The framework's package that it imports, of `READ_OF`; empty without one."""


def program_in(text: str, path: str, sections: Collection[str]) -> PythonProgram | None:
    """Return the program in a Python file; None if it is a config, with or without mistakes.

    `sections`: the names at its top level whose values are mappings.
    """
    if not path.endswith(".py") or not {"model", "parallel"}.isdisjoint(sections):
        return None
    return _program_in(text, path, not set(SECTIONS).isdisjoint(sections))


@lru_cache(maxsize=4)
def _program_in(text: str, path: str, has_sections: bool) -> PythonProgram | None:
    try:
        source, tree, *_ = parsed(path, text)
    except ConfigError:  # the evaluator reports it
        return None
    mark = next(_marks(tree, text, has_sections), None)
    if mark is None:
        return None
    is_certain = not isinstance(mark, ast.FunctionDef | ast.ClassDef)
    is_ours = not {"dslpar", "colossalai"}.isdisjoint(imported_packages(text, path))
    imported = set(_modules(tree))
    package = next((each for each in READ_OF if any(f"{name}.".startswith(f"{each}.") for name in imported)), "")
    return PythonProgram(source.location(mark), is_certain, is_ours, next(_configs(tree), ""), package)


def _modules(tree: ast.Module) -> Iterator[str]:
    """Yield the modules that a file imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def _marks(tree: ast.Module, text: str, has_sections: bool) -> Iterator[ast.AST]:
    """Yield what makes a file a program, the most certain first."""
    for statement in tree.body:
        if isinstance(statement, ast.If) and any(_is_name(each, "__name__") for each in ast.walk(statement.test)):
            yield statement
    may_start = any(name.rpartition(".")[2] in text for name in STARTS)  # walking the tree of a long config takes long
    for node in ast.walk(tree) if may_start else ():
        if isinstance(node, ast.Call) and ast.unparse(node.func) in STARTS:
            yield node
    if not has_sections:
        yield from (each for each in tree.body if isinstance(each, ast.FunctionDef | ast.ClassDef))


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _configs(tree: ast.Module) -> Iterator[str]:
    """Yield the paths of configs that calls name: `arguments(config="cfg.py")`, `initialize("cfg.py")`."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        named = [word.value for word in node.keywords if word.arg in _NAMES_OF_CONFIGS]
        first = node.args[:1] if ast.unparse(node.func) in STARTS else []
        is_flag = any(isinstance(arg, ast.Constant) and arg.value in ("--config", "-c") for arg in node.args)
        defaults = [word.value for word in node.keywords if word.arg == "default" and is_flag]
        for value in (*named, *first, *defaults):
            if isinstance(value, ast.Constant) and isinstance(value.value, str) and value.value.endswith(_ENDINGS):
                yield value.value


def message_of(program: PythonProgram, path: str) -> tuple[str, str]:
    """Return the message and the help for a program that is given as a config."""
    if not program.is_ours and program.package:
        title, read = READ_OF[program.package]
        return f"this is a Python program of {title}, and not a config", f"of {title}, dslpar reads {read}"
    if not program.is_ours:
        return (
            "this is a Python program, and not a config",
            "choose a config, which has sections such as model = dict(...)",
        )
    config = program.config or "CONFIG"
    if program.config and not os.path.isabs(config):
        config = os.path.join(os.path.dirname(path), config) if os.path.dirname(path) else config
    return (
        "this is a Python program, and not a config: lint its config with --program",
        f"choose its config: dslpar lint {config} --program",
    )
