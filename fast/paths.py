"""The tree of target continuations in PyTorch.  Twin: `reference/paths.py`, where it is explained.

The tree itself (which path is on which prefix) is bookkeeping on the host and shared with the reference; the
rows stay on the device of the target.
"""

import numpy as np
import torch

from fast.laws import draw, warp
from reference import paths as host
from reference.laws import SamplingLaw
from reference.paths import Answer, Slot, branch, check_answers, check_walk

__all__ = ["Answer", "Slot", "walk", "write_answers"]


def walk(target, prefix, gamma, uniforms, law=SamplingLaw()):
    """Walk M sampled target continuations as one tree: see `reference.paths.walk`.

    Yields: Slot whose rows are a tensor, float32 (float64 for a float64 target); all else is NumPy.
    """
    prefix, uniforms = check_walk(target, prefix, gamma, uniforms)
    session = target.open(prefix)
    logits, created = torch.as_tensor(session.root_logits)[None], 0
    node, parent, token = np.array([-1]), np.array([-1]), prefix[-1:]  # `node` holds the session's ids
    past, path_node = prefix[None, -gamma:], np.zeros(len(uniforms), dtype=np.int64)
    for k in range(gamma):
        rows = warp(logits, law)
        alive = path_node >= 0
        drawn = np.full(len(uniforms), -1)
        drawn[alive] = draw(rows, uniforms[alive, k], path_node[alive])
        weight = np.bincount(path_node[alive], minlength=len(rows)) / len(uniforms)
        yield Slot(k, parent, token, weight, rows, past, float(alive.mean()), 1.0, path_node, drawn)

        parent, token, path_node = branch(path_node, drawn, target.stop_ids)
        if k == gamma - 1 or not len(parent):
            return
        logits = torch.as_tensor(session.grow(node[parent], token))
        node = created + np.arange(len(parent))
        created += len(parent)
        past = np.concatenate([past[parent], token[:, None]], axis=1)


def write_answers(target, prompts, uniforms, law=SamplingLaw()):
    """Let the target write one answer per prompt, all side by side: see `reference.paths.write_answers`.

    Each answer depends on its own prompt and uniforms only; a finished one leaves the batch.
    """
    prompts, uniforms = check_answers(target, prompts, uniforms)
    if not prompts or not hasattr(target, "open_batch"):  # a toy: nothing to accelerate
        return host.write_answers(target, prompts, uniforms, law)
    batch = target.open_batch(prompts, uniforms.shape[1])
    logits, tokens = batch.root_logits, [[] for _ in prompts]
    stopped, running = [False] * len(prompts), np.arange(len(prompts))
    for k in range(uniforms.shape[1]):
        drawn = draw(warp(logits, law), uniforms[running, k])
        going = ~np.isin(drawn, list(target.stop_ids))
        for place, token, on in zip(running, drawn, going, strict=True):
            stopped[place] = not on
            if on:
                tokens[place].append(int(token))
        if not going.all():
            batch.keep(np.flatnonzero(going))
        running, drawn = running[going], drawn[going]
        if not len(running) or k == uniforms.shape[1] - 1:
            break
        logits = batch.step(drawn)
    return [Answer(tuple(t), s) for t, s in zip(tokens, stopped, strict=True)]
