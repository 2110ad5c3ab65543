"""Which layout multiplies how many rows: chosen from times that are measured once and kept."""

import pytest
import torch
from torch import nn

from model.decoder import Decoder
from model.weights import linear, linear_choice
from model.weights.linear import Layouts, halves, packable
from model.weights.linear_choice import choose_linear, fastest, fastest_of
from tests.conftest import greedy, toy_model

needs_copies = pytest.mark.skipif(
    not (halves() and packable(torch.device("cpu"), torch.float32)),
    reason="no x86 processor with FBGEMM and oneDNN",
)
measure = linear_choice.measure  # the fixture of all tests puts fixed times in its place
# Times of a layer with 1, 9, 80 and 400 rows: of a Xeon, of an EPYC, made up
XEON = {"torch": [11.0, 54, 123, 530], "onednn": [21.0, 36, 124, 550], "half": [10.0, 24, 130, 630]}
EPYC = {
    "torch": [97.0, 252, 1272, 6255],
    "half": [40.0, 75, 543, 2678],
    "onednn": [49.0, 83, 554, 2725],
}
SAME = [10.0, 90, 800, 4000]


@pytest.mark.parametrize(
    ("times", "says"),
    [
        (XEON, "half for about [9] rows, torch for others"),
        (EPYC, "half"),
        ({"torch": SAME, "half": [8.1, 90, 800, 4000]}, "torch"),
        ({"torch": SAME, "half": [7.9, 90, 800, 999]}, "half for about [1, 400] rows, torch for"),
        ({"torch": SAME, "half": [99.0, 999, 8000, 2000]}, "torch"),
    ],
)
def test_the_fastest_layout_for_each_number_of_rows(times, says):
    """None is slower than torch where it is used; most of all plain steps count."""
    chosen = fastest(times)
    assert str(chosen).startswith(says) and (says != "torch" or str(chosen) == says)
    assert all(times[name][i] <= times["torch"][i] for i, name in enumerate(chosen.names))


def test_which_rows_a_layout_serves():
    four = Layouts(("torch", "half", "torch", "half"))
    served = [rows for rows in (1, 2, 3, 26, 27, 178, 179, 5000) if four.of(rows) == "half"]
    assert served == [3, 26, 179, 5000] and four.copy == "half"
    assert Layouts(("torch",)).copy == "torch" and str(Layouts(("half",) * 4)) == "half"


@needs_copies
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_real_products_are_timed(stored, monkeypatch):
    monkeypatch.setattr(linear_choice, "SECONDS", 0)
    weights = torch.full((linear_choice.COPIES, 64, 48), 0.5, dtype=stored)
    times, _ = measure(weights, torch.float32, ["half", "onednn"])
    assert set(times) == {"torch", "half", "onednn"}
    assert all(min(seconds) > 0 and len(seconds) == 4 for seconds in times.values())


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """The shapes that are measured from now on; times are kept in an empty folder."""
    calls = []

    def note(weights, dtype, possible):
        calls.append(tuple(weights.shape[1:]))
        return {name: XEON[name] for name in ("torch", *possible)}, True

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(linear_choice, "measure", note)
    return calls


def network():
    return nn.ModuleList([nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 15), nn.Linear(4, 60)])


def test_times_are_measured_once_for_each_machine_and_shape(measured, monkeypatch):
    for _ in range(2):
        assert fastest_of(network(), ["onednn"]).copy == "onednn"
    assert measured == [(16, 8)], "most of the weights"
    fastest_of(nn.ModuleList([nn.Linear(1 << 10, 1 << 12)]), ["onednn"])
    assert measured[1:] == [(513, 1 << 10)], "a part of a large weight"
    monkeypatch.setattr("torch.get_num_threads", lambda: 77)
    fastest_of(network(), ["onednn"])
    assert len(measured) == 3


def test_a_measurement_that_is_disturbed_or_cannot_be_written_is_not_kept(
    measured, monkeypatch, tmp_path
):
    monkeypatch.setattr(linear_choice, "measure", lambda *_: (EPYC, False))
    assert fastest_of(network(), ["half"]).copy == "half" and not any(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(linear_choice, "measure", lambda *_: (EPYC, True))
    assert fastest_of(network(), ["half"]).copy == "half"


@needs_copies
def test_two_layouts_at_once_give_the_same_text(measured, monkeypatch):
    """Where oneDNN is slower in plain steps, these and prompts are torch's, drafts oneDNN's."""
    monkeypatch.setattr(linear, "SMALL_PRODUCT", 0)
    monkeypatch.setattr(
        "model.engine.target.lean_forward.LeanForward._fastest_rows", lambda lean: 0
    )
    model = toy_model("llama")
    prompt = [*range(3, 43)]
    decoder = Decoder(model, eos=(), method="recycling", nodes=8)
    by_copy = []
    product = linear.Packed.product

    def noted(self, x, bias):
        by_copy.append(x.shape[1])
        return product(self, x, bias)

    monkeypatch.setattr(linear.Packed, "product", noted)
    assert decoder.generate(prompt, max_new_tokens=60).ids == greedy(model, prompt, 60)
    assert set(by_copy) <= {8, 9} and by_copy
    said = "onednn for about [9] rows, torch for others (weights packed in oneDNN's layout"
    assert decoder.settings["linear"].startswith(said)


@needs_copies
@pytest.mark.parametrize(("dtype", "copies"), [(torch.float32, 4), (torch.float16, 2)])
def test_only_copies_that_fit_into_memory_are_measured(dtype, copies, measured, monkeypatch):
    model = toy_model("llama", dtype=dtype)
    size = (linear.half_bytes if copies == 2 else linear.linear_bytes)(model)
    for available, expected in (
        (2 * size, "torch"),
        (2 * size + 2, "onednn" if copies == 4 else "half"),
    ):
        free = type("Free", (), {"available": available})
        monkeypatch.setattr(linear_choice.psutil, "virtual_memory", free)
        assert choose_linear(model).copy == expected
    assert choose_linear(model, "torch").copy == "torch" and len(measured) == 1
