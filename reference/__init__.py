"""Block drafting measured, definition by definition, in NumPy float64.

A reading order, with the parts of "Beyond Parallel Blindness" that each file answers:

    laws.py       what the tokens are drawn from                         App. B.1, C.7
    distance.py   acceptance, total variation, the TV barycentre         Sec. 2, App. B.4
    paths.py      the tree of target continuations                       App. B.3
    floors.py     information floors by grouping                         Sec. 2 (Eq. 2), App. B.3
    verify.py     one round of lossless verification                     D-REAL Sec. 3.1
    objectives.py static decay, D-PACE, TV and D-REAL with gradients     D-REAL Sec. 2, 3, 5.3
    stats.py      anchors, Hajek means, prompt bootstrap                 App. B.2
    protocol.py   the whole measurement, anchor by anchor                App. B
    decoder.py    the target itself: Qwen3 and Llama                     App. B.1
    records.py, report.py   the file behind every number, and the tables made from it

`fast` holds the same names in PyTorch.  Importing `reference` never imports torch.
"""

from reference.decoder import Decoder
from reference.distance import barycentre, barycentre_risk, overlap, total_variation
from reference.floors import Floor, floor
from reference.laws import SamplingLaw, draw, truncate, warp
from reference.objectives import Objective, dpace, dreal, static_decay, tv_static, until_stop
from reference.paths import Answer, Slot, walk, write_answers
from reference.verify import Verdict, residual, verify_block

__all__ = [
    "Answer",
    "Decoder",
    "Floor",
    "Objective",
    "SamplingLaw",
    "Slot",
    "Verdict",
    "barycentre",
    "barycentre_risk",
    "dpace",
    "draw",
    "dreal",
    "floor",
    "overlap",
    "residual",
    "static_decay",
    "total_variation",
    "truncate",
    "tv_static",
    "until_stop",
    "verify_block",
    "walk",
    "warp",
    "write_answers",
]
