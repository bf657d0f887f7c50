"""reference/protocol.py: the whole measurement on toys, killed anywhere, in both backends."""

import json
import math
from collections import Counter, defaultdict
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

import reference
from models.toy import ToyTarget, exact_floor, markov_chain, random_table, two_token_chain
from models.toy_drafters import ToyDrafter
from reference import protocol, report
from reference.anchor import measure_anchor
from reference.laws import SamplingLaw
from reference.protocol import Design, EncodedPrompt, measure
from reference.records import RecordError, read
from reference.shared_records import SharedRecords
from reference.stats import eligible, stratum
from tests.agreement import assert_agree

STOP, SPECIAL = 6, 5
PROMPTS = [
    EncodedPrompt("sums:0", "sums", (0, 1)),
    EncodedPrompt("sums:1", "sums", (2,)),
    EncodedPrompt("talk:0", "talk", (1, 1, 3)),
    EncodedPrompt("sums:2", "sums", (3, 0)),
    EncodedPrompt("talk:é", "talk", (4,)),
]
DESIGN = Design(anchors=5, paths=8, gamma=3, answer_tokens=14, seed=7)


def sparse_chain():
    """A chain of order 1 with forbidden steps, in which a stop follows token 0 only."""
    table = np.array([[5, 4, 0, 0, 0, 0, 1], [1, 0, 4, 4, 0, 1, 0], [3, 0, 0, 3, 4, 0, 0], [2, 6, 1, 1, 0, 0, 0],
                      [6, 0, 2, 0, 1, 1, 0], [1, 1, 1, 1, 1, 0, 0], [1, 0, 0, 0, 0, 0, 0]])  # fmt: skip
    return markov_chain(table / table.sum(axis=1, keepdims=True), stop_ids=(STOP,))


TOYS = {"table": random_table(7, depth=2, seed=21, stop_ids=(STOP,)), "chain": sparse_chain()}


@pytest.fixture(params=TOYS)
def toy(request):
    return TOYS[request.param]


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(protocol, "ANSWERS_AT_ONCE", 2)


def run(path, target, *, backend=reference, prompts=PROMPTS, design=DESIGN, special_ids=(SPECIAL,), **options):
    """Run or resume a measurement; returns the rows of the file."""
    with SharedRecords(path, {"design": design.provenance()}) as records:
        measure(backend, target, prompts, design, records, special_ids=special_ids, quiet=True, **options)
    return read(path)[1]


def of_kind(rows, kind):
    return [row for row in rows if row["kind"] == kind]


def counting(limit=math.inf):
    """The reference backend, which counts what it is asked for and is interrupted after `limit` walks."""
    asked = Counter()

    def walk(target, prefix, *rest):
        if asked["walk"] == limit:
            raise KeyboardInterrupt
        asked["walk"] += 1
        asked["prefix", prefix] += 1
        return reference.walk(target, prefix, *rest)

    def write_answers(target, prompts, *rest):
        asked["answers"] += len(prompts)
        return reference.write_answers(target, prompts, *rest)

    return SimpleNamespace(**{**vars(reference), "walk": walk, "write_answers": write_answers}), asked


def assert_same_lists(actual, expected, kind):
    """Two lists over slots, None at the same places."""
    assert [v is None for v in actual] == [v is None for v in expected]
    values = [np.array([v for v in values if v is not None]) for values in (actual, expected)]
    assert_agree(*values, kind if values[0].dtype.kind == "f" else "exact")


# --- resume -----------------------------------------------------------------------------------------------------


def test_a_run_killed_anywhere_and_resumed_gives_the_same_file(tmp_path, toy):  # J3 (h)
    path = tmp_path / "whole.jsonl"
    run(path, toy)
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    somewhere = np.random.default_rng(0).integers(1, len(whole), 10).tolist()
    for cut in (0, *ends, *somewhere, whole.index("é".encode()) + 1):
        resumed = tmp_path / "resumed.jsonl"
        resumed.write_bytes(whole[:cut])
        run(resumed, toy)
        assert resumed.read_bytes() == whole


def test_a_finished_run_asks_the_target_nothing(tmp_path, toy):
    path = tmp_path / "records.jsonl"
    rows = run(path, toy)
    whole = path.read_bytes()
    backend, asked = counting()
    assert run(path, toy, backend=backend) == rows
    assert not asked
    assert path.read_bytes() == whole


def test_finished_anchors_are_not_measured_again(tmp_path, toy):
    path = tmp_path / "whole.jsonl"
    planned = len(of_kind(run(path, toy), "anchor"))
    stopped = tmp_path / "stopped.jsonl"
    for limit in (0, 1, 3, planned - 1):
        stopped.unlink(missing_ok=True)
        first, asked = counting(limit)
        with pytest.raises(KeyboardInterrupt):
            run(stopped, toy, backend=first)
        assert len(of_kind(read(stopped)[1], "anchor")) == limit
        second, asked_again = counting()
        run(stopped, toy, backend=second)
        assert asked_again["walk"] == planned - limit
        assert asked_again["answers"] == 0
        prefixes = [key for asks in (asked, asked_again) for key in asks if key[0] == "prefix"]
        assert len(set(prefixes)) == len(prefixes)
        assert stopped.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("kind", ["anchor", "answer"])
def test_a_record_missing_in_the_middle_is_made_again_and_nothing_else(tmp_path, toy, kind):  # J3 (c)
    path = tmp_path / "records.jsonl"
    rows = run(path, toy)
    lines = path.read_bytes().splitlines(keepends=True)
    gone = 1 + next(i for i, row in enumerate(rows) if row["kind"] == kind) + 1
    path.write_bytes(b"".join(lines[:gone] + lines[gone + 1 :]))
    backend, asked = counting()
    run(path, toy, backend=backend)
    assert asked["walk"] == (kind == "anchor")
    assert path.read_bytes() == b"".join([*lines[:gone], *lines[gone + 1 :], lines[gone]])


def test_a_prompt_that_encodes_to_other_tokens_is_refused_on_resume(tmp_path, toy):
    path = tmp_path / "records.jsonl"
    run(path, toy)
    whole = path.read_bytes()
    for cut in (len(whole), whole.index(b'{"kind":"plan"')):
        path.write_bytes(whole[:cut])
        other = [EncodedPrompt(p.id, p.domain, (*p.tokens, 1) if p.id == "talk:0" else p.tokens) for p in PROMPTS]
        backend, asked = counting()
        with pytest.raises(RecordError, match="prompt talk:0 now encodes to other tokens"):
            run(path, toy, backend=backend, prompts=other)
        assert not asked
        assert path.read_bytes() == whole[:cut]


@pytest.mark.parametrize("second", [(4, 4), (0, 1)], ids=["other text", "same text"])
def test_a_prompt_id_used_twice_is_refused_before_the_target_is_asked(tmp_path, second):  # J2 (a), (c)
    # was once: the second prompt silently takes the first one's answer
    prompts = [*PROMPTS, EncodedPrompt("sums:0", "talk", second)]
    backend, asked = counting()
    with pytest.raises(ValueError, match="sums:0"):
        run(tmp_path / "records.jsonl", TOYS["table"], backend=backend, prompts=prompts)
    assert not asked


# --- records ----------------------------------------------------------------------------------------------------


def test_records_out_are_anchors_planned(tmp_path, toy):
    rows = run(tmp_path / "records.jsonl", toy)
    answers = {row["prompt"]: row for row in of_kind(rows, "answer")}
    anchors = protocol.plan(PROMPTS, answers, DESIGN, {SPECIAL})
    assert [(a.prompt, a.position) for a in anchors] == [(r["prompt"], r["position"]) for r in of_kind(rows, "anchor")]
    assert [row["kind"] for row in rows] == ["answer"] * len(PROMPTS) + ["plan"] + ["anchor"] * len(anchors)
    assert [row["prompt"] for row in rows[: len(PROMPTS)]] == [p.id for p in PROMPTS]

    (plan,) = of_kind(rows, "plan")
    assert list(plan["domains"]) == ["sums", "talk"]
    for domain, counts in plan["domains"].items():
        mine = [row for row in answers.values() if row["domain"] == domain]
        assert counts["prompts"] == len(mine)
        assert counts["cut_answers"] == sum(not row["stopped"] for row in mine)
        assert counts["answer_tokens"] == sum(len(row["tokens"]) for row in mine)
        assert counts["anchors"] == sum(anchor.domain == domain for anchor in anchors) <= DESIGN.anchors
        assert counts["eligible"] >= counts["anchors"] > 0
    for row, anchor in zip(of_kind(rows, "anchor"), anchors, strict=True):
        prompt = next(p for p in PROMPTS if p.id == anchor.prompt)
        assert row["context"] == len(prompt.tokens) + row["position"]
        block = answers[anchor.prompt]["tokens"][anchor.position : anchor.position + DESIGN.gamma]
        assert len(block) == DESIGN.gamma
        assert SPECIAL not in block


def test_an_anchor_is_walked_from_the_prompt_and_the_answer_before_it(tmp_path, toy):
    backend, asked = counting()
    rows = run(tmp_path / "records.jsonl", toy, backend=backend)
    answers = {row["prompt"]: row for row in of_kind(rows, "answer")}
    prefixes = [
        (*answers[row["prompt"]]["prompt_tokens"], *answers[row["prompt"]]["tokens"][: row["position"]])
        for row in of_kind(rows, "anchor")
    ]
    assert Counter(prefixes) == {key[1]: count for key, count in asked.items() if key[0] == "prefix"}
    assert [len(prefix) for prefix in prefixes] == [row["context"] for row in of_kind(rows, "anchor")]


def test_answers_hold_no_stop_id_and_keep_to_the_cap(tmp_path, toy):
    answers = of_kind(run(tmp_path / "records.jsonl", toy), "answer")
    assert {row["stopped"] for row in answers} == {True, False}  # both kinds are here to be looked at
    for row in answers:
        assert STOP not in row["tokens"]
        assert len(row["tokens"]) <= DESIGN.answer_tokens
        assert row["stopped"] == (len(row["tokens"]) < DESIGN.answer_tokens)


def test_backends_write_the_same_records(tmp_path, toy):
    pytest.importorskip("torch")
    import fast

    ours = run(tmp_path / "reference.jsonl", toy)
    theirs = run(tmp_path / "fast.jsonl", toy, backend=fast)
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        orders = [{key: row.pop(key) for key in ("order0", "order1") if key in row} for row in (mine, other)]
        assert mine == other  # answers, plan, and of each anchor its place, alive shares and distinct prefixes
        for key in orders[0]:
            assert list(orders[0][key]) == list(orders[1][key])
            for name, values in orders[0][key].items():
                assert_same_lists(orders[1][key][name], values, "float64")


def test_a_row_with_nan_is_refused_and_the_rows_before_it_stay(tmp_path, toy):
    path = tmp_path / "records.jsonl"

    def floor(slot, order):
        return reference.Floor(float("nan"), None, None, 0.0, 1.0, 0.0, 1)

    with pytest.raises(RecordError, match="NaN"):
        run(path, toy, backend=SimpleNamespace(**{**vars(reference), "floor": floor}))
    assert of_kind(read(path)[1], "anchor") == []
    run(path, toy)
    run(tmp_path / "whole.jsonl", toy)
    assert path.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


# --- which anchors ----------------------------------------------------------------------------------------------


def test_eligible_drops_special_blocks_and_censored_tails():
    answer = [1, 2, 3, SPECIAL, 1, 2, 3, 4]
    assert eligible(answer, 2, set()) == [0, 1, 2, 3, 4, 5, 6]
    assert eligible(answer, 2, {SPECIAL}) == [0, 1, 4, 5, 6]
    assert eligible(answer, 2, {SPECIAL}, stopped=False) == [0, 1, 4]
    assert eligible(answer, 3, {SPECIAL, 4}) == [0, 4]
    assert eligible(answer, 8, set()) == [0]
    assert eligible(answer, 9, set()) == []
    assert eligible(answer, 5, set(), stopped=False) == []
    assert eligible([], 1, set()) == []


def long_answers():
    """Answers of two domains over several strata: contexts on both sides of 512 tokens, all thirds of the answer."""
    rng = np.random.default_rng(5)
    lengths = {"a": (40, 31, 8), "b": (25, 60)}
    prompts = [
        EncodedPrompt(f"{domain}:{i}", domain, (0,) * (1 + 255 * i * (domain == "a")))
        for domain, sizes in lengths.items()
        for i in range(len(sizes))
    ]
    sizes = [n for group in lengths.values() for n in group]
    answers = {
        p.id: {"tokens": rng.integers(0, 6, n).tolist(), "stopped": i != 1}
        for i, (p, n) in enumerate(zip(prompts, sizes, strict=True))
    }
    return prompts, answers


@pytest.mark.parametrize("budget", [6, 9, 20, 1000])
def test_every_stratum_gives_its_places_with_inclusion_n_over_N(budget):
    prompts, answers = long_answers()
    design = Design(anchors=budget, gamma=3, seed=1)
    population = protocol.candidates(prompts, answers, design, {SPECIAL})
    anchors = protocol.plan(prompts, answers, design, {SPECIAL})
    assert len({(a.prompt, a.position) for a in anchors}) == len(anchors)
    for domain, everyone in population.items():
        sizes = Counter(a.stratum for a in everyone)
        drawn = defaultdict(list)
        for anchor in anchors:
            if anchor.domain == domain:
                drawn[anchor.stratum].append(anchor.inclusion)
        places = budget // len(sizes)
        assert places >= 1  # one stage of sampling
        for key, size in sizes.items():
            n = min(places, size)
            assert len(drawn[key]) == n
            assert_agree(np.array(drawn[key]), np.full(n, n / size), "float64")
        weights = sum(1 / pi for stratum in drawn.values() for pi in stratum)
        assert_agree(weights, float(len(everyone)), "float64")
    assert len({key for everyone in population.values() for a in everyone for key in [a.stratum]}) > 3


def test_fewer_places_than_strata_is_a_second_stage():
    prompts, answers = long_answers()
    design = Design(anchors=2, gamma=3, seed=1)
    population = protocol.candidates(prompts, answers, design, set())
    for domain, everyone in population.items():
        sizes = Counter(a.stratum for a in everyone)
        anchors = [a for a in protocol.plan(prompts, answers, design, set()) if a.domain == domain]
        assert len(anchors) == 2 < len(sizes)
        for anchor in anchors:
            assert_agree(anchor.inclusion, 1 / sizes[anchor.stratum] * 2 / len(sizes), "float64")


def test_candidates_are_the_eligible_positions_in_their_strata():
    prompts, answers = long_answers()
    design = Design(gamma=3)
    for domain, everyone in protocol.candidates(prompts, answers, design, {SPECIAL}).items():
        expected = []
        for prompt in (p for p in prompts if p.domain == domain):
            answer = answers[prompt.id]
            for t in range(len(answer["tokens"])):
                last = len(answer["tokens"]) - design.gamma * (1 if answer["stopped"] else 2)
                if t <= last and SPECIAL not in answer["tokens"][t : t + design.gamma]:
                    context = len(prompt.tokens) + t
                    expected.append((prompt.id, t, context, stratum(context, t, len(answer["tokens"]))))
        assert [(a.prompt, a.position, a.context, a.stratum) for a in everyone] == expected
        assert {a.inclusion for a in everyone} == {1.0}


def test_the_plan_is_a_function_of_the_seed_and_mixes_the_domains():
    prompts, answers = long_answers()
    first, again, other = (
        protocol.plan(prompts, answers, Design(anchors=30, gamma=3, seed=seed), set()) for seed in (1, 1, 2)
    )
    assert first == again
    assert set(first) != set(other)
    turns = sum(a.domain != b.domain for a, b in pairwise(first))
    assert turns > 10  # two blocks would have one turn


def short_and_long():
    """A target that stops at once after a prompt that starts with 0, and runs to the cap otherwise."""

    def next_token(history):
        return np.array([0.0, 0.0, 1.0]) if history[0] == 0 else np.array([0.4, 0.6, 0.0])

    return ToyTarget(3, next_token, stop_ids=(2,))


def test_a_domain_without_eligible_anchors_is_planned_as_empty(tmp_path):
    prompts = [EncodedPrompt("short:0", "short", (0,)), EncodedPrompt("long:0", "long", (1,))]
    path = tmp_path / "records.jsonl"
    rows = run(path, short_and_long(), prompts=prompts)
    (plan,) = of_kind(rows, "plan")
    assert plan["domains"]["short"] == {
        "prompts": 1, "cut_answers": 0, "answer_tokens": 0, "eligible": 0, "anchors": 0
    }  # fmt: skip
    assert {row["domain"] for row in of_kind(rows, "anchor")} == {"long"}
    summary = report.summarise(*read(path), replicates=10)
    assert list(summary["groups"]) == ["long", "pooled", "equal-domain"]
    assert summary["groups"]["long"]["t0_fit"] == summary["groups"]["equal-domain"]["t0_fit"]
    assert "long: " in report.table(summary)


def test_no_eligible_anchor_at_all_is_a_named_error(tmp_path):
    path = tmp_path / "records.jsonl"
    with pytest.raises(ValueError, match="no position can be an anchor: the longest answer has 0 tokens"):
        run(path, short_and_long(), prompts=[EncodedPrompt("short:0", "short", (0,))])


def test_rows_that_do_not_follow_from_the_answers_are_refused_on_resume(tmp_path, toy):
    path = tmp_path / "records.jsonl"
    run(path, toy)
    lines = path.read_text().splitlines()
    first = json.loads(lines[1])
    assert first["kind"] == "answer"
    lines[1] = json.dumps({**first, "tokens": first["tokens"][: len(first["tokens"]) // 2]})
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(RecordError, match="do not follow from its answers"):
        run(path, toy)


# --- paths ------------------------------------------------------------------------------------------------------


def an_anchor(prompt="sums:0", position=2):
    return protocol.Anchor("sums", prompt, position, 4, (0, 0))


def test_a_longer_or_wider_run_starts_with_the_same_numbers():
    small = protocol.path_uniforms(Design(paths=8, gamma=3, seed=1), an_anchor())
    large = protocol.path_uniforms(Design(paths=32, gamma=7, seed=1), an_anchor())
    assert small.shape == (8, 3)
    assert large.shape == (32, 7)
    assert_agree(large[:8, :3], small, "exact")
    assert len(np.unique(large)) == large.size
    for design, anchor in (
        (Design(paths=8, gamma=3, seed=2), an_anchor()),
        (Design(paths=8, gamma=3, seed=1), an_anchor(position=3)),
        (Design(paths=8, gamma=3, seed=1), an_anchor(prompt="sums:1")),
    ):
        assert not np.isin(protocol.path_uniforms(design, anchor), small).any()


def test_the_first_slots_of_a_longer_block_are_the_shorter_run(toy):
    rows = []
    for gamma in (2, 5):
        design = Design(paths=16, gamma=gamma, seed=1)
        uniforms = protocol.path_uniforms(design, an_anchor())
        rows.append(measure_anchor(reference, toy, (1, 2), uniforms, design))
    for key in ("alive", "distinct"):
        assert_same_lists(rows[1][key][:2], rows[0][key], "exact")
    for order in ("order0", "order1"):
        for name, values in rows[0][order].items():
            assert_same_lists(rows[1][order][name][:2], values, "exact")


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.9, 1.0])
def test_stopped_paths_leave_and_slots_without_two_paths_are_none(share):
    go = (1 - share) / 2
    target = ToyTarget(3, lambda history: [go, go, share], stop_ids=(2,))
    design = Design(paths=8, gamma=6, seed=4)
    seen = Counter()
    for position in range(6):
        uniforms = protocol.path_uniforms(design, an_anchor(position=position))
        row = measure_anchor(reference, target, (0, 1), uniforms, design)

        paths = []  # path by path, by the definition
        for path in uniforms:
            tokens = [0 if u < go else 1 if u < 2 * go else 2 for u in path]
            paths.append(tokens[: tokens.index(2) + 1] if 2 in tokens else tokens)
        alive = [sum(len(path) > k for path in paths) for k in range(design.gamma)]
        distinct = [len({tuple(path[:k]) for path in paths if len(path) > k}) for k in range(design.gamma)]
        assert_agree(np.array(row["alive"]), np.array(alive) / design.paths, "float64")
        assert row["distinct"] == distinct
        assert alive[0] == design.paths
        assert sorted(alive, reverse=True) == alive
        for order in ("order0", "order1"):
            for name in ("fit", "lower", "upper", "covered", "support"):
                assert [value is not None for value in row[order][name]] == [count >= 2 for count in alive]
        json.dumps(row, allow_nan=False)
        seen.update(min(n, 2) for n in alive)
    if share == 0.6:
        assert seen[0] and seen[1] and seen[2]  # slots with no path, with one and with more


# --- drafters, companions, and the same anchors again -----------------------------------------------------------


def drafters_of(backend, gamma=DESIGN.gamma):
    """A drafter of every order with random rows."""

    def next_token(prefix, slot, seen):
        return np.random.default_rng([slot, *seen]).dirichlet(np.ones(7))

    return {name: ToyDrafter(backend, gamma, order, next_token) for name, order in (("a", 0), ("b", 1), ("c", None))}


EVERYTHING = replace(DESIGN, anchors=2, also=("information", "soft", "suffix", "k_median", "ladder", "response"))


def test_a_run_with_everything_killed_anywhere_gives_the_same_file(tmp_path, toy):
    path, resumed = tmp_path / "whole.jsonl", tmp_path / "resumed.jsonl"
    rows = run(path, toy, design=EVERYTHING, drafters=drafters_of(reference))
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in (ends[2], ends[-2] + 40):
        resumed.write_bytes(whole[:cut])
        run(resumed, toy, design=EVERYTHING, drafters=drafters_of(reference))
        assert resumed.read_bytes() == whole
    answers = {row["prompt"]: row for row in of_kind(rows, "answer")}
    for row in of_kind(rows, "anchor"):
        anchor, answer = an_anchor(row["prompt"], row["position"]), answers[row["prompt"]]
        expected = measure_anchor(
            reference, toy, (*answer["prompt_tokens"], *answer["tokens"][: anchor.position]),
            protocol.path_uniforms(EVERYTHING, anchor), EVERYTHING,
            realised=answer["tokens"][anchor.position : anchor.position + EVERYTHING.gamma],
            drafters=drafters_of(reference), draft_uniforms=protocol.path_uniforms(EVERYTHING, anchor, "drafts"),
        )  # fmt: skip
        expected = json.loads(json.dumps(expected))
        assert {name: row[name] for name in expected} == expected
        assert set(row["drafters"]) == {"a", "b", "c"}
        assert "responses" in row["drafters"]["a"]
        assert {"information", "soft", "suffix1", "k_median", "quarter0"} <= row.keys()


def test_floors_do_not_depend_on_what_else_is_measured(tmp_path, toy):
    plain = run(tmp_path / "plain.jsonl", toy, design=replace(EVERYTHING, also=()))
    more = run(tmp_path / "more.jsonl", toy, design=EVERYTHING, drafters=drafters_of(reference))
    for a, b in zip(plain, more, strict=True):
        assert {name: b[name] for name in a} == a


def test_chains_and_paths_are_drawn_independently():
    paths, drafts = (protocol.path_uniforms(DESIGN, an_anchor(), purpose) for purpose in ("paths", "drafts"))
    assert paths.shape == drafts.shape
    assert not np.isin(paths, drafts).any()


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({"law": SamplingLaw(0.5, top_k=3)}, 0),
        ({"paths": 32}, 3),
        ({"gamma": 2}, 2),
        ({"gamma": 5}, 3),
        ({"seed": 8}, 0),
    ],
    ids=["law", "paths", "shorter", "longer", "seed"],
)
def test_the_same_anchors_measured_again(tmp_path, toy, change, kept):
    source = run(tmp_path / "first.jsonl", toy)
    design = replace(DESIGN, **change)
    backend, asked = counting()
    rows = run(
        tmp_path / "second.jsonl", toy, backend=backend, design=design, prompts=None, source=source,
        drafters=drafters_of(reference, design.gamma),
    )  # fmt: skip
    assert asked["answers"] == 0
    for kind in ("answer", "plan"):
        assert of_kind(rows, kind) == of_kind(source, kind)
    place = ("domain", "prompt", "position", "context", "stratum", "inclusion")
    pairs = list(zip(of_kind(source, "anchor"), of_kind(rows, "anchor"), strict=True))
    for first, second in pairs:
        assert [second[name] for name in place] == [first[name] for name in place]
        assert len(second["alive"]) == design.gamma
        assert set(second["drafters"]) == {"a", "b", "c"}
    if change.keys() == {"gamma"}:  # the first slots are the same slots
        for first, second in pairs:
            assert second["order0"]["fit"][:kept] == first["order0"]["fit"][:kept]
    else:
        assert any(second["order0"]["fit"] != first["order0"]["fit"] for first, second in pairs)
    if "paths" in change:
        answers = {row["prompt"]: row for row in of_kind(rows, "answer")}
        _, second = pairs[0]
        answer, anchor = answers[second["prompt"]], an_anchor(second["prompt"], second["position"])
        prefix = (*answer["prompt_tokens"], *answer["tokens"][: anchor.position])
        alone = measure_anchor(reference, toy, prefix, protocol.path_uniforms(design, anchor), design)
        assert second["order1"] == alone["order1"]


def test_a_second_run_on_the_same_anchors_is_resumed(tmp_path, toy):
    source = run(tmp_path / "first.jsonl", toy)
    path, resumed, design = tmp_path / "second.jsonl", tmp_path / "resumed.jsonl", replace(DESIGN, paths=16)
    run(path, toy, design=design, source=source, prompts=None)
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in (ends[0], ends[2], whole.index(b'{"kind":"plan"'), ends[-3], ends[-2] + 9, len(whole)):
        resumed.write_bytes(whole[:cut])
        run(resumed, toy, design=design, source=source, prompts=None)
        assert resumed.read_bytes() == whole


def test_an_unfinished_source_gives_the_anchors_it_has_and_later_the_rest(tmp_path, toy):
    source, design = run(tmp_path / "first.jsonl", toy), replace(DESIGN, paths=16)
    path = tmp_path / "second.jsonl"
    part = run(path, toy, design=design, source=source[:-2], prompts=None)
    assert len(of_kind(part, "anchor")) == len(of_kind(source, "anchor")) - 2
    rows = run(path, toy, design=design, source=source, prompts=None)
    assert rows[: len(part)] == part
    assert len(rows) == len(source)
    assert report.summarise(*read(path), replicates=5)["plan"] == of_kind(source, "plan")[0]["domains"]


@pytest.mark.parametrize("fault", ["no plan", "two plans", "no answer", "no anchor", "other answers", "too short"])
def test_a_source_that_does_not_fit_is_refused_and_nothing_is_written(tmp_path, toy, fault):
    source, path, design = run(tmp_path / "first.jsonl", toy), tmp_path / "second.jsonl", DESIGN
    if fault == "other answers":
        run(path, toy, source=source, prompts=None)
        source = run(tmp_path / "other.jsonl", toy, design=replace(DESIGN, seed=8))
    elif fault == "too short":
        design = replace(EVERYTHING, gamma=9)
    else:
        kinds = {"no plan": {"plan"}, "no answer": {"answer"}, "no anchor": {"anchor"}}.get(fault, set())
        source = [row for row in source if row["kind"] not in kinds]
        source += of_kind(source, "plan") if fault == "two plans" else []
    message = {
        "no anchor": "holds none yet; finish its run first",
        "other answers": "holds answers of another source; use another --out",
        "too short": r"read 9 realised tokens, some anchor has \d left; lower --gamma or do without them",
    }.get(fault, "was not written by one run")
    with SharedRecords(path, {"design": design.provenance()}) as records:
        before = list(records.rows)
        with pytest.raises(ValueError, match=message):
            measure(reference, toy, None, design, records, source=source, quiet=True)
        assert records.rows == before


def test_a_drafter_that_is_too_short_is_refused_before_the_target_is_asked(tmp_path, toy):
    # was once: found out at the first anchor, when all answers are written
    backend, asked = counting()
    with pytest.raises(ValueError, match="drafter a proposes 2 tokens, gamma is 3; lower --gamma"):
        run(tmp_path / "records.jsonl", toy, backend=backend, drafters=drafters_of(reference, 2))
    assert not asked


@pytest.mark.parametrize(
    ("also", "paths", "message"),
    [
        (("floors",), 8, "'floors' cannot be measured as well; what can is information"),
        (("ladder",), 7, "ladder needs at least 8 paths, got 7"),
        (("soft", "response"), 7, "response needs at least 8 paths, got 7"),
    ],
)
def test_what_cannot_be_measured_as_well_is_refused(also, paths, message):
    with pytest.raises(ValueError, match=message):
        Design(also=also, paths=paths)


# --- the right numbers ------------------------------------------------------------------------------------------


def test_a_long_run_approaches_the_exact_floors_of_the_population(tmp_path):
    """Pooled floors of 82 anchors x 2048 paths, all false-alarm probabilities together below 1e-8.

    Given the answers, the only chance left is in the paths and in which anchors were drawn.  One path more or less
    moves an anchor's `fit` by at most 1 / M, so (McDiarmid) the weighted mean stays within
    t = sqrt(ln(1 / alpha) sum_i w_i^2 / (2 M)) of its expectation; the expectation lies below the exact floor (a
    minimum of means) by at most E TV(sampled weights, exact weights) <= sqrt((U - 1) / M) / 2 with U prefixes.
    `held_out` is fitted and scored on halves of the paths: at most two such distances of a half below, three above.
    Drawing n_s of N_s anchors per stratum moves the population mean by at most (Hoeffding, R the range of the exact
    floors) R sqrt(ln(1 / alpha) sum_s (N_s / N)^2 / (2 n_s)).  That is 36 bounds with alpha = 1e-10 each.
    """
    target, gamma, M, alpha = two_token_chain(), 3, 2048, 1e-10
    prompts = [EncodedPrompt(f"few:{i}", "few", (i % 2,)) for i in range(2)]
    prompts += [EncodedPrompt(f"many:{i}", "many", (i % 2, 1)) for i in range(4)]
    design = Design(anchors=48, paths=M, gamma=gamma, answer_tokens=24, seed=2)
    path = tmp_path / "records.jsonl"
    rows = run(path, target, prompts=prompts, design=design, special_ids=())
    summary = report.summarise(*read(path), replicates=10)

    @lru_cache
    def exact(state, slot, order):
        return exact_floor(target, state, slot, order)

    answers = {row["prompt"]: row for row in of_kind(rows, "answer")}
    population = protocol.candidates(prompts, answers, design, ())
    history = {
        (p.id, t): (0, 0, *p.tokens, *answers[p.id]["tokens"][:t])[-2:] for p in prompts for t in range(24)
    }  # fmt: skip
    everyone = [anchor for group in population.values() for anchor in group]
    measured = of_kind(rows, "anchor")
    assert len(measured) == 82
    weight = np.array([1 / row["inclusion"] for row in measured])
    assert_agree(weight.sum(), float(len(everyone)), "golden")
    assert {row["inclusion"] for row in measured if row["domain"] == "few"} == {1.0}  # all of them
    assert min(row["inclusion"] for row in measured if row["domain"] == "many") < 1  # some of them
    weight /= weight.sum()

    strata, drawn = Counter((a.domain, a.stratum) for a in everyone), Counter()
    drawn.update((row["domain"], tuple(row["stratum"])) for row in measured)
    t_paths = math.sqrt(math.log(1 / alpha) * (weight**2).sum() / (2 * M))
    for order in (0, 1):
        for k in range(gamma):
            here = [exact(history[row["prompt"], row["position"]], k, order) for row in measured]
            truth = float(weight @ here)
            bias = math.sqrt((2**k - 1) / M) / 2
            fit = summary["groups"]["pooled"][f"t{order}_fit"][k]
            held_out = summary["groups"]["pooled"][f"t{order}_held_out"][k]
            assert truth - bias - t_paths <= fit <= truth + t_paths
            half = math.sqrt(2) * (bias + t_paths)
            assert truth - 2 * half <= held_out <= truth + 3 * half

            whole = [exact(history[a.prompt, a.position], k, order) for a in everyone]
            spread = max(whole) - min(whole)
            unsure = sum((strata[s] / len(everyone)) ** 2 / drawn[s] for s in strata if drawn[s] < strata[s])
            t_anchors = spread * math.sqrt(math.log(1 / alpha) * unsure / 2)
            assert abs(fit - np.mean(whole)) <= bias + t_paths + t_anchors
            if k == 2:  # the bounds are narrow enough to tell the orders apart
                other = np.mean([exact(history[a.prompt, a.position], k, 1 - order) for a in everyone])
                assert abs(fit - other) > bias + t_paths + t_anchors


@pytest.mark.parametrize("field", ["anchors", "paths", "gamma", "answer_tokens"])
def test_a_design_that_measures_nothing_is_refused(field):
    with pytest.raises(ValueError, match=field):
        Design(**{field: 1 if field == "paths" else 0})
    with pytest.raises(ValueError, match=f"{field} must be a whole number"):
        Design(**{field: 8.0})


def test_no_prompts_are_refused(tmp_path, toy):
    with pytest.raises(ValueError, match="no prompts to measure"):
        run(tmp_path / "records.jsonl", toy, prompts=[])
