"""Where each backend computes, and what it refuses before anything is loaded."""

import pytest

import reference


def test_the_reference_runs_on_the_cpu():
    assert reference.placement() == ("cpu", "float32")
    assert reference.placement("cpu", "float64") == ("cpu", "float64")
    for device, dtype in (("cuda", "float32"), ("cpu", "bfloat16"), ("auto", "float16")):
        with pytest.raises(ValueError, match="the reference backend runs float32 or float64 on the CPU"):
            reference.placement(device, dtype)


def test_fast_takes_cuda_where_there_is_one(monkeypatch):
    torch = pytest.importorskip("torch")
    import fast

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert fast.placement() == ("cpu", "float32")
    assert fast.placement("cpu", "bfloat16") == ("cpu", "bfloat16")
    with pytest.raises(ValueError, match="sees no CUDA device; use --device cpu"):
        fast.placement("cuda:1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert fast.placement() == ("cuda", "bfloat16")
    assert fast.placement("cuda:1", "float32") == ("cuda:1", "float32")
    assert fast.placement("cpu") == ("cpu", "float32")


def test_every_process_of_a_machine_has_a_gpu_of_its_own(monkeypatch):
    torch = pytest.importorskip("torch")
    import fast

    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    fast.placement()
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert fast.placement("cuda:0") == ("cuda:0", "bfloat16")
    assert fast.placement("cpu") == ("cpu", "float32")
    assert not chosen
    assert fast.placement() == fast.placement("cuda") == ("cuda", "bfloat16")
    assert chosen == [1, 1]
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match="process 2 of this machine has no GPU of its own, there are 2"):
        fast.placement()


@pytest.mark.parametrize(
    ("device", "dtype", "complaint"),
    [("gpu", "auto", "device must be cpu, cuda or cuda:N"), ("cpu", "float16", "dtype must be float32, bfloat16 or")],
)
def test_fast_names_what_it_cannot_do(device, dtype, complaint):
    pytest.importorskip("torch")
    import fast

    with pytest.raises(ValueError, match=complaint):
        fast.placement(device, dtype)


def test_the_processor_has_a_name():
    assert reference.hardware("cpu")
    pytest.importorskip("torch")
    import fast

    assert fast.hardware("cpu") == reference.hardware("cpu")
