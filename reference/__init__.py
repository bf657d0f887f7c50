"""Block drafting measured, definition by definition, in NumPy float64.

A reading order, with the parts of "Beyond Parallel Blindness" that each file answers:

    laws.py       what the tokens are drawn from                         App. B.1, C.7
    distance.py   acceptance, total variation, the TV barycentre         Sec. 2, App. B.4
    paths.py      the tree of target continuations                       App. B.3
    floors.py     information floors by grouping                         Sec. 2 (Eq. 2), App. B.3
    risk.py       drafter risk, oracle and self-conditioned; gap, exposure Sec. 3.3, App. B.5
    serving.py    reach, accepted length, serving risk, dependence       Sec. 2, 3.5, App. F.1-F.3
    response.py   best response at one slot, coordinate sweeps           Sec. 3.5, App. F.4-F.6
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
from reference.response import BestResponse, BlockPaths, Sweep, best_response, credit, fit_proposal, sweep, water_fill
from reference.risk import Gap, exposure, gap, paired_self_risk, prefix_risks, propagate, risk, self_risk
from reference.serving import (
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
from reference.verify import Verdict, residual, verify_block

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
