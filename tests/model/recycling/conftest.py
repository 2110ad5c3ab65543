"""The method's two forms: NumPy views on the CPU, tensors elsewhere."""

import pytest


@pytest.fixture(params=["arrays", "tensors"])
def form(request, monkeypatch) -> str:
    """Both forms are tested here, the one for a GPU included."""
    if request.param == "tensors":
        for module in ("model.recycling.matrix", "model.devices"):
            monkeypatch.setattr(f"{module}.as_array", lambda tensor: None)
    return str(request.param)
