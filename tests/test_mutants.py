"""The suite can fail: seeded faults in the estimators, each of which must turn a named part of it red."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DISTANCE, FLOORS, PATHS = "reference/distance.py", "reference/floors.py", "reference/paths.py"
LAWS, STATS = "reference/laws.py", "reference/stats.py"
RISK, SERVING, RESPONSE = "reference/risk.py", "reference/serving.py", "reference/response.py"
VERIFY, OBJECTIVES = "reference/verify.py", "reference/objectives.py"
REWEIGHTING, INFORMATION = "reference/reweighting.py", "reference/information.py"
CLUSTERS, ANCHOR, TABLES = "reference/clusters.py", "reference/anchor.py", "reference/drafter_tables.py"
METER = "reference/draft_meter.py"
TESTED_IN = {"drafter_tables": "tables", "draft_meter": "anchor"}  # where not in a file of the same name
# fmt: off
MUTANTS = {  # what is forgotten: (file, what stands there, what stands there instead)
    "a weight": (DISTANCE, "weight = (weights / total)[order]", "weight = (0 * weights + 1 / len(rows))[order]"),
    "the rule for ties": (DISTANCE, "step * np.clip((1 - below.sum()) / step.sum(), 0, 1)", "step * 0"),
    "the second direction": (FLOORS, "even.sum() * even_risk + odd.sum() * odd_risk", "weight.sum() * odd_risk"),
    "the cell": (FLOORS, "slot.history(min(order, slot.index))", "slot.history(min(order, 0))"),
    "the predecessor": (PATHS, "past[parent], token[:, None]", "past[parent], past[parent][:, -1:]"),
    "a stop": (PATHS, "& ~np.isin(drawn, list(stop_ids))", ""),
    "the strict edge": (LAWS, 'cumulative[-1], side="right"', 'cumulative[-1], side="left"'),
    "the first token": (LAWS, "before[..., 0] = -1", "before[..., 0] += 0"),
    "inclusion": (STATS, "weight = (1 / inclusion)", "weight = (0 * inclusion + 1)"),
    "the second stage": (STATS, "inclusion=a.inclusion * count / len(anchors)", "inclusion=a.inclusion"),
    "the rest of the target": (VERIFY, "law = excess if excess.any() else p", "law = p"),
    "the slope of the prefix": (OBJECTIVES, " + by_ratio[..., None] * ratio_slope", ""),
    "the first stop": (OBJECTIVES, "np.cumsum(stops, axis=-1) - stops == 0", "np.cumsum(stops, axis=-1) == 0"),
    "the law of one's own drafts": (RISK, "total += share * (weights @ risks)", "total += (weights @ risks)"),
    "that paths stop": (SERVING, "reach(factors)[..., :-1]], axis=-1) * alive", "reach(factors)[..., :-1]], axis=-1)"),
    "what follows": (RESPONSE, "onward = 1 + factors[:, j] * onward", "onward = factors[:, j] * onward"),
    "which is p and which is q": (SERVING, "(target_p, draft_p), target_p,", "(target_p, draft_p), draft_p,"),
    "the bonus token": (SERVING, "float(1 + _mean(reach, weights).sum())", "float(_mean(reach, weights).sum())"),
    "the sums of a ratio": (
        SERVING, "_ratio((weights * rejected).sum(0), (weights * arrival).sum(0))",
        "_ratio((weights * hazard).sum(0), weights.sum(0))",
    ),
    "that a residual is a law": (VERIFY, "return law / law.sum()", "return law"),
    "the last forced token": (
        REWEIGHTING, "rows = warp(np.asarray(session.grow(node[able], forced)), law)",
        "rows = rows[able] if session.grow(node[able], forced) is not None else rows",
    ),
    "that a floor of order k is an identity": (FLOORS, "if order >= slot.index:  #", "if order > slot.index:  #"),
    "which is the mean": (
        INFORMATION, "_divergence(_mean(rows[here], weights[here]), mean)",
        "_divergence(mean, _mean(rows[here], weights[here]))",
    ),
    "the weights of a cluster": (CLUSTERS, "barycentre(rows[mine], weights[mine])", "barycentre(rows[mine])"),
    "which token leads to the realised slot": (ANCHOR, "[realised[k - 1]])[0]", "[realised[k]])[0]"),
    "how many paths meet a draft": (METER, "own += counts @", "own += np.ones(len(met)) @"),
    "the sign of the exposure": (TABLES, "sample.mean(own, own - risk)", "sample.mean(own, risk - own)"),
    "the prompt": (STATS, "np.asarray(prompts)[here]", "np.arange(len(prompts))[here]"),
}
# fmt: on


@pytest.mark.parametrize("name", MUTANTS)
def test_forgetting_is_noticed(name, tmp_path):
    file, there, instead = MUTANTS[name]
    for folder in ("reference", "models", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "tiny"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    source = (ROOT / file).read_text()
    assert source.count(there) == 1, f"{file} has changed: the mutant needs another place"
    (tmp_path / file).write_text(source.replace(there, instead))
    tests = f"tests/test_{TESTED_IN.get(Path(file).stem, Path(file).stem)}.py"
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", tests, "-k", "not fast and not backend"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 1, f"nobody noticed that {name} was forgotten:\n{run.stdout[-2000:]}"
