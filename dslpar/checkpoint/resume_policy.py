"""Classes of config keys by what a resume may do with them: change freely, change with a report, or not change.

==========  ==========================================================  ==============================================
class       keys                                                        a resume with another value
==========  ==========================================================  ==============================================
`FREE`      layout, speed, memory; which outputs are written, where     continues the same curve (a layout is reported)
`REPORTED`  values that act on every step: rates, clipping, precision   continues with the new value, which is reported
`REFUSED`   model, optimizer type, training data, seed, batch size      is refused: it would be another run
==========  ==========================================================  ==============================================

The class is declared with the key in `dslpar.schema.sections` (`resume=`), so that whoever adds a key must decide.
`batch.global_size`, `data.seq_len` and the training data follow from several keys. Their resulting values are compared
instead: see `manifest.derived_values`. No torch.
"""

from __future__ import annotations

from dslpar.schema.fields import Resume
from dslpar.schema.keys import resume_class

FREE: Resume = "free"
REPORTED: Resume = "reported"
REFUSED: Resume = "refused"

__all__ = ["FREE", "REFUSED", "REPORTED", "resume_class"]
