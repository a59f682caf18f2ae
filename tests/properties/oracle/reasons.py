"""Reasons why lint refuses what DeepSpeed accepts: code -> reason. A code that no sample triggers is no fault.

Most reasons are promises of dslpar: nothing is ignored or converted, and nothing is silently trained wrong.
"""

from __future__ import annotations

from collections.abc import Mapping

_IGNORED = "DeepSpeed would ignore it in silence, and a default would be in force"
_NOT_READ = "the value has no meaning; built without it, DeepSpeed never sees it"
_ONE_PLACE = "two places would say one thing"
_OURS = "dslpar does not run it"
_NO_CUT = "the ids are no cut of this model; what they count, built all the same, leaves layers out"
_WRONG = "it starts, and computes something else than the config says"

REASONS: Mapping[str, str] = {
    "BAT101": "the product does not fit: DeepSpeed rounds, where it does not refuse",
    "BAT102": "the layers would cut samples unevenly, which only the first step shows",
    "BAT103": "positions past the table, which only the first step shows",
    "BAT104": "tokens past the vocabulary, which only the first step shows",
    "BAT106": "the schedule would rise where its name says that it falls",
    "BAT107": _ONE_PLACE,
    "BAT108": "torch stops in the middle of the run",
    "BAT109": "torch refuses it when the schedule is made, at the first step",
    "BAT130": "torch stops at the first step",
    "BAT131": "torch stops when the optimizer is made",
    "CFG101": _IGNORED,
    "CFG102": _NOT_READ,
    "CFG103": _NOT_READ,
    "CFG104": "a part is missing; built with a placeholder",
    "CFG105": _IGNORED,
    "CFG106": _IGNORED,
    "CFG107": "there is no model; a program may give one",
    "CFG108": "there is no such choice here; built without it",
    "CFG110": _ONE_PLACE,
    "DSC101": _IGNORED,
    "DSC102": _ONE_PLACE,
    "DSC103": "DeepSpeed has removed it, and raises where it looks at it",
    "DSC104": "it would change mesh, loop, maths or checkpoints behind dslpar's back",
    "DSC105": "DeepSpeed does not check the type, and converts the value or uses it as it is",
    "DSC106": "DeepSpeed has given the key up",
    "DSC107": _WRONG,
    "DSC108": "turned off, and needed",
    "PAR103": "dslpar never changes a size that is written",
    "PAR104": _ONE_PLACE,
    "PIP101": "a stage would be empty",
    "PIP102": _NO_CUT,
    "PIP103": _NO_CUT,
    "PIP104": _NO_CUT,
    "PIP106": _ONE_PLACE,
    "PIP108": _ONE_PLACE,
    "PIP109": "there is no such method; a cut of its own choice would be followed",
    "PIP111": "layers would stand in another order than their numbers say",
    "PIP112": _ONE_PLACE,
    "PIP115": "a round of micro-batches would have too few for its ranks",
    "PIP116": _OURS,
    "PIP113": "a stage would have nothing to train",
    "PRE101": "DeepSpeed's step in half precision is wrong without ZeRO",
    "PRE102": "masters in half precision, where DeepSpeed does not check the optimizer",
    "PRE103": "DeepSpeed stops at the first step",
    "TEN101": "each rank would hold the whole layer",
    "TEN102": "there is no such mode",
    "TEN108": "an effect is expected that does not come",
    "TEN130": "each rank would hold the whole layer",
    "TEN204": "only the first step cuts the sequence",
    "TEN209": "only the first step turns pairs of features",
    "ZER101": "DeepSpeed refuses it after the model is built, where it looks",
    "ZER102": "dslpar reports the norm of every step",
    "ZER103": _WRONG,
    "ZER104": _IGNORED,
    "ZER106": "handlers find no whole gradient",
    "ZER107": _IGNORED,
    "ZER105": "the step would run on the other device than its state, slowly or not at all",
    "ZER108": "DeepSpeed refuses it on other ranks, at the first step, or where it loads a checkpoint",
    "ZER109": _WRONG,
    "ZER110": _OURS,
}

BESIDE_OTHERS = frozenset({"PAR102"})
"""Findings on the config as written, which may not apply once another refused part is left out of the build."""
