"""`dslpar lint CFG...`: all findings of configs, before anything starts."""

from __future__ import annotations

import argparse
import sys

from dslpar.commands import words
from dslpar.errors import Finding
from dslpar.linter import book, formats


def arguments(parser: argparse.ArgumentParser) -> None:
    """Its flags."""
    words.config_argument(parser, several=True)
    words.world_arguments(parser)
    parser.add_argument("--format", choices=("text", "concise", "json"), default="text", help="default: %(default)s")
    parser.add_argument("--strict", action="store_true", help="exit with 1 on warnings too")


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Prints the findings; 1 if there are errors."""
    findings: list[Finding] = []
    sources: dict[str, str] = {}
    cluster = words.cluster(args, parser, sources)
    for config in words.configs(args, parser):
        findings += book.lint(config, args.world_size, cluster)
        sources |= config.sources
    findings = list(dict.fromkeys(findings))  # what is true of the world is true of each config
    sys.stdout.write(formats.FORMATS[args.format](findings, sources))
    bad = ("error", "warning") if args.strict else ("error",)
    return int(any(finding.severity in bad for finding in findings))
