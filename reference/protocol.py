"""The measurement protocol: from prompts to one record per anchor (paper Sec. 2 "Estimation", App. B).

    1. The target writes an answer to every prompt, under the sampling law.
    2. Every position of every answer that leaves room for a block is a candidate; anchors are sampled from them
       stratum by stratum, with known inclusion probabilities.
    3. At each anchor M continuations are walked, and everything is read from that one walk (`anchor.py`).

Each answer and each anchor is a row of the record file as soon as it is done.  All randomness comes from the
seed and the prompt's id, so a resumed run writes what an uninterrupted one would have written, whichever process
works on it (`shared_records.py`), and both backends, handed over as a module, follow the same paths.

Tests: `tests/test_protocol.py`, `tests/test_parallel_measuring.py`.
"""

import hashlib
from dataclasses import asdict, dataclass, field, fields
from numbers import Integral

import numpy as np
from tqdm import tqdm

from reference.anchor import ALSO, ORDERS, measure_anchor
from reference.draft_meter import check_drafters
from reference.laws import SamplingLaw
from reference.records import RecordError, key_of
from reference.stats import Anchor, eligible, sample_anchors, stratum

ANSWERS_AT_ONCE = 16


@dataclass(frozen=True)
class Design:
    """What is measured.

    anchors per domain, paths M per anchor, block length gamma, cap on an answer's tokens, sampling law, seed; `also`,
    what to measure besides floors and drafters' risks (names in `anchor.ALSO`).
    """

    anchors: int = 96
    paths: int = 256
    gamma: int = 7
    answer_tokens: int = 2048
    law: SamplingLaw = field(default_factory=SamplingLaw)
    seed: int = 20260818
    also: tuple[str, ...] = ()

    def __post_init__(self):
        for name, least in (("anchors", 1), ("paths", 2), ("gamma", 1), ("answer_tokens", 1)):
            if not isinstance(value := getattr(self, name), Integral) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, got {value}")
        for name in self.also:
            if name not in ALSO:
                raise ValueError(f"{name!r} cannot be measured as well; what can is {', '.join(ALSO)}")
        for name, least in (("ladder", 8), ("response", 8)):
            if name in self.also and self.paths < least:
                raise ValueError(f"{name} needs at least {least} paths, got {self.paths}")

    def provenance(self):
        """The design as a JSON-able dict."""
        return asdict(self) | {"also": list(self.also)}


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as the target reads it: unique id, domain, token ids after the chat template."""

    id: str
    domain: str
    tokens: tuple[int, ...]


def measure(backend, target, prompts, design, records, *, special_ids=(), drafters=None, source=None, quiet=False):
    """Run or resume the protocol, appending to `records` until every sampled anchor has its row.

    Args: backend, the `reference` or `fast` package; target, as for `paths.walk`; prompts, list of
        `EncodedPrompt`; design; records, open `SharedRecords`; special_ids, ids that disqualify a block;
        drafters, {name: drafter}; source, rows of another record file whose answers and anchors are measured
        again - under another law, with more paths, another block length or other drafters - instead of `prompts`.
    """
    check_drafters(drafters or {}, design.gamma)
    if source is None:
        check_prompts(prompts)
        answers = write_answers(backend, target, prompts, design, records, quiet)
        anchors = plan(prompts, answers, design, special_ids)
        planned = describe(prompts, answers, anchors, design, special_ids)
    else:
        answers, anchors, planned = adopt(source, design, records)
    if not anchors:
        longest = max(len(answer["tokens"]) for answer in answers.values())
        raise ValueError(
            f"no position can be an anchor: the longest answer has {longest} tokens, too few for blocks of "
            f"{design.gamma}; let answers be longer (--answer-tokens) or more of them be written (--anchors)"
        )
    done = {(row["prompt"], row["position"]) for row in records.rows if row["kind"] == "anchor"}
    plans = [row for row in records.rows if row["kind"] == "plan"]
    if plans not in ([], [planned]) or not done <= {(anchor.prompt, anchor.position) for anchor in anchors}:
        raise RecordError(
            f"the rows of {records.path} do not follow from its answers; it was edited, use another --out"
        )
    for _, missing in records.deal([[key_of(planned)]]):
        if missing:
            records.append(planned)
    wanted = {about("anchor", anchor.prompt, anchor.position): anchor for anchor in anchors}
    pieces = [[key] for key in wanted]
    bar = tqdm(records.deal(pieces), total=len(records.share(pieces)), desc="anchors", unit="anchor", disable=quiet)
    for _, missing in bar:
        for anchor in map(wanted.get, missing):
            answer, t = answers[anchor.prompt], anchor.position
            prefix = (*answer["prompt_tokens"], *answer["tokens"][:t])
            measured = measure_anchor(
                backend, target, prefix, path_uniforms(design, anchor), design,
                realised=tuple(answer["tokens"][t : t + design.gamma]),
                drafters=drafters, draft_uniforms=path_uniforms(design, anchor, "drafts"),
            )  # fmt: skip
            records.append({"kind": "anchor", **asdict(anchor), "stratum": list(anchor.stratum), **measured})
        bar.set_postfix_str(_running(records.rows), refresh=False)


def adopt(source, design, records):
    """Answers, anchors and plan of another record file; its answers are copied into this one once all of it fits."""
    answers = {row["prompt"]: row for row in source if row["kind"] == "answer"}
    names = [f.name for f in fields(Anchor)]
    anchors = [Anchor(**{n: row[n] for n in names} | {"stratum": tuple(row["stratum"])})
               for row in source if row["kind"] == "anchor"]  # fmt: skip
    plans = [row for row in source if row["kind"] == "plan"]
    if len(plans) != 1 or any(anchor.prompt not in answers for anchor in anchors):
        raise RecordError("the record file to take the anchors from was not written by one run")
    if not anchors:
        raise RecordError("the record file to take the anchors from holds none yet; finish its run first")
    here = {row["prompt"]: row for row in records.rows if row["kind"] == "answer"}
    if any(row != answers.get(prompt) for prompt, row in here.items()):
        raise RecordError(f"{records.path} holds answers of another source; use another --out")
    if {"information", "suffix"} & set(design.also):
        left = min(len(answers[anchor.prompt]["tokens"]) - anchor.position for anchor in anchors)
        if left < design.gamma:
            raise ValueError(
                f"information and suffix read {design.gamma} realised tokens, some anchor has {left} left; "
                "lower --gamma or do without them"
            )
    rows = {key_of(row): row for row in answers.values()}
    for _, missing in records.deal([list(rows)]):
        for key in missing:
            records.append(rows[key])
    return answers, anchors, plans[0]


def check_prompts(prompts):
    """Refuse no prompts, and what would mix up records: an id given twice, a domain named like a mean over domains."""
    if not prompts:
        raise ValueError("there are no prompts to measure; give at least one")
    seen = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise ValueError(f"prompt id {prompt.id!r} is used twice; give every prompt its own id")
        if prompt.domain in ("pooled", "equal-domain"):
            raise ValueError(f"a domain cannot be called {prompt.domain!r}, the name of a mean over domains; rename it")
        seen.add(prompt.id)


def write_answers(backend, target, prompts, design, records, quiet=False):
    """Have the target answer every prompt: {prompt id: answer row}.  Whole batches, in order, are repeatable."""
    found = {row["prompt"]: row for row in records.rows if row["kind"] == "answer"}
    for prompt in prompts:
        if prompt.id in found and tuple(found[prompt.id]["prompt_tokens"]) != prompt.tokens:
            raise RecordError(
                f"prompt {prompt.id} now encodes to other tokens than in {records.path}; use another --out"
            )
    wanted = {about("answer", prompt.id): prompt for prompt in prompts}
    pieces = [list(wanted)[i : i + ANSWERS_AT_ONCE] for i in range(0, len(wanted), ANSWERS_AT_ONCE)]
    bar = tqdm(total=sum(map(len, records.share(pieces))), desc="answers", unit="answer", disable=quiet)
    for piece, missing in records.deal(pieces):
        if missing:
            batch = [wanted[key] for key in piece]
            uniforms = np.stack([random(design.seed, "answer", p.id, size=design.answer_tokens) for p in batch])
            written = backend.write_answers(target, [p.tokens for p in batch], uniforms, design.law)
            for key, answer in zip(piece, written, strict=True):
                if key in missing:
                    prompt = wanted[key]
                    records.append({
                        "kind": "answer", "prompt": prompt.id, "domain": prompt.domain, "stopped": answer.stopped,
                        "prompt_tokens": list(prompt.tokens), "tokens": list(answer.tokens),
                    })  # fmt: skip
        bar.update(len(piece))
    bar.close()
    return {row["prompt"]: row for row in records.rows if row["kind"] == "answer"}


def about(kind, prompt, position=None):
    """The key of the row of an answer or an anchor."""
    return key_of({"kind": kind, "prompt": prompt, "position": position})


def candidates(prompts, answers, design, special_ids):
    """Every eligible anchor of every answer, by domain: {domain: [Anchor]}."""
    population = {prompt.domain: [] for prompt in prompts}
    for prompt in prompts:
        answer = answers[prompt.id]
        length = len(answer["tokens"])
        for t in eligible(answer["tokens"], design.gamma, special_ids, answer["stopped"]):
            context = len(prompt.tokens) + t
            population[prompt.domain].append(Anchor(prompt.domain, prompt.id, t, context, stratum(context, t, length)))
    return population


def plan(prompts, answers, design, special_ids):
    """The anchors to measure, all domains mixed in random order, so that a part of the run is a random part."""
    drawn = []
    for domain, population in candidates(prompts, answers, design, special_ids).items():
        drawn += sample_anchors(population, design.anchors, seed_of(design.seed, "anchors", domain))
    order = np.random.default_rng(seed_of(design.seed, "order")).permutation(len(drawn))
    return [drawn[i] for i in order]


def describe(prompts, answers, anchors, design, special_ids):
    """The plan as a row: per domain how many prompts, cut answers, eligible positions and sampled anchors."""
    domains = {}
    for domain, population in candidates(prompts, answers, design, special_ids).items():
        mine = [answers[p.id] for p in prompts if p.domain == domain]
        domains[domain] = {
            "prompts": len(mine), "cut_answers": sum(not a["stopped"] for a in mine),
            "answer_tokens": sum(len(a["tokens"]) for a in mine), "eligible": len(population),
            "anchors": sum(a.domain == domain for a in anchors),
        }  # fmt: skip
    return {"kind": "plan", "domains": domains}


def path_uniforms(design, anchor, purpose="paths"):
    """The uniforms [M, gamma] of an anchor's paths: a longer or wider run starts with the same numbers."""
    name = f"{anchor.prompt}\0{anchor.position}"
    return np.stack([random(design.seed, purpose, name, k, size=design.paths) for k in range(design.gamma)], axis=1)


def random(*parts, size):
    """Uniforms in [0, 1) that depend on the parts alone."""
    return np.random.default_rng(seed_of(*parts)).random(size)


def seed_of(*parts):
    """A 256-bit seed from any parts, by SHA-256 of their texts."""
    return int.from_bytes(hashlib.sha256("\0".join(map(str, parts)).encode()).digest(), "big")


def _running(rows):
    """Mean plug-in floors at the last slot so far, for the progress bar."""
    rows = [row for row in rows if row["kind"] == "anchor"]
    parts = []
    for m in ORDERS:
        values = [row[f"order{m}"]["fit"][-1] for row in rows if row[f"order{m}"]]
        values = [v for v in values if v is not None]
        if values:
            parts.append(f"T{m}[last]={np.mean(values):.3f}")
    return " ".join(parts)
