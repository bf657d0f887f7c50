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
from fast.response import BestResponse, BlockPaths, Sweep, best_response, credit, fit_proposal, sweep, water_fill
from fast.risk import Gap, exposure, gap, paired_self_risk, prefix_risks, propagate, risk, self_risk
from fast.serving import (
    Dependence,
    Serving,
    ServingRisk,
    accept_factors,
    accepted_length,
    accepted_length_product,
    dependence,
    largest_risk_from_length,
    length_from_largest_risk,
    path_factors,
    reach,
    serve,
    serving_risk,
    survival,
)
from fast.verify import Verdict, residual, verify_block

__all__ = [
    "Answer",
    "BestResponse",
    "BlockPaths",
    "Decoder",
    "Dependence",
    "Floor",
    "Gap",
    "Objective",
    "SamplingLaw",
    "Serving",
    "ServingRisk",
    "Slot",
    "Sweep",
    "Verdict",
    "accept_factors",
    "accepted_length",
    "accepted_length_product",
    "barycentre",
    "barycentre_risk",
    "best_response",
    "credit",
    "dependence",
    "dpace",
    "draw",
    "dreal",
    "exposure",
    "fit_proposal",
    "floor",
    "gap",
    "largest_risk_from_length",
    "length_from_largest_risk",
    "overlap",
    "paired_self_risk",
    "path_factors",
    "prefix_risks",
    "propagate",
    "reach",
    "residual",
    "risk",
    "self_risk",
    "serve",
    "serving_risk",
    "static_decay",
    "survival",
    "sweep",
    "total_variation",
    "truncate",
    "tv_static",
    "until_stop",
    "verify_block",
    "walk",
    "warp",
    "water_fill",
    "write_answers",
]
