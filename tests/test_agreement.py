"""The comparison itself must be able to fail."""

import numpy as np
import pytest

from tests.agreement import TOLERANCES, assert_agree

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("kind", TOLERANCES)
def test_equal_values_agree(kind):
    assert_agree(np.array([1.0, -np.inf, 0.5]), torch.tensor([1.0, -np.inf, 0.5], dtype=torch.float64), kind)


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (1.0 + 1e-3, 1.0),
        (-0.5, 0.5),
        (np.ones(3), np.ones((3, 1))),
        (np.ones(3), 1.0),
        (np.nan, np.nan),
        (np.nan, 1.0),
        (1.0, np.nan),
        (np.inf, 1.0),
        (np.inf, -np.inf),
        (1, 1.0),
        (True, 1),
        (None, 0.0),
    ],
)
def test_anything_else_fails(actual, expected):
    with pytest.raises(AssertionError):
        assert_agree(actual, expected, "float32")


def test_each_tolerance_is_an_edge():
    for kind, tolerance in TOLERANCES.items():
        assert_agree(0.5 * tolerance, 0.0, kind)
        with pytest.raises(AssertionError):
            assert_agree(1.5 * tolerance + 1e-300, 0.0, kind)


def test_integers_are_exact():
    assert_agree(np.array([1, 2]), torch.tensor([1, 2]), "exact")
    with pytest.raises(AssertionError):
        assert_agree(np.array([1, 2]), np.array([1, 3]), "exact")
    with pytest.raises(AssertionError):
        assert_agree(1, 1, "float64")
