"""The names of `reference` in PyTorch: CPU and CUDA, float32, bfloat16 or float64.

Read `reference` for what a function means; read here for how it is made fast.  A measurement takes either
package as its backend and follows the same paths in both.
"""

from fast.clusters import KMedian, k_median
from fast.decoder import Decoder
from fast.devices import hardware, placement
from fast.distance import barycentre, barycentre_risk, overlap, total_variation
from fast.drafters import Context, Drafter, Proposal, TrainingBlocks
from fast.engine import Completion, Engine, Request, RoundStats, tokens_per_round
from fast.enumeration import StratifiedSlot, enumerate_paths, stratify_paths
from fast.floors import Floor, floor, truncated_floor
from fast.information import (
    LogMean,
    RealisedLoss,
    ce_realised,
    effective_support,
    jackknife,
    mutual_information,
    recovery,
)
from fast.laws import SamplingLaw, draw, truncate, warp
from fast.objectives import Objective, dpace, dreal, static_decay, tv_static, until_stop
from fast.paths import Answer, Slot, walk, write_answers
from fast.response import BestResponse, BlockPaths, Sweep, best_response, credit, fit_proposal, sweep, water_fill
from fast.reweighting import ReweightedFloor, WeightedSlot, floor_by_reweighting, force_suffix, soft_floor, soften
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
    "Completion",
    "Context",
    "Decoder",
    "Dependence",
    "Drafter",
    "Engine",
    "Floor",
    "Gap",
    "KMedian",
    "LogMean",
    "Objective",
    "Proposal",
    "RealisedLoss",
    "Request",
    "ReweightedFloor",
    "RoundStats",
    "SamplingLaw",
    "Serving",
    "ServingRisk",
    "Slot",
    "StratifiedSlot",
    "Sweep",
    "TrainingBlocks",
    "Verdict",
    "WeightedSlot",
    "accept_factors",
    "accepted_length",
    "accepted_length_product",
    "barycentre",
    "barycentre_risk",
    "best_response",
    "ce_realised",
    "credit",
    "dependence",
    "dpace",
    "draw",
    "dreal",
    "effective_support",
    "enumerate_paths",
    "exposure",
    "fit_proposal",
    "floor",
    "floor_by_reweighting",
    "force_suffix",
    "gap",
    "hardware",
    "jackknife",
    "k_median",
    "largest_risk_from_length",
    "length_from_largest_risk",
    "mutual_information",
    "overlap",
    "paired_self_risk",
    "path_factors",
    "placement",
    "prefix_risks",
    "propagate",
    "reach",
    "recovery",
    "residual",
    "risk",
    "self_risk",
    "serve",
    "serving_risk",
    "soft_floor",
    "soften",
    "static_decay",
    "stratify_paths",
    "survival",
    "sweep",
    "tokens_per_round",
    "total_variation",
    "truncate",
    "truncated_floor",
    "tv_static",
    "until_stop",
    "verify_block",
    "walk",
    "warp",
    "water_fill",
    "write_answers",
]
