"""Block drafting measured, definition by definition, in NumPy float64.

A reading order, with the parts of "Beyond Parallel Blindness" that each file answers:

    laws.py       what the tokens are drawn from                         App. B.1, C.7
    distance.py   acceptance, total variation, the TV barycentre         Sec. 2, App. B.4
    paths.py      the tree of target continuations                       App. B.3
    floors.py     information floors of order 0 and 1                    Sec. 2 (Eq. 2), App. B.3
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
from reference.paths import Answer, Slot, walk, write_answers

__all__ = [
    "Answer",
    "Decoder",
    "Floor",
    "SamplingLaw",
    "Slot",
    "barycentre",
    "barycentre_risk",
    "draw",
    "floor",
    "overlap",
    "total_variation",
    "truncate",
    "walk",
    "warp",
    "write_answers",
]
