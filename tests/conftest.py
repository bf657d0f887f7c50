"""Hypothesis profiles, and the folders that some tests need and others skip without."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("dev", max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("dev"), derandomize=True)
settings.register_profile("brief", settings.get_profile("ci"), max_examples=5)  # where the same tests run in full too
settings.load_profile(os.environ.get("TEST_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))


@pytest.fixture(scope="session")
def golden():
    """Arrays computed by other projects' own code, where this checkout lies beside them."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data" / "golden"
    if not folder.is_dir():
        pytest.skip("no golden arrays beside this checkout")
    return folder


@pytest.fixture(scope="session")
def smollm2():
    """Folder of SmolLM2-135M-Instruct, a small real model, named by BLOCKFLOOR_SMOLLM2."""
    folder = os.environ.get("BLOCKFLOOR_SMOLLM2")
    if not folder or not (Path(folder) / "model.safetensors").exists():
        pytest.skip("BLOCKFLOOR_SMOLLM2 names no folder with SmolLM2-135M-Instruct")
    return Path(folder)
