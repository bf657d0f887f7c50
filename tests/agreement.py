"""One strict comparison and one table of tolerances for every test that compares numbers.

`assert_agree` looks at type, shape, dtype and finiteness before it looks at values, so that a test cannot pass
because of broadcasting, a NaN, or an integer where a float should be.  Its own tests are in
`test_agreement.py`.
"""

import numpy as np

# kind: (absolute tolerance, what it is for)
TOLERANCES = {
    "exact": 0.0,  # token ids, masks, counts, trees; also floats that must be the same bits
    "float64": 1e-12,  # two float64 computations of one quantity
    "golden": 1e-9,  # float64 against arrays computed by others in float64
    "solver": 1e-8,  # float64 against a linear programme
    "printed": 5e-7,  # against values printed with seven decimals
    "float32": 5e-6,  # overlap, total variation and floors: float32 against float64 on identical logits
    "logits32": 1e-5,  # float32 logits against another implementation's
    "walk32": 1e-4,  # floors of a language model walked twice in float32
}


def assert_agree(actual, expected, kind):
    """Fail unless the two agree in shape, kind of dtype, finiteness and, to the tolerance of `kind`, in value.

    Arrays may be NumPy or torch, numbers may be Python's.  NaN and infinities never agree with anything but the
    same non-finite value in the expectation of -inf (a forbidden token); NaN fails always.
    """
    tolerance = TOLERANCES[kind]
    actual, expected = _array(actual), _array(expected)
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    families = tuple("i" if a.dtype.kind in "iu" else a.dtype.kind for a in (actual, expected))
    assert families[0] == families[1], f"dtype {actual.dtype}, expected {expected.dtype}"
    if actual.dtype.kind == "f":
        assert not np.isnan(actual).any(), "NaN in the actual value"
        assert not np.isnan(expected).any(), "NaN in the expected value"
        np.testing.assert_array_equal(np.isinf(actual), np.isinf(expected))
        finite = np.isfinite(expected)
        np.testing.assert_array_equal(actual[~finite], expected[~finite])
        difference = np.abs(actual[finite].astype(np.float64) - expected[finite].astype(np.float64))
        worst = difference.max(initial=0.0)
        assert worst <= tolerance, f"differs by {worst}, allowed {tolerance} ({kind})"
    else:
        assert kind == "exact", f"{actual.dtype} values are compared exactly"
        np.testing.assert_array_equal(actual, expected)


def _array(value):
    if type(value).__module__.startswith("torch"):
        value = value.detach().cpu()
        return value.float().numpy() if str(value.dtype) == "torch.bfloat16" else value.numpy()
    assert value is not None, "nothing to compare"
    return np.asarray(value)
