"""Which layout multiplies how many rows: chosen from times that are measured once and kept on disk."""

import json
import threading
from functools import partial

import pytest
import torch
from torch import nn

from model import layouts, tuning
from model.decoder import Decoder
from model.engine import Target, generate, linear
from model.engine.linear import ROWS, Layouts, halves, packable
from model.layouts import choose, fastest
from model.methods import make_method
from model.tuning import choose_linear
from tests.conftest import greedy, toy_model

needs_copies = pytest.mark.skipif(
    not (halves() and packable(torch.device("cpu"), torch.float32)),
    reason="no x86 processor with FBGEMM and oneDNN",
)
measure = layouts.measure  # the fixture of all tests puts fixed times in its place
# Times of a layer with 1, 9, 80 and 400 rows: of a Xeon where oneDNN is slower in plain steps, of an EPYC, made up
XEON = {"torch": [11.0, 54, 123, 530], "onednn": [21.0, 36, 124, 550], "half": [10.0, 24, 130, 630]}
EPYC = {
    "torch": [97.0, 252, 1272, 6255],
    "half": [40.0, 75, 543, 2678],
    "onednn": [49.0, 83, 554, 2725],
}
SAME = [10.0, 90, 800, 4000]


def without(times, name):
    return {other: seconds for other, seconds in times.items() if other != name}


@pytest.mark.parametrize(
    ("times", "says"),
    [
        (without(XEON, "half"), "onednn for about [9] rows, torch for others"),
        (XEON, "half for about [9] rows, torch for others"),
        (EPYC, "half"),
        (without(EPYC, "half"), "onednn"),
        ({"torch": SAME}, "torch"),
        ({"torch": SAME, "half": SAME}, "torch"),
        ({"torch": SAME, "half": [8.1, 90, 800, 4000]}, "torch"),
        (
            {"torch": SAME, "half": [7.9, 90, 800, 4000]},
            "half for about [1] rows, torch for others",
        ),
        (
            {"torch": SAME, "half": [5.0, 90, 800, 4000], "onednn": [10.0, 90, 80, 400]},
            "half for about [1] rows, torch for others",
        ),
        ({"torch": SAME, "half": [99.0, 999, 8000, 2000]}, "torch"),
        (
            {"torch": SAME, "half": [99.0, 999, 500, 2000]},
            "half for about [80, 400] rows, torch for others",
        ),
    ],
)
def test_the_fastest_layout_for_each_number_of_rows(times, says):
    """None is slower than torch where it is used; a copy must save something, most of all in plain steps."""
    chosen = fastest(times)
    assert str(chosen) == says
    assert all(times[name][i] <= times["torch"][i] for i, name in enumerate(chosen.names))


def test_which_rows_a_layout_serves():
    four = Layouts(("torch", "half", "torch", "half"))
    served = [rows for rows in (1, 2, 3, 26, 27, 178, 179, 5000) if four.of(rows) == "half"]
    assert served == [3, 26, 179, 5000] and four.copy == "half"
    assert {Layouts(("half",)).of(rows) for rows in ROWS} == {"half"}
    assert [Layouts(names).copy for names in (("torch",), ("half",), ("half", "torch"))] == [
        "torch",
        "half",
        "half",
    ]
    assert str(Layouts(("half",))) == str(Layouts(("half",) * 4)) == "half"


class Machine:
    """A clock that products move: 1 ms a row by torch, 2 by oneDNN; other processes may disturb runs or threads."""

    def __init__(self, monkeypatch, disturbed):
        self.now, self.calls, self.disturbed = 0.0, 0, disturbed
        monkeypatch.setattr(layouts.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(layouts, "own_product", partial(self.multiply, 1e-3))
        packed = type("P", (), {"product": partial(self.multiply, 2e-3), "packed": 1})
        monkeypatch.setattr(layouts, "Packed", lambda weight, half, wide: packed)

    def multiply(self, seconds, input, *, weight=None, bias=None):
        self.calls += 1
        self.now += seconds * input.shape[1] * (50 if self.disturbed(self.calls) else 1)


@pytest.mark.parametrize(
    ("disturbed", "calm"),
    [
        (lambda call: False, True),
        (lambda call: call % 8 < 2, True),
        (lambda call: call % 8 < 4, False),
    ],
)
def test_other_processes_disturb_some_runs(disturbed, calm, monkeypatch):
    """If they disturb too many, this is noticed; a slow machine measures no longer than RUNS take."""
    machine = Machine(monkeypatch, disturbed)
    times, is_calm = measure(torch.ones(layouts.COPIES, 4, 4), torch.float32, ["onednn"])
    assert is_calm == calm
    if calm:
        assert times["torch"] == pytest.approx([1e3 * rows for rows in ROWS])
        assert times["onednn"] == pytest.approx([2e3 * rows for rows in ROWS])
    if not any(map(disturbed, range(8))):
        assert machine.now <= 4 * layouts.SECONDS + layouts.RUNS * 3e-3 * sum(ROWS)


@needs_copies
@pytest.mark.parametrize(
    ("dtype", "held"),
    [
        (torch.float32, None),
        (torch.bfloat16, None),
        (torch.float16, None),
        (torch.float32, torch.bfloat16),
    ],
)
def test_real_products_are_timed(dtype, held, monkeypatch):
    monkeypatch.setattr(layouts, "SECONDS", 0)
    possible = ["half"] * (dtype is not torch.bfloat16) + ["onednn"] * packable(
        torch.device("cpu"), dtype
    )
    times, _ = measure(
        torch.full((layouts.COPIES, 64, 48), 0.5, dtype=held or dtype), dtype, possible
    )
    assert set(times) == {"torch", *possible} and all(
        min(seconds) > 0 and len(seconds) == 4 for seconds in times.values()
    )


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """What is measured, from now on, on a calm machine; times are kept in an empty folder."""
    calls = []

    def note(weights, dtype, possible):
        calls.append((tuple(weights.shape[1:]), weights.dtype, dtype, torch.get_num_threads()))
        return {name: XEON[name] for name in ("torch", *possible)}, note.calm

    note.calm = True
    calls.append(note)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(layouts, "measure", note)
    return calls


def network():
    return nn.ModuleList([nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 15), nn.Linear(4, 60)])


def test_times_are_measured_once_for_each_machine_and_shape(measured, monkeypatch):
    def chosen(module=None, possible=("onednn",)):
        return str(choose(module or network(), list(possible)))

    expected = "onednn for about [9] rows, torch for others"
    assert chosen() == chosen() == expected
    assert measured[1:] == [((16, 8), torch.float32, torch.float32, torch.get_num_threads())], (
        "most of the weights"
    )
    chosen(possible=("half",))
    chosen(network().half())
    chosen(nn.ModuleList([nn.Linear(8, 17)]))
    assert len(measured) == 5
    changed = {
        "torch.get_num_threads": lambda: 77,
        "torch.__version__": "9",
        "model.layouts.processor": lambda: "x",
    }
    for number, name in enumerate(changed):
        monkeypatch.setattr(name, changed[name])
        assert chosen() == chosen() == expected and len(measured) == 6 + number
    chosen(nn.ModuleList([nn.Linear(1 << 10, 1 << 12)]))
    assert measured[-1][0] == (513, 1 << 10), "a part of a large weight"


def test_a_disturbed_measurement_is_not_kept(measured, tmp_path):
    measured[0].calm = False
    for _ in range(2):
        assert str(choose(network(), ["half"])) == "half for about [9] rows, torch for others"
    assert len(measured) == 3 and not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "{",
            "[]",
            "null",
            "\ud800",
            '{"torch": 3}',
            '{"torch": [1, 2, 3, 4]}',
            '{"onednn": [1, 2, 3, 4]}',
        ),
        '{"torch": [1, 2, 3], "onednn": [1, 2, 3, 4]}',
        '{"torch": [1, 2, 3, 0], "onednn": [1, 2, 3, 4]}',
        '{"torch": [1, 2, 3, "4"], "onednn": [1, 2, 3, 4]}',
    ],
)
def test_a_broken_file_is_measured_and_written_anew(text, measured, tmp_path):
    choose(network(), ["onednn"])
    (file,) = (tmp_path / "token_recycling").iterdir()
    whole = file.read_bytes()
    file.write_bytes(text.encode(errors="surrogatepass"))
    for _ in range(2):
        choose(network(), ["onednn"])
    assert len(measured) == 3 and file.read_bytes() == whole


@pytest.mark.parametrize("where", ["file", "file/below", ""])
def test_a_folder_that_cannot_be_written_is_no_error(where, measured, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    monkeypatch.setenv("XDG_CACHE_HOME", where and str(tmp_path / where))
    for _ in range(2):
        assert choose(network(), ["half"]).copy == "half"
    assert len(measured) == 3


def test_processes_that_measure_at_once_leave_a_whole_file(measured, tmp_path):
    threads = [threading.Thread(target=choose, args=(network(), ["half"])) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (file,) = (tmp_path / "token_recycling").iterdir()
    assert json.loads(file.read_text()) == without(XEON, "onednn")


@needs_copies
def test_two_layouts_at_once_give_the_same_text(measured, monkeypatch):
    """On a machine where oneDNN is slower in plain steps, these and prompts are torch's, and drafts oneDNN's."""
    monkeypatch.setattr(linear, "SMALL_PRODUCT", 0)
    model, prompt = toy_model("llama"), [*range(3, 43)]
    expected = greedy(model, prompt, 60)
    decoder = Decoder(model, eos=(), method="recycling", nodes=8)
    by_copy, product = [], linear.Packed.product
    monkeypatch.setattr(
        linear.Packed,
        "product",
        lambda self, x, bias: by_copy.append(x.shape[1]) or product(self, x, bias),
    )
    assert decoder.generate(prompt, max_new_tokens=60).ids == expected
    assert set(by_copy) <= {8, 9} and by_copy
    by_copy.clear()
    vanilla = make_method("vanilla", decoder.target, eos=frozenset())
    assert (
        generate(decoder.target, vanilla, prompt, max_new_tokens=60).tokens == expected
        and not by_copy
    )
    assert decoder.settings["linear"] == (
        "onednn for about [9] rows, torch for others (weights packed in oneDNN's layout, a second copy of them; "
        "measured: microseconds of a layer with [1, 9, 80, 400] rows: torch [11.0, 54, 123, 530]; "
        "onednn [21.0, 36, 124, 550])"
    )


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
        monkeypatch.setattr(tuning.psutil, "virtual_memory", free)
        assert choose_linear(model).copy == expected
    assert len(measured) == 2


def test_nothing_is_measured_if_a_layout_is_asked_for_or_no_layer_can_be_packed(measured):
    model = toy_model("llama")
    assert str(choose_linear(model, "torch")) == "torch"
    for layer in linear.plain_linears(model):
        layer.forward = layer.forward
    assert str(choose_linear(model)) == "torch"
    assert str(Target(toy_model("llama")).linear) == "torch" and len(measured) == 1
