"""Classes of resume changes: every config key is in one of three classes, declared with the key itself.

==========  ==========================================================  ==============================================
class       of                                                          a resume that changes it
==========  ==========================================================  ==============================================
`FREE`      layout, speed, memory; what is written, and where           continues the same curve (a layout is reported)
`REPORTED`  values that act on every step: rates, clipping, precision   continues with the new value, which is reported
`REFUSED`   the model, the optimizer's type, the text, seed, batch      is another run, and refused
==========  ==========================================================  ==============================================

The class is declared beside the key in `dslpar.schema.sections` (`resume=`), so that whoever adds a key decides. For
`batch.global_size`, `data.seq_len` and the text, the resulting values are compared: see `manifest.derived_values`. No
torch.
"""

from __future__ import annotations

from dslpar.schema.fields import Resume
from dslpar.schema.keys import resume_class

FREE: Resume = "free"
REPORTED: Resume = "reported"
REFUSED: Resume = "refused"

__all__ = ["FREE", "REFUSED", "REPORTED", "resume_class"]
