"""execution=auto on CUDA, told by stand-ins: captured steps where they give eager logits and text, and why not."""

from unittest.mock import Mock

import pytest
import torch

from evaluation.loading.models import LoadedModel, ModelSettings, choose_execution
from model import tuning
from model.engine import Target, generate
from model.engine.attention import attention
from model.engine.graphs.compiled_layers import CompiledLayers
from model.engine.graphs.static_step import StaticForward, StaticStep
from model.engine.rule.verification import Commit
from model.errors import UserError
from model.recycling import TokenRecycling, build_template
from model.tuning import Execution, trial
from tests.conftest import greedy, toy_model

V = 61


@pytest.fixture(autouse=True)
def captured(monkeypatch):
    """Captured steps are static ones, and no kernels are tried unless a test says so."""
    monkeypatch.setattr(tuning, "GRAPH", "static")
    monkeypatch.setattr(tuning, "_try_kernels", lambda target, steps: "")


@pytest.fixture
def loaded():
    """A target that calls itself a GPU's."""
    target = Target(toy_model("llama-grouped"))
    target.attends_by_table = False
    return LoadedModel(ModelSettings("toy", ""), target, None, "chat", frozenset())


FEED = StaticForward.feed
RUN = StaticForward.run
SETTLE = Commit.__call__


def slightly_wrong(step):
    """In one row alone, and by less than a twentieth of its greatest logit: more than rounding makes of it."""
    RUN(step)
    step.logits = step.logits.clone()
    step.logits[-1, 7] += 0.04 * step.logits[-1].abs().max()


def not_a_number(step):
    step.logits = torch.full((step.rows, V), float("nan"))


def refused_capture(step):
    raise RuntimeError("operation not permitted when stream is capturing")


def one_column_less(step, drafts, stretches):
    FEED(step, drafts, [(base, length - 1) for base, length in stretches])


def put_together_wrongly(commit, tokens, choices):
    return SETTLE(commit, tokens, choices.roll(1))


BREAKS = [
    (StaticForward, "feed", one_column_less, "of the greatest away from eager ones"),
    (StaticForward, "run", slightly_wrong, "of the greatest away from eager ones"),
    (StaticForward, "run", not_a_number, "nan of the greatest"),
    (StaticStep, "run", refused_capture, "RuntimeError: operation not permitted"),
    (Commit, "__call__", put_together_wrongly, "its text is not eager decoding's"),
]


@pytest.mark.parametrize("dtype, breaks", [("float32", 5), ("bfloat16", 1), ("float16", 2)])
def test_a_step_that_is_wrong_is_refused(dtype, breaks, monkeypatch):
    """A kernel that attends to one column too few runs without an error: only its logits tell, or the text."""
    target = Target(toy_model("llama-grouped", dtype=getattr(torch, dtype)))
    assert trial(target).name == "static"
    for kind, name, broken, why in BREAKS[:breaks]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kind, name, broken)
            chosen = trial(target)
        assert chosen.name == "eager" and why in chosen.why


def does_not_compile(output):
    raise RuntimeError("no C++ compiler\nand how to get one")


def wrong(output):
    return output * 1.01


def too_large_a_tile(output):
    """As for 64 rows whose tile fits no RTX 30: rows of smaller drafts attend."""
    if output.shape[1] > 64:
        raise RuntimeError("out of resource: shared memory, Required: 139264, limit: 101376")
    return output


BOTH = f"{tuning.TREE_KERNEL} and {tuning.COMPILED}"
TOO_LARGE = "RuntimeError: out of resource: shared memory"
NO_COMPILER = f"without {BOTH}: RuntimeError: no C++ compiler and how to get one"


@pytest.mark.parametrize(
    ("layer", "attends", "seconds", "why", "kept"),
    [
        (torch.clone, torch.clone, [0.01], f"with {BOTH}, 0.5 of the time", (True, True)),
        (torch.clone, torch.clone, [0.02] * 3, f"without {BOTH}: it is no faster", (False, False)),
        (does_not_compile, torch.clone, [0.01], NO_COMPILER, (True, False)),
        (torch.clone, wrong, [0.01] * 2, f"without {BOTH}: its logits are ", (False, True)),
        (torch.clone, too_large_a_tile, [0.01], f"without {BOTH}: {TOO_LARGE}", (False, True)),
    ],
    ids=["faster", "no faster", "does not compile", "wrong attention", "a large tile"],
)
def test_kernels_are_kept_where_they_are_right_and_faster(
    layer, attends, seconds, why, kept, loaded, monkeypatch
):
    """The two together, or one of them where the other one fails."""
    monkeypatch.undo()
    monkeypatch.setattr(tuning, "GRAPH", "static")
    attend = attention._attend_in_turn
    logits = tuning._graph_logits
    times = iter([0.02, *seconds])
    called = set()

    def compiled(own, backend, **how):
        def call(*args, **kwargs):
            called.add(backend)
            return layer(own(*args, **kwargs))

        return call

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(attention, "_attend_in_turn", lambda *given: attends(attend(*given)))
    monkeypatch.setattr(tuning, "_graph_logits", lambda *args: (logits(*args)[0], next(times)))
    chosen = trial(loaded.target)
    assert chosen.name == "static"
    assert chosen.why.startswith(f"a trial gave eager steps' logits and text; {why}")
    compiles = isinstance(loaded.target.kernels, CompiledLayers)
    assert (loaded.target.attends_by_table, compiles) == kept
    called.clear()
    drafter = TokenRecycling(V, build_template("best", nodes=9))
    out = generate(loaded.target, drafter, [5, 6, 7], max_new_tokens=30, execution="static")
    assert out.tokens == greedy(loaded.target.model, [5, 6, 7], 30)
    assert called == ({"inductor"} if compiles else set())


def test_what_has_no_kernel_is_said_and_not_compiled(loaded, monkeypatch):
    """Heads of 8 numbers, and a T4: Triton would fail after seconds of compiling."""
    wide = Target(toy_model("qwen3"))
    for target, capability, why in (
        (loaded.target, (9, 0), "heads have 8 numbers"),
        (wide, (7, 5), "compute capability 8.0 or later"),
        (wide, (8, 6), ""),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "get_device_capability", Mock(return_value=capability))
            patch.setattr(target, "device", torch.device("cuda", 0))
            assert why in target.no_kernel and bool(why) == bool(target.no_kernel)


def test_a_model_without_a_kernel_tries_compiled_layers_alone(loaded, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(tuning, "GRAPH", "static")
    monkeypatch.setattr(Target, "no_kernel", "it is for other GPUs")
    monkeypatch.setattr(torch, "compile", lambda own, **how: own)
    seconds = iter([0.02, 0.01, 0.01])
    logits = tuning._graph_logits
    monkeypatch.setattr(tuning, "_graph_logits", lambda *args: (logits(*args)[0], next(seconds)))
    said = f"without {tuning.TREE_KERNEL}: it is for other GPUs; with {tuning.COMPILED}"
    assert said in trial(loaded.target).why
    assert not loaded.target.attends_by_table


def test_auto_is_tried_once_a_model_and_only_on_cuda(loaded, monkeypatch):
    eager = Execution("eager")
    assert choose_execution("auto", loaded) == eager, "this target is on the CPU"
    tried = [Execution("static", "why")]
    monkeypatch.setattr(tuning, "trial", lambda target: tried.pop())
    monkeypatch.setattr(loaded.target, "device", torch.device("cuda", 0))
    for _ in range(2):
        assert choose_execution("auto", loaded).name == "static"
    assert choose_execution("auto", loaded, timed=False) == eager
    assert choose_execution("auto", loaded, reads_text=True) == eager


def test_a_trial_that_leaves_the_device_unusable_is_one_line(loaded, monkeypatch):
    def unusable(device):
        raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED\nand much more")

    monkeypatch.setattr(StaticStep, "run", refused_capture)
    assert trial(loaded.target).name == "eager"
    monkeypatch.setattr(tuning, "give_back", unusable)
    with pytest.raises(UserError, match="captures_underway.*restart with execution=eager"):
        trial(loaded.target)
