"""`dslpar config CFG`: every value of a config and why it is so; `--reference`: every key that there is."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dslpar.cli import arguments as cli_arguments

if TYPE_CHECKING:
    from dslpar.provenance.subject import Case
    from dslpar.provenance.values import Value

EPILOG = """\
dslpar config configs/gpt_3d.py --world-size 8                         # every value, and where it comes from
dslpar config configs/gpt_3d.py --world-size 8 --explain parallel.data # one value, or all of a section
dslpar config configs/gpt_3d.py --explain deepspeed.zero_optimization  # DeepSpeed's dict
dslpar config --reference batch                                        # keys, with type, default and help

A value is written, overridden (by the command line), inferred, a default, or not known. yaml is a config itself: what
was written, merged; under `resolved`, which is not read again, what was inferred and the defaults.

exit status: 0 no errors, 1 lint finds errors (they go to stderr; what is known is printed), 2 usage"""

_FORMATS = {
    "values": ("text", "json", "yaml"),
    "--explain": ("text", "json"),
    "--reference": ("text", "json", "markdown"),
}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Its flags."""
    parser.epilog = EPILOG
    parser.add_argument("words", nargs="*", metavar="CFG or key=value", help="a config file, and overrides of its keys")
    cli_arguments.world_arguments(parser)
    parser.add_argument("--explain", action="append", metavar="KEY", help="why a key has its value; may stand again")
    parser.add_argument("--reference", nargs="?", const="", metavar="KEY", help="print the keys that there are")
    formats = tuple(dict.fromkeys(name for names in _FORMATS.values() for name in names))
    parser.add_argument("--format", choices=formats, default="text", help="default: %(default)s")


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Prints values, reasons or the reference."""
    asked = "--reference" if args.reference is not None else "--explain" if args.explain else "values"
    if args.format not in _FORMATS[asked]:
        parser.error(f"{asked} has the formats {', '.join(_FORMATS[asked])}, not {args.format}")
    if asked == "--reference":
        return _reference(args, parser)
    return _of_a_config(args, parser)


def _reference(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from dslpar.core.suggest import did_you_mean
    from dslpar.provenance import reference, reference_formats

    if args.words or args.explain:
        parser.error("--reference is about no config, and takes one key at most")
    rows = reference.below(args.reference)
    if not rows:
        known = [*(row.key for row in reference.rows()), *reference.other_names()]
        parser.error(f"no key {args.reference!r}; {did_you_mean(args.reference, known) or 'leave it out for all keys'}")
    sys.stdout.write(reference_formats.FORMATS[args.format](rows))
    return 0


def _of_a_config(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from dslpar.provenance.subject import Case
    from dslpar.provenance.values import values_of

    sources: dict[str, str] = {}
    hosts = cli_arguments.cluster(args, parser, sources)
    case = Case(cli_arguments.one_config(args, parser), args.world_size, hosts)
    values = values_of(case)
    if args.explain:
        text = _explained(args, parser, case, values)
    elif args.format == "yaml":
        text = _yaml(case, values)
    else:
        from dslpar.provenance import text as message

        text = message.listing(case, values) if args.format == "text" else message.values_json(case, values.values())
    _say_findings(case, sources)
    sys.stdout.write(text)
    return int(not case.sound)


def _explained(
    args: argparse.Namespace, parser: argparse.ArgumentParser, case: Case, values: Mapping[str, Value]
) -> str:
    from dslpar.provenance import text as message
    from dslpar.provenance.query import Answers

    answers = Answers(case, values)
    found: dict[str, Value] = {}
    for key in args.explain:
        those = answers.of(key)
        if not those:
            parser.error(f"no key {key!r}; {answers.close_to(key)}")
        found |= {value.key: value for value in those}
    if args.format == "json":
        return message.values_json(case, found.values())
    return "\n".join(message.explanation(case, value, values) for value in found.values())


def _yaml(case: Case, values: Mapping[str, Value]) -> str:
    """As a run's config.yaml, and the defaults with it; what is no job yet is what was written."""
    from dslpar.language import yaml_io
    from dslpar.reporting import run_dir
    from dslpar.schema.sections_reader import SECTIONS

    defaults = {key: yaml_io.portable(value.value) for key, value in values.items() if value.how == "default"}
    if case.sound and case.world_size:
        return run_dir.config_yaml(case.job, case.config, {"defaults": defaults})
    return yaml_io.dump(case.config, {"defaults": defaults}, SECTIONS)


def _say_findings(case: Case, sources: Mapping[str, str]) -> None:
    """Findings go to stderr; that there is no world size is said where it matters."""
    from dslpar.linter.report import text as formats

    findings = [finding for finding in case.findings if finding.code != "CFG112"]
    if findings:
        sys.stderr.write(formats.text(findings, {**sources, **case.config.sources}))
