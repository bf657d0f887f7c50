"""examples/serve_compare.py: its arithmetic on rows made by hand, the toy end to end, and folders in both wings."""

import importlib
import json
import time
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import serve_compare
from models.config import DecoderConfig
from reference import serving_report
from reference.engine import Completion, Engine, Request, RoundStats, tokens_per_round
from reference.laws import SamplingLaw
from reference.records import RecordError, RecordFile, key_of, read
from reference.sample import seed_runs
from reference.serving_report import request_row, summarise
from tests.agreement import assert_agree
from tests.dialects import dspark, tiny, write_drafter
from tests.test_engine import each_wing, engine_of, model_of, prompts
from tests.test_examples import CONFIG, folder  # noqa: F401 - a fixture

TOY = ["--target", "toy", "--drafter", "parallel", "chained", "--backend", "reference", "--answer-tokens", "30"]


def row_of(drafter, prompt, rounds, *, temperature=0.0, concurrency=1, wall=1.0, latency=1.0, text="a", parts=None):
    """A row of a request with rounds [(drafted, accepted, committed)]; a prompt's first letters are its task."""
    about = SimpleNamespace(domain=prompt.rstrip("0123456789"), id=prompt, tokens=(1, 2))
    stats = tuple(RoundStats(*r) for r in rounds)
    completion = Completion((0,) * (1 + sum(r.committed for r in stats)), "stop", stats, latency)
    return request_row(drafter, temperature, concurrency, about, completion, wall, parts or {}, text)


def columns_of(summary, name, key):
    """{values of the key columns: {column: cell}} of a table."""
    table = summary["tables"][name]
    found = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    return {tuple(line[k] for k in key): line for line in found}


# The arithmetic


BY_HAND = [
    row_of("plain", "sums0", [(0, 0, 1)] * 4, wall=2.0, latency=2.0, text="x"),
    row_of("plain", "talk0", [(0, 0, 1)] * 2, wall=2.0, latency=1.0, text="y"),
    row_of("a", "sums0", [(2, 2, 3), (1, 0, 1)], wall=1.0, latency=0.5, text="x", parts={"draft": 0.25, "verify": 0.5}),
    row_of("a", "talk0", [(2, 0, 1), (2, 0, 1)], wall=1.0, latency=0.75, text="z", parts={"draft": 0.5}),
    row_of("b", "sums0", [(2, 1, 2), (2, 1, 2)], wall=1.0, text="x"),
    row_of("b", "talk0", [(2, 1, 1)], wall=1.0, text="y"),  # a stop id among the accepted drafts
]


def test_numbers_by_hand():
    summary = summarise({"kind": "provenance", "target": "t"}, BY_HAND, replicates=50)
    tau = columns_of(summary, "tau, temperature 0", ("drafter", "task"))
    expected = {
        ("a", "sums"): (1, 2, 2.0, 2.0, 2.5), ("a", "talk"): (1, 2, 1.0, 1.0, 1.5),
        ("a", "macro"): (2, 4, 1.5, 1.5, 2.0), ("a", "pooled"): (2, 4, 1.5, 1.5, 2.0),
        ("b", "sums"): (1, 2, 2.0, 2.0, 2.5), ("b", "talk"): (1, 1, 1.0, 1.0, 2.0),
        ("b", "macro"): (2, 3, 1.5, 1.5, 2.25), ("b", "pooled"): (2, 3, 5 / 3, 1.5, 7 / 3),
    }  # fmt: skip
    assert tau.keys() == expected.keys()
    for key, (requests, rounds, *numbers) in expected.items():
        assert (tau[key]["requests"], tau[key]["rounds"]) == (requests, rounds)
        for name, number in zip(("tau", "per request", "tokens / rounds"), numbers, strict=True):
            assert_agree(tau[key][name], number, "float64")
    differences = columns_of(summary, "differences, temperature 0", ("task",))
    assert_agree(differences["macro",]["difference"], 0.0, "float64")
    assert_agree(differences["pooled",]["difference"], 1 / 6, "float64")

    def table(name):
        return [[float(c) for c in row] for row in summary["tables"][f"{name}, temperature 0"]["rows"]]

    assert_agree(table("survival"), [[1.0, 1.0, 1.0], [2.0, 0.25, 2 / 3], [3.0, 0.25, 0.0]], "float64")
    accepted = [[0.0, 0.75, 0.0], [1.0, 0.0, 1.0], [2.0, 0.25, 0.0], [3.0, 0.0, 0.0]]
    assert_agree(table("accepted"), accepted, "float64")

    speed = columns_of(summary, "speed, temperature 0", ("drafter", "task"))
    for key, name, number in (
        (("plain", "pooled"), "tokens/s", 2.0),
        (("plain", "pooled"), "tau", 1.0),
        (("plain", "pooled"), "speed-up", 1.0),
        (("a", "pooled"), "tokens/s", 4.0),
        (("a", "pooled"), "speed-up", 2.0),
        (("a", "sums"), "speed-up", 2.0),
        (("a", "talk"), "speed-up", 2.0),
        (("a", "pooled"), "ms/token", 1000 * 1.25 / 8),
        (("a", "pooled"), "p50 s", 0.625),
        (("a", "pooled"), "draft", 0.375),
        (("a", "pooled"), "verify", 0.25),
        (("a", "pooled"), "commit", 0.0),
        (("a", "pooled"), "same text", 0.5),
        (("b", "pooled"), "same text", 1.0),
    ):
        assert_agree(speed[key][name], number, "float64")
    assert speed["plain", "pooled"]["same text"] is None


@st.composite
def runs(draw):
    """Rows of two drafters on the same prompts of one to three tasks; some texts have no round."""
    rows, kinds = [], [(0, 0, 1), (2, 0, 1), (2, 1, 2), (2, 2, 3), (2, 2, 2), (2, 1, 1)]
    for task in range(draw(st.integers(1, 3))):
        for i in range(draw(st.integers(1, 3))):
            for drafter in ("a", "b"):
                rounds = draw(st.lists(st.sampled_from(kinds), max_size=4))
                rows.append(row_of(drafter, f"{'xyz'[task]}{i}", rounds, wall=draw(st.floats(0, 2))))
    return rows


@settings(max_examples=30)
@given(runs(), st.randoms(use_true_random=False))
def test_the_tables_belong_together(rows, random):
    summary = summarise({}, rows, replicates=5)
    tau = columns_of(summary, "tau, temperature 0", ("drafter", "task"))
    differences = columns_of(summary, "differences, temperature 0", ("task",))
    tasks = sorted({row["domain"] for row in rows})
    for i, name in enumerate("ab"):
        values = [tau[name, task]["tau"] for task in tasks]
        macro, pooled = (tau[name, task]["tau"] for task in ("macro", "pooled"))
        assert (macro is None) == (None in values)
        if macro is not None:
            assert_agree(macro, float(np.mean(values)), "float64")
        for table, parts in (("survival", pooled), ("accepted", 1.0)):
            shares = [row[1 + i] for row in summary["tables"][f"{table}, temperature 0"]["rows"]]
            if pooled is None:
                assert set(shares) == {None}
            else:
                assert_agree(sum(shares), parts, "float64")
        assert_agree(sum(tau[name, task]["rounds"] for task in tasks), tau[name, "pooled"]["rounds"], "exact")
    for task in (*tasks, "macro", "pooled"):
        ends = tau["a", task]["tau"], tau["b", task]["tau"]
        if None not in ends:
            assert_agree(differences[task,]["difference"], ends[1] - ends[0], "float64")
    shuffled = sorted(rows, key=lambda row: (row["drafter"], row["domain"]))  # drafters, tasks in the same order
    again = summarise({}, shuffled, replicates=5)
    assert again["tables"]["survival, temperature 0"] == summary["tables"]["survival, temperature 0"]


def test_seeds_are_reported_together():
    """A run of two seeds: mean of their tau, their range, differences seed by seed, rounds counted together."""
    random, rows = np.random.default_rng(1), []
    for i in range(8):
        prompt, lengths = f"{'xy'[i % 2]}{i}", random.integers(1, 5, (4, 1 + i))
        for name, some in zip(("a-1", "a-2", "b-1", "b-2"), lengths, strict=True):
            rows.append(row_of(name, prompt, [(4, n - 1, n + (name[0] == "b")) for n in some]))
        rows.append(row_of("old", prompt, [(4, 1, 2)]))
    each, both = (summarise({}, rows, seeds=seeds, replicates=50) for seeds in (False, True))
    tau, of_seeds = (columns_of(s, "tau, temperature 0", ("drafter", "task")) for s in (each, both))
    pairs = columns_of(both, "differences, temperature 0", ("drafter", "less", "task"))
    assert {run for run, _ in of_seeds} == {"a", "b", "old"}
    for task in ("x", "y", "macro", "pooled"):
        for column in ("tau", "per request", "tokens / rounds"):
            own = {name: tau[name, task][column] for name in ("a-1", "a-2", "b-1", "b-2", "old")}
            for run in "ab":
                assert_agree(of_seeds[run, task][column], (own[f"{run}-1"] + own[f"{run}-2"]) / 2, "float64")
            if column == "tau":
                assert_agree(of_seeds["b", task]["seeds"], sorted([own["b-1"], own["b-2"]]), "float64")
                found = sorted([own["b-1"] - own["a-1"], own["b-2"] - own["a-2"]])
                assert_agree(pairs["b", "a", task]["seeds"], found, "float64")
                assert_agree(pairs["b", "a", task]["difference"], float(np.mean(found)), "float64")
                found = sorted([2.0 - own["a-1"], 2.0 - own["a-2"]])
                assert_agree(pairs["old", "a", task]["seeds"], found, "float64")
                assert of_seeds["old", task]["seeds"] is None
        for column in ("requests", "rounds", "cut"):
            assert of_seeds["a", task][column] == tau["a-1", task][column] + tau["a-2", task][column]
    rounds = [tau[name, "pooled"]["rounds"] for name in ("a-1", "a-2")]
    for name in ("survival", "accepted"):
        for line, (t, a, *_) in zip(
            *(s["tables"][f"{name}, temperature 0"]["rows"] for s in (each, both)), strict=True
        ):
            assert line[0] == t
            assert_agree(a, float(np.average(line[1:3], weights=rounds)), "float64")


def test_names_of_seeds():
    assert seed_runs(["b-2", "a-10", "b-1", "a-9", "c-7", "d_1"]) == {
        "b": {1: 2, 2: 0}, "a": {9: 3, 10: 1}, "c-7": {None: 4}, "d_1": {None: 5},
    }  # fmt: skip
    for names in (["a", "a-1"], ["a-1", "a-01"], ["a", "a"]):
        with pytest.raises(RecordError, match="rename"):
            seed_runs(names)


def test_seeds_are_paired_by_their_numbers():
    rows = [row_of(name, f"x{i}", [(4, n - 1, n)]) for i in range(2)
            for name, n in (("a-1", 1), ("a-2", 2), ("b-2", 4), ("b-1", 3), ("c-1", 1), ("c-3", 1))]  # fmt: skip
    pairs = columns_of(summarise({}, rows, seeds=True, replicates=5), "differences, temperature 0", ("drafter", "less"))
    assert pairs["b", "a"]["seeds"] == [2.0, 2.0]
    assert pairs["c", "a"]["seeds"] is None and pairs["c", "a"]["difference"] == -0.5


def test_drafters_are_resampled_together():
    """One commits a token more in every round of every prompt: the difference is 1 in every replicate."""
    random, rows = np.random.default_rng(0), []
    for i in range(12):
        rounds = [(3, n - 1, n) for n in random.integers(1, 4, 1 + i)]
        rows += [row_of("a", f"{'xy'[i % 2]}{i}", rounds)]
        rows += [row_of("b", f"{'xy'[i % 2]}{i}", [(4, a + 1, n + 1) for _, a, n in rounds])]
    summary = summarise({}, rows, replicates=200)
    for line in columns_of(summary, "differences, temperature 0", ("task",)).values():
        assert_agree([line["difference"], *line["difference 95%"]], [1.0, 1.0, 1.0], "float64")
    for line in columns_of(summary, "tau, temperature 0", ("drafter", "task")).values():
        low, high = line["tau 95%"]
        assert low < line["tau"] < high


def test_only_prompts_that_all_have_served_are_compared():
    rows = [row_of("a", "x0", [(1, 1, 2)]), row_of("a", "x1", [(1, 0, 1)]), row_of("b", "x0", [(1, 0, 1)])]
    tau = columns_of(summarise({}, rows), "tau, temperature 0", ("drafter", "task"))
    assert tau["a", "pooled"]["requests"] == tau["b", "pooled"]["requests"] == 1
    assert_agree(tau["a", "pooled"]["tau"], 2.0, "float64")
    with pytest.raises(RecordError, match="served by all drafters yet"):
        summarise({}, rows[1:])


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ([], "no finished request yet"),
        (BY_HAND[:2] + BY_HAND[:1], "a request twice"),
        ([row_of("a", "macro1", [])], "a task is called 'macro'"),
        ([{"kind": "anchor"}], "of another program"),
        ([{"kind": "request", "drafter": "a"}], "not those of one run"),
    ],
)
def test_rows_that_are_no_run_are_refused(rows, complaint):
    with pytest.raises(RecordError, match=complaint):
        summarise({}, rows)


# What the engine tells of its time


@each_wing
def test_requests_are_told_of_as_they_end(wing):
    target, drafter = model_of(wing, kinship=1.0, block_size=4, markov_rank=6, stop_ids=(3,))
    engine = engine_of(wing).Engine(target, drafter, 40, batch=2)
    requests = [
        Request(p, n, SamplingLaw(), i) for i, (p, n) in enumerate(zip(prompts(5), (9, 0, 3, 20, 1), strict=True))
    ]
    told, begun = {}, time.perf_counter()
    found = engine.generate(requests, finished=told.__setitem__)
    wall = time.perf_counter() - begun
    assert [told[request] for request in requests] == found
    assert engine.seconds.keys() == {"prefill", "draft", "verify", "commit"}
    assert 0 < sum(engine.seconds.values()) < wall
    for request, completion in zip(requests, found, strict=True):
        assert (completion.seconds > 0) == (request.max_new_tokens > 0)
        assert completion.seconds < wall
        assert completion == Completion(completion.tokens, completion.finish, completion.rounds), "time is no part"
    before = engine.seconds["draft"]
    engine.generate(requests, speculate=False)
    if wing == "fast":
        assert engine.seconds["draft"] == before


# The program on the toy


def run(capsys, *arguments):
    serve_compare.main([str(a) for a in arguments])
    return json.loads(capsys.readouterr().out.splitlines()[-1], parse_constant=pytest.fail)


def timeless(path):
    """The rows of a record file without their times."""
    return [{k: v for k, v in row.items() if k not in ("wall", "latency", "parts")} for row in read(path)[1]]


def test_the_toy_end_to_end(tmp_path, capsys):
    path = tmp_path / "records"
    serve_compare.main([*TOY, "--limit", "3", "--out", str(path)])
    *lines, last = capsys.readouterr().out.splitlines()
    summary, (provenance, rows) = json.loads(last), read(path)
    assert any("Accepted length" in line for line in lines)
    assert len(rows) == summary["requests"] == 3 * 2 * 6  # drafters, temperatures, prompts
    assert provenance["drafters"].keys() == {"parallel", "chained"}
    target, found = serve_compare.program.toy.study(3)
    drafter = serve_compare.program.study_drafters(importlib.import_module("reference"), 7)["chained"]
    requests = [
        Request(tokens, 30, SamplingLaw(), (980406, i))
        for i, tokens in enumerate([tokens for domain in found.values() for tokens in domain])
    ]
    completions = Engine(target, drafter, 40).generate(requests)
    tau = columns_of(summary, "tau, temperature 1", ("drafter", "task"))
    assert_agree(tau["chained", "pooled"]["tau"], tokens_per_round(completions), "float64")
    for (name, _), line in columns_of(summary, "speed, temperature 0", ("drafter", "task")).items():
        assert line["tokens/s"] > 0 and 0 < line["p50 s"] <= line["p90 s"] <= line["p99 s"]
        assert sum(line[part] for part in serving_report.PARTS) < 1
        assert line["same text"] == (None if name == "plain" else 1.0)

    written = path.read_bytes()
    assert run(capsys, *TOY, "--limit", 3, "--out", path, "--quiet") == summary
    assert path.read_bytes() == written
    more = run(capsys, *TOY, "--limit", 3, "--out", path, "--quiet", "--temperature", 0.5)
    assert path.read_bytes().startswith(written)
    assert {"tau, temperature 0", "tau, temperature 0.5", "tau, temperature 1"} < more["tables"].keys()

    serving_report.main([str(path)])
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == more


@pytest.mark.parametrize("stop", [0, 1, 7, 11])
def test_a_stopped_run_goes_on_and_serves_nothing_twice(tmp_path, capsys, monkeypatch, stop):
    flags = [*TOY, "--limit", 2, "--quiet", "--temperature", 1]
    run(capsys, *flags, "--out", tmp_path / "whole")
    with monkeypatch.context() as patch:
        append = RecordFile.append

        def stopping(self, row):
            if len(self.rows) == stop:
                raise KeyboardInterrupt
            append(self, row)

        patch.setattr(RecordFile, "append", stopping)
        with pytest.raises(SystemExit, match="goes on where it was"):
            run(capsys, *flags, "--out", tmp_path / "stopped")
        assert len(read(tmp_path / "stopped")[1]) == stop
    run(capsys, *flags, "--out", tmp_path / "stopped")
    assert timeless(tmp_path / "stopped") == timeless(tmp_path / "whole")


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--concurrency", 1, 2], "serves one request at a time"),
        (["--concurrency", 0, "--backend", "fast"], "--concurrency must be at least 1"),
        (["--backend", "fast"], "the toy is served with --backend reference"),
        (["--temperature", 0, 0], "--temperature names a value twice"),
        (["--temperature", -1], "temperature must be finite"),
        (["--threshold", 2], "threshold must be a probability"),
        (["--lattice", 4], "without --lattice"),
        (["--limit", 0], "--limit must be at least 1"),
        (["--drafter", "tall"], "the toy has no drafter 'tall'"),
        (["--prompts", "x.jsonl"], "--prompts means nothing to the toy"),
        (["--plot", "records", "--out", "records"], "is the record file"),
    ],
)
def test_bad_commands_are_told_what_to_do(capsys, tmp_path, monkeypatch, flags, complaint):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_:
        run(capsys, *TOY, *flags)
    assert complaint in str(exit_.value)
    assert not list(tmp_path.rglob("*.jsonl")), "refused before anything is written"


def test_the_figure(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    run(capsys, *TOY, "--limit", 1, "--out", tmp_path / "a", "--plot", tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_texts_of_one_token_have_no_rounds(tmp_path, capsys):
    summary = run(capsys, *TOY[:-1], 1, "--limit", 1, "--out", tmp_path / "a")
    tau = columns_of(summary, "tau, temperature 0", ("drafter", "task"))
    assert {line["tau"] for line in tau.values()} == {None}


# Folders, in both wings


@pytest.fixture(scope="module")
def drafters(folder, tmp_path_factory):  # noqa: F811
    """A DSpark and a DFlash drafter with random weights for the tiny target."""
    where = tmp_path_factory.mktemp("drafters")
    config = DecoderConfig.from_dict(CONFIG)
    load = importlib.import_module("reference").Decoder.load
    target = load(folder, dtype="float32")
    widths = {"vocab_size": config.vocab_size, "taps": (-1, 0), "target_layers": config.num_layers, "mask_id": 300}
    for name, made in (("one", dspark(**widths)), ("two", tiny("zlab", **widths))):
        write_drafter(where / name, made, tables=(target.embedding, target.head))
    return where


def test_folders_are_served_alike_by_both_wings_and_side_by_side(folder, drafters, tmp_path, capsys):  # noqa: F811
    pytest.importorskip("torch")
    (tmp_path / "talk.jsonl").write_text('{"id": 0, "turns": ["Name a bird."]}\n{"id": 1, "turns": ["Why?"]}\n')
    flags = [
        "--target", folder, "--drafter", drafters / "one", drafters / "two", "--prompts", tmp_path / "talk.jsonl",
        "--answer-tokens", 12, "--dtype", "float64", "--device", "cpu", "--quiet",
    ]  # fmt: skip
    slow = run(capsys, *flags, "--backend", "reference", "--out", tmp_path / "slow")
    fast = run(capsys, *flags, "--backend", "fast", "--concurrency", 1, 2, "--out", tmp_path / "fast")
    assert slow["provenance"]["drafters"].keys() == {"one", "two"}
    rows = {key_of(row): row for row in timeless(tmp_path / "fast")}
    for row in timeless(tmp_path / "slow"):
        for concurrency in (1, 2):
            theirs = rows[key_of(row | {"concurrency": concurrency})]
            assert theirs == row | {"concurrency": concurrency}
    assert len(rows) == 2 * len(timeless(tmp_path / "slow"))
    for table in ("tau, temperature 0", "differences, temperature 1", "survival, temperature 1"):
        assert slow["tables"][table] == fast["tables"][table]
    sweep = columns_of(fast, "speed, temperature 0", ("drafter", "concurrency", "task"))
    assert {key[:2] for key in sweep} == {(name, n) for name in ("plain", "one", "two") for n in (1, 2)}


def test_a_drafter_without_confidence_is_refused_before_anything_is_served(folder, drafters, tmp_path, capsys):  # noqa: F811
    with pytest.raises(SystemExit, match="two has no confidence head: leave out --threshold"):
        run(
            capsys, "--target", folder, "--drafter", drafters / "one", drafters / "two", "--threshold", 0.5,
            "--backend", "reference", "--answer-tokens", 12, "--limit", 1, "--out", tmp_path / "a",
        )  # fmt: skip
    assert not (tmp_path / "a").exists()
