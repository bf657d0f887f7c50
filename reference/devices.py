"""Where a backend computes and how precisely: what each of them can do, asked before anything is loaded.

Twin: `fast/devices.py`.  Tests: `tests/test_devices.py`.
"""

import platform
from pathlib import Path


def placement(device="auto", dtype="auto"):
    """(device, dtype) that this backend runs on, "auto" settled; float32 on the CPU where nothing else is asked.

    Args: device, "auto" or "cpu"; dtype, "auto", "float32" or "float64".
    Raises: ValueError for anything else.
    """
    device = "cpu" if device == "auto" else device
    dtype = "float32" if dtype == "auto" else dtype
    if device != "cpu" or dtype not in ("float32", "float64"):
        raise ValueError(f"the reference backend runs float32 or float64 on the CPU, not {dtype} on {device}")
    return device, dtype


def hardware(device):
    """A name for what is behind a device: the processor's, and how many of them."""
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} x {len(names)}" if names else platform.processor() or platform.machine()
