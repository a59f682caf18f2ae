"""`dslpar schema`: print the JSON Schema of configs in YAML and JSON."""

from __future__ import annotations

import argparse
import json
import sys

EPILOG = """\
Editors complete and check a config in YAML or JSON by it. Write it once, and name it in the
config's first line, which the YAML language server reads:

    dslpar schema > dslpar.schema.json
    # yaml-language-server: $schema=dslpar.schema.json

It has the keys of every section, their types, choices and defaults. What depends on several keys,
on the number of ranks or on files, `dslpar lint` alone reports.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.epilog = EPILOG
    parser.add_argument("--format", choices=("json-schema",), default="json-schema", help="default: %(default)s")


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Print the schema."""
    from dslpar.provenance.json_schema import schema

    json.dump(schema(), sys.stdout, indent=1)
    sys.stdout.write("\n")
    return 0
