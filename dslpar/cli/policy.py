"""`dslpar policy show | check CLASS`: show or check a transformers class's policy, the data by which it is sharded.

The check compares the results of every tensor mode with those of plain transformers.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from dslpar.cli.action import Action, import_with_torch
from dslpar.core.errors import DslparError, Location
from dslpar.core.visible import visible
from dslpar.language.lazy import instantiate, locate
from dslpar.linter import check
from dslpar.schema import sections

_CLASS = "a transformers class such as LlamaForCausalLM, your own class's full name, or a config with one of these"
_CONFIGS = (".py", ".yaml", ".yml", ".json")


def _add_class(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="CLASS", help=_CLASS)
    help = "changes to the miniature's config, such as num_attention_heads=6"
    parser.add_argument("changes", nargs="*", metavar="key=value", help=help)
    help = "the policy: a class's name, 'derived', or dict(...) as in a config; default: the class's own"
    parser.add_argument("--policy", metavar="POLICY", help=help)


def _add_show_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = """\
Builds the model in miniature on torch's meta device. Prints the policy in use, and the layers.

exit status: 0 there is a policy, 1 there is none, 2 wrong usage"""
    _add_class(parser)


def _show(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    subject = _subject(args, parser)
    model = import_with_torch("dslpar.policies.model").HuggingFaceModel(*subject)
    for name, value in vars(model.policy).items():
        if value:
            print(visible(f"{name}: {', '.join(map(str, value)) if isinstance(value, tuple) else ''}").rstrip())
            for key, part in value.items() if isinstance(value, Mapping) else ():
                print(visible(f"  {key}: {part}"))
    groups = import_with_torch("dslpar.distributed.groups")
    mesh = import_with_torch("dslpar.core.mesh")
    layers = [layer.name for layer in model.layers(groups.Groups(mesh.Mesh()))]
    print(visible(f"layers: {', '.join(layers)}{' (tied)' if model.skeleton.is_tied else ''}"))
    return 0


def _add_check_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = """\
Runs one padded batch in float64 through the model in miniature, in every tensor mode on up to eight
CPU ranks, and compares logits, loss and every gradient with plain transformers. Then does so with
dropout, where all copies of a parameter must have equal gradients, to the bit. Trains nothing, and
takes a few seconds per mode. Of a config only model.type, config, pretrained and policy are used.

exit status: 0 every mode is exact or refused, 1 one is wrong or there is no policy, 2 wrong usage"""
    _add_class(parser)


def _check(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    subject = _subject(args, parser)
    wrong, helps = 0, dict[str, None]()
    for row in import_with_torch("dslpar.policies.check").check(subject):
        off = "" if row.outcome == "refused" else f"{row.worst:.1e}"
        dropout = f"; dropout is refused: {row.dropout}" if row.dropout else ""
        print(visible(f"{row.mode:18}{row.outcome:9}{off:9}{row.tensor}{dropout}"), flush=True)
        wrong += row.outcome == "wrong"
        helps |= dict.fromkeys([row.help] if row.help else [])
    for help in helps:
        print(visible(f"help: {help}"))
    return 1 if wrong else 0


def _subject(args: argparse.Namespace, parser: argparse.ArgumentParser) -> Any:
    """Return the class, its config shrunk to a miniature, and the requested policy."""
    if args.target.endswith(_CONFIGS):
        cls, config, policy = _written(args.target, parser)
    else:
        cls, config, policy = _class(args.target, parser), None, None
    changes: dict[str, Any] = {}
    for change in args.changes:
        key, equals, value = change.partition("=")
        if not equals:
            parser.error(f"{change!r} is not key=value")
        changes[key] = _parsed(value)
    return import_with_torch("dslpar.policies.check").miniature_of(
        cls, config, changes, _policy(args.policy, parser) or policy
    )


def _policy(text: str | None, parser: argparse.ArgumentParser) -> object:
    """Return the policy of `--policy`: a name, or the fields of dict(...)."""
    if text is None or not text.startswith("dict("):
        return text
    try:
        call = ast.parse(text, mode="eval").body
        fields = call.keywords if isinstance(call, ast.Call) else []
        return {str(each.arg): ast.literal_eval(each.value) for each in fields}
    except (SyntaxError, ValueError) as error:
        return parser.error(f"--policy {text}: {str(error).partition(chr(10))[0]}")


def _class(target: str, parser: argparse.ArgumentParser) -> Any:
    """Return the transformers class with this name, or with this full name."""
    try:
        cls = locate(target if "." in target else f"transformers.{target}", Location("<command line>"))
    except DslparError as error:
        parser.error(f"{target} is not a transformers model: {str(error).partition(chr(10))[0]}")
    if not (isinstance(cls, type) and hasattr(cls, "config_class") and hasattr(cls, "main_input_name")):
        parser.error(f"{target} is not a transformers model: it is no class with a config")
    return cls


def _written(path: str, parser: argparse.ArgumentParser) -> tuple[Any, Any, object]:
    """Return the class, the config and the policy of the model that the dslpar config at `path` has.

    Raises:
        DslparError: lint finds errors in the section `model`.
    """
    sys.path.insert(0, os.getcwd())  # for the user's own modules, as for train.py
    config = check.load(path)
    checked = check.check(config)
    if errors := [each for each in checked.findings if each.severity == "error" and each.key.startswith("model")]:
        raise DslparError(errors)
    model = checked.context.reading.spec.model
    if not isinstance(model, sections.OtherModel) or not model.target:
        parser.error(f"the model of {path} is neither a transformers class nor a class of your own")
    cls = locate(model.target, Location(path))
    arguments = dict(instantiate(dict(model.args), config.trusted))
    if not hasattr(cls, "config_class"):
        parser.error(f"{model.target} is not a transformers model")
    made = import_with_torch("dslpar.policies.model").config_of(
        cls, arguments.get("config"), arguments.get("pretrained")
    )
    return cls, made, arguments.get("policy")


def _parsed(value: str) -> Any:
    """Parse a value as JSON; anything else is text."""
    try:
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(value, value))
    except ValueError:
        return value


ACTIONS: Mapping[str, Action] = {
    "show": Action("print a class's policy and its layers", _add_show_arguments, _show),
    "check": Action("compare a class in every tensor mode with plain transformers", _add_check_arguments, _check),
}
"""Actions of `dslpar policy`."""
