"""Two sequences at once, step by step in turns: on one method and one target, and on two targets in two threads."""

import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from model.engine import Target, decode, generate
from model.engine.sampling import Sampling
from model.errors import UserError
from model.methods.dynamic import DynamicRecycling
from model.methods.eagle import Eagle, Eagle2
from model.methods.goose import Goose
from model.methods.logitspec import LogitSpec
from model.methods.lookahead import Lookahead
from model.methods.medusa import Medusa
from model.methods.ngram_cache import NgramCache
from model.methods.pld import PromptLookup
from model.methods.racer import Racer
from model.methods.rest import Rest
from model.methods.spine import Spine
from model.methods.sps import Speculative
from model.methods.suffix import Suffix
from model.methods.suffix_recycling import SuffixRecycling
from model.methods.vanilla import Vanilla
from model.recycling import TokenRecycling, build_template
from model.structures.datastore import write_datastore
from tests.conftest import greedy, toy_model
from tests.model.methods.heads import write_eagle, write_medusa
from tests.model.sessions import comparable, each_session

V = 61
MAKE = {
    "vanilla": lambda target, folder: Vanilla(target.device),
    "pld": lambda target, folder: PromptLookup(),
    "suffix": lambda target, folder: Suffix(V),
    "suffix (carried)": lambda target, folder: Suffix(V, history_tokens=4096),
    "suffix_recycling": lambda target, folder: SuffixRecycling(V, build_template("best", nodes=12), min_match=2),
    "spine": lambda target, folder: Spine(V, nodes=12),
    "goose": lambda target, folder: Goose(V),
    "logitspec": lambda target, folder: LogitSpec(V),
    "racer": lambda target, folder: Racer(V, nodes=12, trie_nodes=300),
    "recycling": lambda target, folder: TokenRecycling(V, build_template("2.2.2")),
    "dynamic": lambda target, folder: DynamicRecycling(V, nodes=12, pairs=64),
    "lookahead": lambda target, folder: Lookahead(),
    "ngram_cache": lambda target, folder: NgramCache(V),
    "medusa": lambda target, folder: Medusa(target, heads_path=write_medusa(folder)),
    "eagle": lambda target, folder: Eagle(target, head_path=write_eagle(folder, target.model)),
    "eagle2": lambda target, folder: Eagle2(target, head_path=write_eagle(folder, target.model), nodes=12),
    "rest": lambda target, folder: Rest(datastore_path=datastore(target.model, folder), vocab_size=V),
    "sps": lambda target, folder: Speculative(target=target, draft_path=str(saved(target.model, folder))),
}
OWN = (
    "pld",
    "rest",
    "suffix",
    "lookahead",
    "medusa",
    "eagle",
    "eagle2",
    "sps",
)  # nothing is shared but what never changes


def saved(model, folder):
    model.save_pretrained(folder)
    return folder


def datastore(model, folder):
    """Some of the model's own answers."""
    path = folder / "datastore"
    write_datastore(path, np.array([token for first in range(3, 20) for token in greedy(model, [first] * 3, 40)]), V)
    return str(path)


def in_turns(target, drafter, prompts, seed, new=50, execution="eager"):
    """All prompts at once, whose turn it is drawn by chance: the steps of each."""
    settings = dict(max_new_tokens=new, execution=execution)
    open_ = {i: decode(target, drafter.session(), prompt, **settings) for i, prompt in enumerate(prompts)}
    rng, steps = random.Random(seed), [[] for _ in prompts]
    while open_:
        i = rng.choice(sorted(open_))
        try:
            steps[i].append(next(open_[i]))
        except StopIteration:
            del open_[i]
    return steps


@pytest.mark.parametrize("execution", ["eager", pytest.param("static", marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", MAKE)
def test_sequences_on_one_method_do_not_disturb_each_other(method, execution, tmp_path):
    model, rng = toy_model("llama-grouped"), random.Random(1)
    target = Target(model)
    drafter = MAKE[method](target, tmp_path)
    prompts = [[rng.randrange(3, V) for _ in range(9 + 20 * i)] * 2 for i in range(3)]
    found = in_turns(target, drafter, prompts, seed=2, execution=execution)
    for prompt, steps in zip(prompts, found, strict=True):
        assert [token for step in steps for token in step.tokens] == greedy(model, prompt, 50)
    if method in OWN:  # then not even the accepted lengths depend on who else is there
        assert found == [
            generate(target, drafter, prompt, max_new_tokens=50, execution=execution).steps for prompt in prompts
        ]


@pytest.mark.parametrize("method", MAKE)
def test_every_method_takes_the_same_steps_in_steps_of_fixed_shape(method, tmp_path):
    model, rng = toy_model("llama-grouped"), random.Random(4)
    prompts = [[rng.randrange(3, V) for _ in range(5 + 40 * i)] * 2 for i in range(3)]
    outs = []
    for taken in ("eager", "static"):
        target = Target(model)
        folder = tmp_path / taken
        folder.mkdir()
        drafter = MAKE[method](target, folder)
        outs.append([generate(target, drafter, prompt, max_new_tokens=60, execution=taken).steps for prompt in prompts])
        outs[-1].append(comparable(drafter.state_dict()))
    assert outs[0] == outs[1]


@pytest.mark.parametrize("execution", ["eager", pytest.param("static", marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", MAKE)
def test_every_method_samples_what_plain_sampling_does(method, execution, tmp_path):
    model, rng = toy_model("llama-grouped"), random.Random(5)
    target = Target(model)
    drafter, plain = MAKE[method](target, tmp_path), Target(model)
    ways = [Sampling(temperature=0.5, top_p=0.9, seed=1), Sampling(temperature=1.0, top_p=0.9, seed=2)]
    if execution == "eager":
        ways.append(Sampling(temperature=1.0, repetition_penalty=1.2, seed=3))
    for sampling in ways:
        for length in (1, 6, 40):
            prompt = [rng.randrange(3, V) for _ in range(length)] * 2
            out = generate(target, drafter, prompt, max_new_tokens=40, sampling=sampling, execution=execution)
            expected = generate(plain, Vanilla(plain.device), prompt, max_new_tokens=40, sampling=sampling)
            assert out.tokens == expected.tokens and sum(out.accept_lengths) == len(out.tokens)


def test_a_step_is_yielded_as_soon_as_it_is_known_and_gives_the_whole_answer(llama):
    target, prompt = Target(llama), [5, 6, 7, 5, 6, 7]
    drafter = TokenRecycling(V, build_template("2.2.2"))
    whole = generate(target, drafter, prompt, max_new_tokens=40)
    drafter.reset()
    steps, yielded = decode(target, drafter.session(), prompt, max_new_tokens=40), []
    while True:
        try:
            yielded.append(next(steps))
        except StopIteration as end:
            out = end.value
            break
        assert not torch.is_inference_mode_enabled(), "what is done between two steps is the consumer's own"
    assert yielded == out.steps == whole.steps and (out.tokens, out.stop) == (whole.tokens, whole.stop)
    assert [len(step.tokens) for step in yielded] == out.accept_lengths


def test_an_answer_that_nobody_reads_on_gives_back_what_it_borrowed(llama):
    target, spine = Target(llama), Spine(V, nodes=12)
    steps = decode(target, spine.session(), [5, 6, 7], max_new_tokens=40)
    first = next(steps)
    steps.close()
    assert len(target.caches._free) == 1 and spine.history.borrowed_length is None
    assert spine.history.text.tokens == [5, 6, 7, *first.tokens]


def test_a_hook_is_on_within_a_step_only(llama, tmp_path):
    """An abandoned answer is closed whenever its garbage is collected, be it within another one's step."""
    target, prompt = Target(llama), [5, 6, 7, 5, 6]
    eagle = Eagle(target, head_path=write_eagle(tmp_path, llama))
    abandoned = decode(target, eagle.session(), [9, 8, 7], max_new_tokens=30)
    next(abandoned)
    assert target._hook is None and target.hidden is None

    def abandon(session):
        session.observe_prompt_hidden = lambda *_: abandoned.close()  # within the first step of the other

    expected = generate(target, eagle, prompt, max_new_tokens=30).steps
    drafter = Medusa(target, heads_path=write_medusa(tmp_path / "medusa"))
    each_session(drafter, abandon)
    assert generate(target, drafter, prompt, max_new_tokens=30).tokens == greedy(llama, prompt, 30)
    assert generate(target, eagle, prompt, max_new_tokens=30).steps == expected and target._hook is None


def test_what_fails_in_the_middle_leaves_nothing_lent(llama):
    target, spine = Target(llama), Spine(V, nodes=12)

    def fail(session):
        account, count = session.account, iter(range(3))

        def failing(verification):
            if next(count, None) is None:
                raise KeyboardInterrupt
            account(verification)

        session.account = failing

    each_session(spine, fail)
    with pytest.raises(KeyboardInterrupt):
        generate(target, spine, [5, 6, 7], max_new_tokens=40)
    assert spine.history.borrowed_length is None and len(target.caches._free) == 1
    with pytest.raises(UserError, match="max_new_tokens=0"):
        generate(target, spine, [5], max_new_tokens=0)


def test_caches_of_two_sizes_both_stay(llama):
    target = Target(llama)
    with target.cache(80) as large, target.cache(2) as small:
        pass
    for nodes, expected in ((2, small), (80, large), (2, small)):
        with target.cache(nodes) as cache:
            assert cache is expected or (nodes == 2 and cache is large)
    assert {id(cache) for cache in target.caches._free} == {id(large), id(small)}


def test_two_targets_in_two_threads():
    prompts = [[5, 6, 7, 8] * 3, [9, 8, 7, 6, 5] * 3]
    models = [toy_model("llama", seed=1), toy_model("llama-grouped", seed=2)]
    targets = [Target(model) for model in models]

    def answers(i):
        drafter = TokenRecycling(V, build_template("2.2.2"))
        return [
            generate(targets[i], drafter, prompts[i], max_new_tokens=60, execution="static").tokens for _ in range(6)
        ]

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(answers, range(2)))
    for i, model in enumerate(models):
        assert found[i] == [greedy(model, prompts[i], 60)] * 6
