"""Threads that share a model, a method or a decoder: every answer is what it is alone."""

import functools
import itertools
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteria, StoppingCriteriaList

from model.decoder import Decoder
from model.decoding import Target, decode
from model.decoding.cache import CachePool, LayerShape, TreeCache
from model.decoding.turns import turns_of
from model.files import ROOT
from model.methods import make_method
from model.transformers_generate import Generate
from tests.conftest import greedy, toy_model

METHODS = ["recycling", "suffix_recycling", "suffix", "lookahead", "spine", "ngram_cache", "dynamic", "pld"]
LEARNED = {
    "eagle": {"head_path": "data/embedded/eagle"},
    "medusa": {"heads_path": "data/embedded/medusa"},
    "sps": {"draft_path": "data/embedded/draft"},
}
TEXTS = [
    "Tell me about a river. Tell me about a river.",
    "The sky is blue, the sky is grey, the sky is",
    "One two three four, one two three",
    "What is the capital of France? What is the capital of Spain?",
]
TOKENS = 20


@pytest.fixture(autouse=True)
def eager_switching():
    """Threads lose the interpreter as often as it goes, as on a machine with many cores."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@functools.cache
def embedded():
    """The shipped model, prompts, and transformers' own answers to them."""
    folder = ROOT / "data/embedded"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    prompts = [tokenizer(text, return_tensors="pt").input_ids for text in TEXTS]
    return model, prompts, [stock(model, prompt, TOKENS) for prompt in prompts]


def stock(model, ids, tokens, **settings):
    out = model.generate(ids, max_new_tokens=tokens, do_sample=False, eos_token_id=[], pad_token_id=0, **settings)
    return out[0, ids.shape[1] :].tolist()


def in_threads(work, count=4):
    """What each of so many threads returns; all begin at once."""
    start = threading.Barrier(count)

    def begin(i):
        start.wait()
        return work(i)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(begin, range(count)))


@pytest.mark.parametrize("method", [*METHODS, *LEARNED])
def test_a_shared_generate_answers_as_alone(method, answers=2):
    model, prompts, expected = embedded()
    hot, cold = (Generate(method, start=start, **LEARNED.get(method, {})) for start in ("hot", "cold"))

    def work(i):
        turns = [(i + j) % len(prompts) for j in range(answers)]
        ways = itertools.cycle((hot, cold))  # cold ones forget what others of their own kind are in the middle of
        return [stock(model, prompts[p], TOKENS, custom_generate=next(ways)) == expected[p] for p in turns]

    assert all(itertools.chain(*in_threads(work)))


@pytest.mark.parametrize("start", ["hot", "cold"])
@pytest.mark.parametrize("method", METHODS)
def test_a_shared_decoder_answers_as_alone(method, start, answers=1):
    model, prompts, expected = embedded()
    decoder = Decoder(model, method=method, start=start)
    decoder.eos = frozenset()

    def work(i):
        found = []
        for j in range(answers):
            p = (i + j) % len(prompts)
            found.append(decoder.generate(prompts[p], max_new_tokens=TOKENS).ids == expected[p])
        return found

    assert all(itertools.chain(*in_threads(work)))


def test_decoders_of_one_model_and_calls_without_any_do_not_meet():
    """Two targets whose hooks lie on one module, and transformers' own forwards between them."""
    model, prompts, expected = embedded()
    decoders = [Decoder(model, method=name, **LEARNED[name]) for name in ("medusa", "eagle")]
    lengths = []
    for decoder in decoders:
        decoder.eos = frozenset()
        lengths.append(decoder.generate(prompts[0], max_new_tokens=TOKENS).accept_lengths)
    batch = torch.cat((prompts[0], prompts[0]))

    def work(i):
        if i > 1:
            return [stock(model, batch, TOKENS) == expected[0] for _ in range(3)]
        found = [decoders[i].generate(prompts[0], max_new_tokens=TOKENS) for _ in range(3)]
        return [one.ids == expected[0] and one.accept_lengths == lengths[i] for one in found]

    assert all(itertools.chain(*in_threads(work)))


def test_hidden_states_are_those_of_the_threads_own_forward():
    """A step of another thread's between a forward and what it left: the hook must not hear it."""
    model, ids = toy_model("llama"), torch.tensor([[5, 6, 7, 8]])
    target = Target(model)
    with torch.inference_mode():
        target.keep_hidden(True)
        model(ids)
        own = target.hidden
        other = threading.Thread(target=lambda: model(ids[:, :2]))
        other.start()
        other.join()
    assert own is not None and target.hidden is own
    target.keep_hidden(False)


@pytest.mark.parametrize("method", METHODS)
def test_a_sequence_survives_that_its_method_forgets(method):
    """A cold start of another answer's, between any two steps."""
    model, prompt = toy_model("llama"), [5, 9, 5, 9, 5]
    settings = {"carry": 64} if method in ("suffix", "suffix_recycling") else {}
    target = Target(model)
    drafter = make_method(method, target, **settings)
    for every in (1, 2, 5):
        tokens = []
        for i, step in enumerate(decode(target, drafter.session(), prompt, max_new_tokens=40)):
            tokens += step.tokens
            if i % every == 0:
                drafter.reset()
        assert tokens == greedy(model, prompt, 40)


def test_threads_progress_side_by_side():
    """A lock that its last holder takes again at once would let one answer run to its end before the next begins."""
    model, prompts, _ = embedded()
    generate, order = Generate("vanilla"), []

    class Note(StoppingCriteria):
        def __init__(self, number):
            self.number = number

        def __call__(self, ids, scores, **kwargs):
            order.append(self.number)
            return torch.tensor([False])

    def work(i):
        time.sleep(0.01 * i)
        stock(
            model, prompts[0], 40, custom_generate=generate, stopping_criteria=StoppingCriteriaList([Note(i)])
        )

    in_threads(work)
    first_end = min(len(order) - 1 - order[::-1].index(i) for i in range(4))
    steps = [order[: first_end + 1].count(i) for i in range(4)]
    assert min(steps) > 0.5 * max(steps), steps


def test_a_turn_is_taken_again_inside_itself_and_released_to_who_waits():
    model = toy_model("llama")
    turns, got = turns_of(model), threading.Event()
    assert Target(model).turns is turns is Target(model).turns
    with turns, turns:
        waiting = threading.Thread(target=lambda: [turns.__enter__(), got.set(), turns.__exit__()])
        waiting.start()
        assert not got.wait(0.05)
        with turns:  # while another one stands in the queue
            pass
    assert got.wait(5)
    waiting.join()


def test_nobody_is_kept_waiting_while_a_stream_is_read():
    model = toy_model("llama")
    decoder = Decoder(model)
    stream = decoder.stream([5, 6, 7], max_new_tokens=30)
    first = next(stream).tokens
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(decoder.generate, [5, 6, 7], max_new_tokens=30).result(timeout=30)
    rest = list(itertools.chain(*(step.tokens for step in stream)))
    assert first + rest == other.ids == greedy(model, [5, 6, 7], 30)


def test_a_pool_lends_each_cache_to_one_borrower():
    shape = LayerShape(1, 4, 4, torch.float32, torch.device("cpu"))
    pool = CachePool(functools.partial(TreeCache, [shape]))
    lent, wrong = set(), []

    def work(i):
        for j in range(300):
            with pool.borrowed(16 + 16 * ((i + j) % 3)) as cache:
                wrong.extend([cache] if cache in lent or cache.capacity < 16 + 16 * ((i + j) % 3) else [])
                lent.add(cache)
                lent.discard(cache)

    in_threads(work)
    assert not wrong
