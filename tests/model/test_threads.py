"""Threads that share a model, a method or a decoder: every answer is what it is alone."""

import functools
import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from model.decoder import Decoder
from model.engine import Target
from model.engine.devices import Turns, turns_of
from model.files import ROOT
from tests.conftest import toy_model

LEARNED = {
    "eagle": {"head_path": "data/embedded/eagle"},
    "medusa": {"heads_path": "data/embedded/medusa"},
}
TOKENS = 20


def giving_way(model):
    """The model, whose forwards let other threads run first: what these overwrite then is wrong in this forward."""
    model.register_forward_pre_hook(lambda *_: time.sleep(0.0005))
    return model


@functools.cache
def embedded():
    """The shipped one, for which there are heads and a draft model."""
    folder = ROOT / "data/embedded"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = giving_way(AutoModelForCausalLM.from_pretrained(folder).eval())
    prompt = tokenizer("Tell me about a river. Tell me about a river.", return_tensors="pt").input_ids
    return model, prompt, stock(model, prompt, TOKENS)


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


def test_decoders_of_one_model_and_calls_without_any_do_not_meet():
    """Two targets whose hooks lie on one module, and transformers' own forwards between them."""
    model, prompt, expected = embedded()
    decoders = [Decoder(model, method=name, eos=(), **settings) for name, settings in LEARNED.items()]
    lengths = [decoder.generate(prompt, max_new_tokens=TOKENS).accept_lengths for decoder in decoders]

    def work(i):
        if i > 1:
            return stock(model, prompt, TOKENS) == expected
        answer = decoders[i].generate(prompt, max_new_tokens=TOKENS)
        return answer.ids == expected and answer.accept_lengths == lengths[i]

    assert in_threads(work) == [True] * 4


def test_hidden_states_are_those_of_the_threads_own_forward():
    """A step of another thread's between a forward and what it left: the hook must not hear it."""
    model, ids = toy_model("llama"), torch.tensor([[5, 6, 7, 8]])
    target = Target(model)
    with torch.inference_mode(), target.hidden_states():
        model(ids)
        own = target.hidden
        other = threading.Thread(target=lambda: model(ids[:, :2]))
        other.start()
        other.join()
        assert own is not None and target.hidden is own


def test_threads_progress_side_by_side():
    """A plain lock is mostly taken again by its last holder, before those who wait have woken up."""
    turns, order = Turns(), []

    def work(i):
        for _ in range(40):
            with turns:
                order.append(i)
                time.sleep(0.002)

    in_threads(work)
    begin = max(order.index(i) for i in range(4))
    end = min(len(order) - order[::-1].index(i) for i in range(4))
    assert sum(one == other for one, other in itertools.pairwise(order[begin:end])) <= 0.2 * (end - begin)


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
