"""Where to compute and how precisely.  Twin: `reference/devices.py`.  Tests: `tests/test_devices.py`."""

import os

import torch

from reference.devices import hardware as processor


def placement(device="auto", dtype="auto"):
    """(device, dtype) that this backend runs on, "auto" settled: bfloat16 on CUDA if there is one, else float32.

    "cuda" is this process's current device, and under a launcher that sets LOCAL_RANK the current device is made the
    one of that number: every process of a machine has a GPU of its own, and all of them say where they run alike.

    Args: device, "auto", "cpu", "cuda" or "cuda:N"; dtype, "auto", "float32", "bfloat16" or "float64".
    Raises: ValueError for anything else, or for a device that is not there.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise ValueError(f"device must be cpu, cuda or cuda:N, not {device}") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {device} asked, but this PyTorch sees no CUDA device; use --device cpu")
    if device == "cuda" and (local := os.environ.get("LOCAL_RANK")):
        if int(local) >= torch.cuda.device_count():
            raise ValueError(
                f"process {local} of this machine has no GPU of its own, there are {torch.cuda.device_count()}; "
                "start as many processes as GPUs, or name the device with --device"
            )
        torch.cuda.set_device(int(local))
    if dtype == "auto":
        dtype = "bfloat16" if kind == "cuda" else "float32"
    if dtype not in ("float32", "bfloat16", "float64"):
        raise ValueError(f"dtype must be float32, bfloat16 or float64, not {dtype}")
    return device, dtype


def hardware(device):
    """A name for what is behind a device: the accelerator's, or the processor's."""
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else processor(device)
