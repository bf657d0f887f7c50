"""The suite can fail: seeded faults in the estimators, each of which must turn a named part of it red."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MUTANTS = {  # what is forgotten: (file, what stands there, what stands there instead, the tests that must notice)
    "a weight": ("reference/distance.py", "weight = (weights / total)[order]", "weight = (0 * weights + 1 / len(rows))[order]", "distance"),
    "the rule for ties": ("reference/distance.py", "step * np.clip((1 - below.sum()) / step.sum(), 0, 1)", "step * 0", "distance"),
    "the second direction": ("reference/floors.py", "even.sum() * even_risk + odd.sum() * odd_risk", "weight.sum() * odd_risk", "floors"),
    "the cell": ("reference/floors.py", "slot.history(min(order, slot.index))", "slot.history(min(order, 0))", "floors"),
    "the predecessor": ("reference/paths.py", "past[parent], token[:, None]", "past[parent], past[parent][:, -1:]", "paths"),
    "a stop": ("reference/paths.py", "& ~np.isin(drawn, list(stop_ids))", "", "paths"),
    "the strict edge": ("reference/laws.py", 'cumulative[-1], side="right"', 'cumulative[-1], side="left"', "laws"),
    "the first token": ("reference/laws.py", "before[..., 0] = -1", "before[..., 0] += 0", "laws"),
    "inclusion": ("reference/stats.py", "weight = (1 / inclusion)", "weight = (0 * inclusion + 1)", "stats"),
    "the second stage": ("reference/stats.py", "inclusion=a.inclusion * count / len(anchors)", "inclusion=a.inclusion", "stats"),
    "the prompt": ("reference/stats.py", "np.unique(np.asarray(prompts), return", "np.unique(np.arange(len(prompts)), return", "stats"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_forgetting_is_noticed(name, tmp_path):
    file, there, instead, tests = MUTANTS[name]
    for folder in ("reference", "models", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "tiny"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    source = (ROOT / file).read_text()
    assert source.count(there) == 1, f"{file} has changed: the mutant needs another place"
    (tmp_path / file).write_text(source.replace(there, instead))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-p",
        "no:cacheprovider",
        f"tests/test_{tests}.py",
        "-k",
        "not fast and not backend",
    ]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 1, f"nobody noticed that {name} was forgotten:\n{run.stdout[-2000:]}"
