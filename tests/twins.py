"""Run a test on a function's both versions, looked up by name: a missing twin is an error."""

import importlib

import numpy as np
import pytest

import reference


def both(name, dtype="float64"):
    """Parametrize a test over the reference function and the fast one wrapped to take and give NumPy arrays."""
    cases = [pytest.param(getattr(reference, name), id="reference"), pytest.param(_Fast(name, dtype), id="fast")]
    return pytest.mark.parametrize(name, cases)


class _Fast:
    def __init__(self, name, dtype):
        self.name, self.dtype = name, dtype

    def __call__(self, *arguments, **options):
        torch, fast = pytest.importorskip("torch"), importlib.import_module("fast")

        def there(a):  # float arrays become tensors
            floats = isinstance(a, np.ndarray) and a.dtype.kind == "f"
            return torch.from_numpy(np.array(a, dtype=self.dtype)) if floats else a

        def back(a):
            return a.numpy() if isinstance(a, torch.Tensor) else a

        if self.name == "draw":  # its uniforms stay on the host
            result = fast.draw(there(arguments[0]), *arguments[1:], **options)
        else:
            result = getattr(fast, self.name)(*map(there, arguments), **options)
        return tuple(map(back, result)) if isinstance(result, tuple) else back(result)
