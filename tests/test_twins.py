"""The two wings: the same names, the same signatures, and imports that only point down."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import reference

ROOT = Path(__file__).resolve().parents[1]
MAY_IMPORT = {
    "models": {"models"},
    "reference": {"models", "reference"},
    "fast": {"models", "reference", "fast"},
    "examples": {"models", "reference", "fast"},
}


def test_the_same_names():
    fast = pytest.importorskip("fast")
    assert reference.__all__ == fast.__all__ == sorted(reference.__all__)


@pytest.mark.parametrize("name", reference.__all__)
def test_the_same_signature(name):
    fast = pytest.importorskip("fast")
    mine, theirs = getattr(reference, name), getattr(fast, name)
    assert inspect.signature(mine) == inspect.signature(theirs)
    if inspect.isclass(mine) and mine is not theirs:
        shared = [n for n, m in vars(mine).items() if not n.startswith("_") and callable(m)]
        for method in set(shared) - {"empty_cache", "forward"}:  # the reference's own way through the layers
            assert inspect.signature(getattr(mine, method)) == inspect.signature(getattr(theirs, method)), method


def test_twins_share_their_file():
    fast = pytest.importorskip("fast")
    for name in reference.__all__:
        mine, theirs = getattr(reference, name), getattr(fast, name)
        if mine is not theirs:
            assert mine.__module__.split(".")[1] == theirs.__module__.split(".")[1]


@pytest.mark.parametrize("floor", MAY_IMPORT)
def test_imports_point_down(floor):
    for path in (ROOT / floor).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names += [node.module, *(f"{node.module}.{a.name}" for a in node.names)]
            for name in {n.split(".")[0] for n in names} & set(MAY_IMPORT):
                assert name in MAY_IMPORT[floor], f"{path} imports {name}"
            if floor in ("models", "reference"):  # nor inside a function
                assert not {"torch", "importlib.import_module"} & set(names), f"{path} reaches up"


def test_reference_does_not_import_torch():
    program = "import sys, reference, reference.protocol, reference.report; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_public_functions_are_documented():
    for name in reference.__all__:
        assert inspect.getdoc(getattr(reference, name)), name
