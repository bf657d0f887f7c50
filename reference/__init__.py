"""Block drafting measured, definition by definition, in NumPy float64.

A reading order, with the parts of "Beyond Parallel Blindness" (and of the D-REAL paper) that each file answers:

    laws.py            what the tokens are drawn from                            App. B.1, C.7
    distance.py        acceptance, total variation, the TV barycentre            Sec. 2, App. B.4
    paths.py           the tree of target continuations                          App. B.3
    floors.py          information floors by grouping                            Sec. 2 (Eq. 2), App. B.3
    enumeration.py     prefixes counted out exactly: certified brackets          (ours)
    reweighting.py     every prefix for one suffix, or for every predecessor     App. B.3, (ours)
    clusters.py        oracle-routed K-median                                    App. D.2
    information.py     the log-loss companion                                    App. A.3, B.2, B.6
    risk.py            drafter risk, oracle and self-conditioned; gap, exposure  Sec. 3.3, App. B.5
    serving.py         reach, accepted length, serving risk, dependence          Sec. 2, 3.5, App. F.1-F.3
    response.py        best response at one slot, coordinate sweeps              Sec. 3.5, App. F.4-F.6
    verify.py          one round of lossless verification                        D-REAL Sec. 3.1
    objectives.py      static decay, D-PACE, TV and D-REAL with gradients        D-REAL Sec. 2, 3, 5.3

then the networks,

    devices.py         where and how precisely a backend computes
    decoder.py         the target: Qwen3 and Llama                               App. B.1
    draft_layers.py    a block drafter's layers: DFlash, and what others add     Sec. 2, App. H
    draft_heads.py     Markov heads, candidate selector, prefix-attention head   App. H
    drafters.py        a drafter: context, block, proposal                       Sec. 2, App. H

and the measurement:

    stats.py           anchors, Hajek means, prompt bootstrap                    App. B.2
    anchor.py          all that one anchor tells, from one walk                  App. B
    draft_meter.py     one drafter at that anchor                                Sec. 3.3, App. B.5
    protocol.py        from prompts to one record per anchor                     App. B
    records.py         the file behind every number
    shared_records.py  the same file, written by several processes
    sample.py, tables.py, drafter_tables.py, report.py   the paper's tables, from it   Tables 3-8, 12, App. C-F
    training_report.py   how trainings went, from their logs
    program.py         flags, loading and provenance of the examples

`fast` holds the same names in PyTorch.  Importing `reference` never imports torch.
"""

from reference.clusters import KMedian, k_median
from reference.decoder import Decoder
from reference.devices import hardware, placement
from reference.distance import barycentre, barycentre_risk, overlap, total_variation
from reference.drafters import Context, Drafter, Proposal, TrainingBlocks
from reference.engine import Completion, Engine, Request, RoundStats, tokens_per_round
from reference.enumeration import StratifiedSlot, enumerate_paths, stratify_paths
from reference.floors import Floor, floor, truncated_floor
from reference.information import (
    LogMean,
    RealisedLoss,
    ce_realised,
    effective_support,
    jackknife,
    mutual_information,
    recovery,
)
from reference.laws import SamplingLaw, draw, truncate, warp
from reference.objectives import Objective, dpace, dreal, static_decay, tv_static, until_stop
from reference.paths import Answer, Slot, walk, write_answers
from reference.response import BestResponse, BlockPaths, Sweep, best_response, credit, fit_proposal, sweep, water_fill
from reference.reweighting import ReweightedFloor, WeightedSlot, floor_by_reweighting, force_suffix, soft_floor, soften
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
