"""The contract of every method: whatever it drafts, and however a step runs, the output is the model's own."""

import os
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
import torch

from model.decoder import Decoder
from model.engine import Sampling, Target, decode, generate
from model.errors import UserError
from model.files import ROOT, load_state, save_state
from model.generate import Generate
from model.methods import METHODS, make_method
from model.methods.vanilla import Vanilla
from tests.conftest import CONFIGS, greedy, toy_model
from tests.model.engine.fake_graphs import FakeGraphs
from tests.model.every_method import SETTINGS, Oracle, V, make, write_companions
from tests.model.sessions import comparable

FORMS = ("eager", "static", "graph")
assert METHODS.keys() <= SETTINGS.keys()
every_method = pytest.mark.parametrize("name", SETTINGS)


@cache
def prompts() -> list[list[int]]:
    """One token; some; one that holds its own answer, so that copies of it are accepted, too."""
    rng = random.Random(1)
    start = [rng.randrange(3, V) for _ in range(6)]
    return [
        [5],
        [rng.randrange(3, V) for _ in range(9)] * 2,
        start + greedy(model(), start, 30) + start,
    ]


@cache
def model():
    return toy_model("llama-grouped")


@cache
def _longest(prompt: tuple[int, ...]) -> list[int]:
    return greedy(model(), list(prompt), 24)


@cache
def plain_sampling(prompt: tuple[int, ...], sampling: Sampling) -> list[int]:
    target = Target(model())
    settings = dict(max_new_tokens=12, sampling=sampling)
    return generate(target, Vanilla(target.device), list(prompt), **settings).tokens


@cache
def _until_end(prompt: tuple[int, ...]) -> list[int]:
    return greedy(model(), list(prompt), 12, [2])


def own_text(prompt, tokens, eos=()):
    """The model's own greedy answer."""
    text = _longest(tuple(prompt))[:tokens]
    return text[: next((i + 1 for i, token in enumerate(text) if token in eos), tokens)]


@pytest.fixture(scope="module")
def companions(tmp_path_factory):
    return write_companions(model(), tmp_path_factory.mktemp("companions"))


def target_of(form, monkeypatch, of=None, **settings):
    of = of or model()
    return FakeGraphs(monkeypatch).target(of) if form == "graph" else Target(of, **settings)


def text_of(steps):
    return [token for step in steps for token in step.tokens]


@every_method
def test_greedy_text_and_the_same_steps_eager_static_and_captured(name, companions, monkeypatch):
    by_form = []
    for form in FORMS:
        target = target_of(form, monkeypatch)
        drafter = make(name, target, companions)
        answers = []
        for prompt in prompts():
            out = generate(target, drafter, prompt, max_new_tokens=16, execution=form)
            assert out.tokens == own_text(prompt, 16), form
            assert sum(out.accept_lengths) == len(out.tokens) == 16 and out.stop == "length"
            assert all(len(step.rank_path) == step.accepted - 1 for step in out.steps[:-1])
            assert (
                out.steps[-1].accepted - 1 <= len(out.steps[-1].rank_path) <= out.steps[-1].accepted
            )
            assert max(step.nodes for step in out.steps) <= drafter.max_nodes
            assert out.forwards - len(out.steps) in (0, len(prompt) > 1)
            answers.append(out.steps)
        by_form.append((answers, comparable(drafter.state_dict())))
    assert by_form[0] == by_form[1] == by_form[2]
    lengths = [step.accepted for steps in by_form[0][0] for step in steps]
    if name == "vanilla":
        assert set(lengths) == {1}
    elif name not in ("medusa", "hydra", "eagle", "eagle2", "eagle3"):  # whose heads know nothing
        assert max(lengths) > 2, "if nothing is accepted nothing is shown"


@every_method
def test_sampled_text_is_plain_samplings(name, companions):
    target = Target(model())
    drafter = make(name, target, companions)
    prompt = prompts()[1]
    for form, sampling in (
        ("eager", Sampling(temperature=1.0, repetition_penalty=1.2, seed=3)),
        ("static", Sampling(temperature=1.0, top_p=0.9, seed=2)),
    ):
        settings = dict(max_new_tokens=12, sampling=sampling, execution=form)
        out = generate(target, drafter, prompt, **settings)
        assert out.tokens == plain_sampling(tuple(prompt), sampling)
        assert sum(out.accept_lengths) == 12


@every_method
def test_it_ends_with_any_eos_at_the_limit_and_at_the_contexts_end(name, companions):
    """The second answers are hot: a draft of what is known runs past the end."""
    prompt = prompts()[2]
    free = own_text(prompt, 12)
    near = len(prompt) + 7
    for context, eos, limit, stop in (
        (256, {free[10], 1000}, 12, "eos"),
        (256, {free[0]}, 12, "eos"),
        (256, set(), 3, "length"),
        (near, set(), 12, "context"),
    ):
        target = Target(model(), context=context)
        drafter = make(name, target, companions, eos=eos)
        for form in ("eager", "static"):
            settings = dict(max_new_tokens=limit, eos=eos, execution=form)
            out = generate(target, drafter, prompt, **settings)
            assert out.tokens == own_text(prompt, min(limit, context - len(prompt)), eos)
            assert out.stop == stop
            assert sum(out.accept_lengths) == len(out.tokens)


@every_method
def test_processors_and_criteria_are_called_once_a_token_and_never_behind_the_end(name, companions):
    """As `generate` calls them: a grammar has no answer there."""
    target = Target(model())
    prompt = prompts()[2]
    free = own_text(prompt, 24)
    for eos, limit, stop in (({free[9]}, 24, 24), (set(), 24, 11)):
        drafter = make(name, target, companions, eos=eos)
        expected = own_text(prompt, min(limit, stop), eos)
        for _ in range(2):  # hot: what is drafted goes past the end
            texts = []
            asked = []

            def note(ids, scores, texts=texts):
                texts.append(ids[0].tolist())
                model()(ids[:, -3:])  # between a forward and what is learnt from it
                return scores

            def ends(text, asked=asked, stop=stop):
                asked.append(text)
                return len(text) == len(prompt) + stop

            settings = dict(max_new_tokens=limit, eos=eos, ends=ends)
            settings["sampling"] = Sampling(processors=(note,))
            assert generate(target, drafter, prompt, **settings).tokens == expected
            assert texts == [prompt + expected[:count] for count in range(len(expected))]
            assert asked == [*texts[1:], prompt + expected]


@every_method
def test_a_processor_may_call_the_model_and_this_method_itself(name, companions):
    """Between a forward and what is learnt from it."""
    ours = Generate(name.split()[0], **SETTINGS[name] | companions.get(name, {}))
    inner = []

    def answer(prompt, tokens, *processors):
        settings = dict(max_new_tokens=tokens, do_sample=False, eos_token_id=[], pad_token_id=0)
        ids = torch.tensor([prompt])
        out = model().generate(
            ids, custom_generate=ours, logits_processor=[*processors], **settings
        )
        return out[0, len(prompt) :].tolist()

    def process(ids, scores):
        model()(ids[:, -3:])
        inner.append(answer(prompts()[1], 2))
        return scores

    assert answer(prompts()[2], 8, process) == own_text(prompts()[2], 8)
    assert inner == [own_text(prompts()[1], 2)] * 8


@every_method
def test_a_criterion_may_call_this_method_itself_after_a_captured_step(
    name, companions, monkeypatch
):
    target = target_of("graph", monkeypatch)
    drafter = make(name, target, companions)
    settings = dict(max_new_tokens=12, execution="graph")

    def ends(text):
        answer = generate(target, drafter, prompts()[1], **settings | dict(max_new_tokens=3))
        assert answer.tokens == own_text(prompts()[1], 3)
        return False

    out = generate(target, drafter, prompts()[2], ends=ends, **settings)
    assert out.tokens == own_text(prompts()[2], 12)
    if not drafter.stateful:
        assert out.steps == generate(target, drafter, prompts()[2], **settings).steps


@every_method
def test_a_saved_state_goes_on_exactly_and_a_reset_forgets(name, companions, tmp_path):
    target = Target(model())
    whole, part, fresh = (make(name, target, companions) for _ in range(3))

    def answer(drafter, prompt):
        return generate(target, drafter, prompt, max_new_tokens=20).steps

    expected = []
    for prompt in prompts()[:2] * 2:
        save_state(part.state_dict(), tmp_path / "state.safetensors")
        part = make(name, target, companions)
        part.load_state_dict(load_state(tmp_path / "state.safetensors"))
        expected.append(answer(whole, prompt))
        assert answer(part, prompt) == expected[-1]
    assert comparable(part.state_dict()) == comparable(whole.state_dict())
    learnt = expected[:2] != expected[2:]
    assert learnt == whole.stateful == bool(whole.state_dict()), "what is kept is of use"
    whole.reset()
    assert comparable(whole.state_dict()) == comparable(fresh.state_dict())
    assert [answer(whole, prompt) for prompt in prompts()[:2]] == expected[:2]


@every_method
def test_sequences_in_turns_do_not_disturb_each_other(name, companions):
    """Whose turn it is is drawn by chance; then the method forgets, and an answer is abandoned."""
    target = Target(model())
    rng = random.Random(2)
    drafter = make(name, target, companions)

    def begin(prompt, form="static"):
        return decode(target, drafter.session(), prompt, max_new_tokens=16, execution=form)

    in_turns = {i: begin(prompt) for i, prompt in enumerate(prompts())}
    steps = {i: [] for i in in_turns}
    while in_turns:
        i = rng.choice(sorted(in_turns))
        if (step := next(in_turns[i], None)) is None:
            del in_turns[i]
        else:
            steps[i].append(step)
    for i, prompt in enumerate(prompts()):
        assert text_of(steps[i]) == own_text(prompt, 16)
    abandoned = begin(prompts()[1], "eager")
    next(abandoned)
    tokens = []
    for i, step in enumerate(begin(prompts()[2], "eager")):
        tokens += step.tokens
        if i % 3 == 0:
            drafter.reset()
        if i == 4:
            abandoned.close()
    assert tokens == own_text(prompts()[2], 16)


@every_method
def test_a_conversation_keeps_the_cache_of_its_earlier_turns(name, companions, forwarded):
    """Only what is new of a prompt is forwarded, with the draft of `begin`."""
    target = Target(model())
    drafter = make(name, target, companions, eos={2})
    decoder = Decoder(target, method=drafter, eos={2})
    prompt = [5, 9, 7, 11, 8, 20, 31, 5, 9]
    for turn in range(3):
        forwarded.clear()
        answer = decoder.generate(prompt, max_new_tokens=12)
        assert answer.ids == _until_end(tuple(prompt))
        if name == "sps":
            pass  # its draft model's forwards are counted, too
        elif turn and not drafter.needs.hidden:
            assert forwarded[0] <= 4 + drafter.max_nodes - 1, "the prompt less what the cache has"
        else:
            assert forwarded[0] >= len(prompt) - 1
        prompt = [*prompt, *answer.ids, 40 + turn, 6, 7]
    edited = [5, 9, 8, *prompt[3:]]  # two tokens are the same
    assert decoder.generate(edited, max_new_tokens=12).ids == _until_end(tuple(edited))


@every_method
def test_threads_that_share_it_answer_as_alone(name, companions):
    """A decoder, and transformers' generate with this decoding, hot and cold."""
    of = toy_model("llama-grouped")
    # lets the others overwrite what they can
    of.register_forward_pre_hook(lambda *_: time.sleep(0.0005))
    settings = SETTINGS[name] | companions.get(name, {}) | {"method": name.split()[0]}
    hot = Decoder(of, linear="torch", eos=(), **settings)
    cold = Generate(start="cold", linear="torch", **settings)

    def work(prompt):
        ids = torch.tensor([prompt])
        options = dict(max_new_tokens=10, do_sample=False, eos_token_id=[], pad_token_id=0)
        out = of.generate(ids, custom_generate=cold, **options)
        return hot.generate(prompt, max_new_tokens=10).ids, out[0, len(prompt) :].tolist()

    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(work, prompts()))
    assert answers == [(own_text(prompt, 10),) * 2 for prompt in prompts()]


def extended(more=9):
    """The same model with ids that its head never gives, as Mllama's picture token."""
    of = toy_model("llama-grouped")
    rows = of.get_input_embeddings().weight.detach()
    of.set_input_embeddings(
        torch.nn.Embedding.from_pretrained(torch.cat((rows, 0.5 * rows[:more])), freeze=False)
    )
    return of


@cache
def answers_beyond():
    rng = random.Random(3)
    prompts = [[rng.randrange(40, V + 9) for _ in range(20)] + [V + 8] for _ in range(2)]
    return [(prompt, greedy(extended(), prompt, 12)) for prompt in prompts]


@pytest.mark.parametrize(
    "name", [name for name in SETTINGS if name not in ("rest", "sps")]
)  # files of their own size
def test_a_prompt_may_have_ids_beyond_the_heads_rows(name, companions):
    of = extended()
    target = Target(of)
    drafter = make(name, target, companions)
    for prompt, expected in answers_beyond():
        assert generate(target, drafter, prompt, max_new_tokens=12).tokens == expected


def test_ids_and_drafters_of_another_vocabulary_are_refused():
    small = Target(model())
    large = Target(extended())
    for name in ("dynamic", "goose"):
        with pytest.raises(UserError, match=f"made for {V + 9} token ids"):
            generate(small, make_method(name, large), [5, 6], max_new_tokens=4)
    with pytest.raises(UserError, match="ids outside the vocabulary"):
        generate(small, make_method("dynamic", small), [5, V], max_new_tokens=4)
    of = toy_model("llama-grouped")
    of.set_input_embeddings(torch.nn.Embedding(V - 1, 32))
    with pytest.raises(UserError, match=f"head has {V} rows, its embedding {V - 1}"):
        Target(of)


@pytest.mark.slow
def test_compiled_loops_stay_inside_their_arrays(tmp_path):
    """This file and a forward's, with numba's checks, compiled anew: an index out of bounds raises."""
    checked = os.environ | {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-k",
        "(captured or saved) and (dynamic or suffix or logitspec) or models_own and grouped",
        __file__,
        "tests/model/engine/test_lean_forward.py",
    ]
    run = subprocess.run(
        [*command, "-m", "not slow"], env=checked, cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout[-2000:]


WRONG = {
    "pld": dict(max_ngram=[0, 10**7], draft_tokens=[0, 2.5], depth=[3]),
    "suffix": dict(min_match=[0], max_draft=[0, 2.5], factor=[0, "four", float("inf")]),
    "suffix_decoding": dict(
        nodes=[0, 4097, 2.5],
        depth=[1, None],
        factor=[-1, True, float("nan")],
        offset=[-0.5, 5000],
        min_token_prob=[-0.1, 1.5],
        branches=[1, "yes"],
        cached_answers=[-1, 0.5],
    ),
    "suffix_recycling": dict(min_match=[0], max_draft=[0], history_tokens=[1, -1, True]),
    "lookahead": dict(level=[2], window=[0, 1100], guess=[0]),
    "ngram_cache": dict(leader=[0], follower=[0], capacity=[0], followers=[0], nodes=[2]),
    "rest": dict(min_ngram=[0, 17], nodes=[0], depth=[0], places=[0]),
    "recycling": dict(
        k=[0, V + 1, "abc"],
        update=["some"],
        nodes=["many", "auto", "auto:8", 4097],
        tree=["best", "9.9", 5, "best:²", "best:4097"],
        target=[5],
        recycle_prompt=["no"],
    ),
    "goose": dict(nodes=[0, 4097, "24"], history_pairs=[-1, 0.5]),
    "logitspec": dict(nodes=[0, 4097, None], history_tokens=[1]),
    "racer": dict(nodes=[0, True], k=[0, V + 1], ngram=[1], min_match=[11], trie_nodes=[11, None]),
    "dynamic": dict(
        nodes=[-1, "many", "auto:", "auto:²", "auto:4097"],
        k=[0, V + 1],
        pairs=[1, 3, 1000, 2.0, 2**25],
        calibrate=[[]],
    ),
    "sps": dict(draft_tokens=[0, 10**9]),
    "eagle2": dict(depth=[0], top_k=[V + 1], nodes=[1.5]),
    "samd": dict(min_match=[0], max_draft=[0, 2.5], depth=[0]),
    "eagle3": dict(top_k=[41]),  # of 40 tokens
}


@pytest.mark.parametrize("name", WRONG)
def test_settings_out_of_range_are_refused_by_name(name, companions):
    target = Target(model())
    for setting, values in WRONG[name].items():
        for value in values:
            settings = companions.get(name, {}) | {setting: value}
            with pytest.raises(UserError, match=setting) as refused:
                make_method(name, target, **settings)
            assert not any(odd in str(refused.value) for odd in ("\n", "('", "Tree("))


@pytest.mark.parametrize("architecture", CONFIGS)
def test_every_architecture(architecture):
    """Also where the context ends: gpt2's table of positions ends there."""
    of = toy_model(architecture)
    target = Target(of)
    for prompt in ([7], [5, 6, 9, 7, 5, 6, 9] * 3, [5, 6, 7, 8] * 60):
        answer = greedy(of, prompt, min(24, 256 - len(prompt)))
        oracle = Oracle(answer + [3] * 24)
        for drafter, form in (
            (make("recycling", target, {}), "static"),
            (oracle, "eager"),
            (oracle, "static"),
        ):
            out = generate(target, drafter, prompt, max_new_tokens=24, execution=form)
            assert out.tokens == answer and sum(out.accept_lengths) == len(answer)
            assert out.stop == ("length" if len(answer) == 24 else "context")
    assert len(out.steps) < 12, "the oracle's paths are accepted"
