"""The floors' rows of `examples/benchmark.py`: the barycentre against sorting, and the peak memory of one anchor."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from benchmark_engine import GAMMA, M, seconds

import fast
from models import toy
from reference.anchor import measure_anchor
from reference.protocol import Design

VOCABULARY, DISTINCT = 151_936, 64


def barycentre_row(seed):
    """The barycentre and its risk from distinct rows, against sorting every column of all rows."""
    torch.manual_seed(seed)
    rows = torch.softmax(torch.randn(DISTINCT, VOCABULARY) * 2 + torch.randn(VOCABULARY) * 2, dim=-1)
    counts = 1 + np.random.default_rng(seed).multinomial(M - DISTINCT, np.full(DISTINCT, 1 / DISTINCT))
    repeated = rows[np.repeat(np.arange(DISTINCT), counts)]

    def ours():
        return fast.barycentre_risk(rows, fast.barycentre(rows, counts), counts)

    def peer():
        ranked = repeated.sort(dim=0).values
        mass = ranked.sum(dim=1)
        j = int(torch.searchsorted(mass, 1.0))
        share = (1 - mass[j - 1]) / (mass[j] - mass[j - 1])
        q = ranked[j - 1] + share * (ranked[j] - ranked[j - 1])
        return float((repeated - q).abs().sum(dim=1).mean() / 2)

    if abs(ours() - peer()) > 5e-6:
        sys.exit(f"error: barycentre risks differ ({ours()} and {peer()}); nothing was timed")
    pairs = [(seconds(ours), seconds(peer)) for _ in range(7)]
    return {
        "work": f"barycentre and risk, V = {VOCABULARY}, {DISTINCT} distinct rows of {M}",
        "peer": "torch.sort of every column of all rows, mass search, scoring",
        "ratio": round(statistics.median(b / a for a, b in pairs), 1),
        "ours_s": round(statistics.median(a for a, _ in pairs), 3),
        "peer_s": round(statistics.median(b for _, b in pairs), 3),
    }


def memory_row():
    """Peak memory of one anchor at Qwen3's vocabulary with all paths distinct, in a process of its own."""
    return {
        "work": f"one anchor, V = {VOCABULARY}, M = {M}, gamma = {GAMMA}, all paths distinct",
        **in_own_process("from benchmark_floors import measure_wide_anchor; measure_wide_anchor()"),
    }


def in_own_process(code, **environment):
    """The JSON that a process prints which runs some lines of Python; its last words where it fails."""
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True,
        env={**os.environ, **environment},
    )  # fmt: skip
    if out.returncode:
        sys.exit(f"error: a measuring process ended with {out.returncode}: {out.stderr.strip()[-300:]}")
    return json.loads(out.stdout)


def measure_wide_anchor():
    """Print how far one anchor's walk and floors raise the peak memory of this process."""

    class Wide:  # a target whose rows cost nothing to compute
        vocab_size, stop_ids = VOCABULARY, ()

        def open(self, prefix):
            self.root_logits = torch.zeros(VOCABULARY)
            return self

        def grow(self, parents, tokens):
            return torch.randn(len(tokens), VOCABULARY) * 2

    fast.floor(next(fast.walk(toy.two_token_chain(), [0], 1, np.full((2, 1), 0.5))))
    before = peak_memory()
    uniforms = np.random.default_rng(0).random((M, GAMMA))
    measure_anchor(fast, Wide(), [0], uniforms, Design(paths=M, gamma=GAMMA))
    print(json.dumps({"peak_gb": round(peak_memory() - before, 2)}))


def peak_memory():
    """Largest resident size of this process so far, in GB (Linux)."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1e6
