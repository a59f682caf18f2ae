"""Optional packages: which extra of setup.cfg installs them, and what to tell a user who lacks one.

`pip install dslpar` brings PyYAML and psutil alone, which is all that linting and planning need. Whatever needs more
ends with one line that names the missing package and the extra.

    >>> print(explain("torch", "dslpar prove"))
    dslpar prove needs torch, which is not installed: pip install 'dslpar[train]'

As in pip and pandas, the package is looked for where it is needed, and never when dslpar is imported.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

EXTRAS: Mapping[str, tuple[str, ...]] = {
    "": ("psutil", "yaml"),
    "train": ("deepspeed", "mpi4py", "numpy", "safetensors", "torch", "tqdm", "xxhash"),
    "hf": ("PIL", "tokenizers", "transformers"),
    "lsp": ("lsprotocol", "pygls"),
    "mcp": ("jsonschema", "mcp"),
    "data": ("pyarrow",),
    "plot": ("matplotlib",),
}
"""Import names of the packages that each extra of setup.cfg installs; "" stands for `pip install dslpar` alone."""


def explain(package: str, user: str) -> str:
    """Return the line for a missing package; empty if no extra installs it. `user`: the command or name that needs it.

    `package` may be the dotted name of a module, as ModuleNotFoundError has it.
    """
    top = package.partition(".")[0]
    extras = [extra for extra, packages in EXTRAS.items() if top in packages]
    if not extras:
        return ""
    target = f"'dslpar[{extras[0]}]'" if extras[0] else "dslpar"
    return f"{user} needs {top}, which is not installed: pip install {target}"


def explain_missing(user: str, *packages: str) -> str:
    """Return the line for the first of these packages that is not installed; empty if all are. Nothing is imported."""
    missing = (each for each in packages if importlib.util.find_spec(each) is None)
    return next((explain(each, user) for each in missing), "")


def reraise(error: ModuleNotFoundError, user: str) -> ImportError:
    """Return the exception to raise in place of `error`: one that says what to install, or `error` itself."""
    message = explain(error.name or "", user)
    return ImportError(message, name=error.name) if message else error
