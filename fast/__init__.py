"""The names of `reference` in PyTorch: CPU and CUDA, float32, bfloat16 or float64.

Read `reference` for what a function means; read here for how it is made fast.  A measurement takes either
package as its backend and follows the same paths in both.
"""

from fast.decoder import Decoder
from fast.distance import barycentre, barycentre_risk, overlap, total_variation
from fast.floors import Floor, floor
from fast.laws import SamplingLaw, draw, truncate, warp
from fast.objectives import Objective, dpace, dreal, static_decay, tv_static, until_stop
from fast.paths import Answer, Slot, walk, write_answers
from fast.verify import Verdict, residual, verify_block

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
