"""`dslpar config CFG`: print every value of a config and its origin; with `--reference`, every key."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping

from dslpar.cli import arguments
from dslpar.core.project import add_trust
from dslpar.core.suggest import did_you_mean
from dslpar.provenance import reference, reference_formats
from dslpar.provenance import text as provenance_text
from dslpar.provenance.query import Answers
from dslpar.provenance.subject import Subject
from dslpar.provenance.values import Value, values_of
from dslpar.schema.sections_reader import SECTIONS

EPILOG = """\
dslpar config configs/gpt_3d.py --world-size 8                         # every value, and where it comes from
dslpar config configs/gpt_3d.py --world-size 8 --explain parallel.data # one value, or all of a section
dslpar config configs/gpt_3d.py --explain deepspeed.zero_optimization  # DeepSpeed's dict
dslpar config --reference batch                                        # keys, with type, default and help

A value is written, overridden (on the command line), inferred, a default, or unknown. The yaml
format is itself a config, with all written values merged. Its section `resolved` has the inferred
values and the defaults, and is ignored when the file is read again.

exit status: 0 no errors, 1 lint finds errors (they go to stderr; what is known is printed), 2 wrong
usage"""

_FORMATS = {
    "values": ("text", "json", "yaml"),
    "--explain": ("text", "json"),
    "--reference": ("text", "json", "markdown"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.epilog = EPILOG
    arguments.add_operands(parser, nargs="*")
    arguments.add_world(parser)
    add_trust(parser)
    parser.add_argument("--explain", action="append", metavar="KEY", help="print why a key has its value; repeatable")
    parser.add_argument("--reference", nargs="?", const="", metavar="KEY", help="print all keys, or those of a section")
    arguments.add_format(parser, *dict.fromkeys(name for names in _FORMATS.values() for name in names))


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Print all values, the reasons for some (--explain), or the reference of keys (--reference)."""
    what = "--reference" if args.reference is not None else "--explain" if args.explain else "values"
    if args.format not in _FORMATS[what]:
        parser.error(f"{what} has the formats {', '.join(_FORMATS[what])}, not {args.format}")
    return _print_reference(args, parser) if what == "--reference" else _print_values(args, parser)


def _print_reference(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if args.operands or args.explain:
        parser.error("--reference takes no config, and at most one key")
    rows = reference.below(args.reference)
    if not rows:
        known = [*(row.key for row in reference.rows()), *reference.other_names()]
        hint = did_you_mean(args.reference, known) or "leave it out for all keys"
        parser.error(f"unknown key {args.reference!r}; {hint}")
    sys.stdout.write(reference_formats.FORMATS[args.format](rows))
    return 0


def _print_values(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    sources: dict[str, str] = {}
    cluster = arguments.load_cluster(args, parser, sources)
    (config,) = arguments.load_configs(args, parser)
    subject = Subject(config, arguments.default_world_size(args, config.path), cluster)
    values = values_of(subject)
    if args.explain:
        text = _explained(args, parser, subject, values)
    elif args.format == "yaml":
        text = _yaml(subject, values)
    elif args.format == "json":
        text = provenance_text.values_json(subject, values.values())
    else:
        text = provenance_text.listing(subject, values)
    # Leave out CFG112 (no world size was given): each value that depends on the world size is shown as unknown.
    findings = [finding for finding in subject.findings if finding.code != "CFG112"]
    arguments.print_findings(findings, sources | dict(subject.config.sources))
    sys.stdout.write(text)
    return int(not subject.sound)


def _explained(
    args: argparse.Namespace, parser: argparse.ArgumentParser, subject: Subject, values: Mapping[str, Value]
) -> str:
    answers = Answers(subject, values)
    found: dict[str, Value] = {}
    for key in args.explain:
        matches = answers.of(key)
        if not matches:
            parser.error(f"unknown key {key!r}; {answers.hint(key)}")
        found |= {value.key: value for value in matches}
    if args.format == "json":
        return provenance_text.values_json(subject, found.values())
    return "\n".join(provenance_text.explanation(subject, value, values) for value in found.values())


def _yaml(subject: Subject, values: Mapping[str, Value]) -> str:
    """Return the config.yaml that a run would save, with the defaults added.

    If no job can be resolved, return only the written values and the defaults.
    """
    # Both import PyYAML, which no other format needs.
    from dslpar.language import yaml_io
    from dslpar.reporting import run_dir

    defaults = {key: yaml_io.portable(value.value) for key, value in values.items() if value.how == "default"}
    if subject.sound and subject.world_size:
        return run_dir.config_yaml(subject.job, subject.config, {"defaults": defaults})
    return yaml_io.dump(subject.config.root, {"defaults": defaults}, SECTIONS)
