"""The library where its user does the unexpected: a model's own settings, errors, copies, conversations in turns."""

import contextlib
import copy
import io
import logging
import pickle

import pytest
import torch

from model import cli
from model.decoder import Decoder
from model.engine.sampling import GREEDY, Sampling
from model.errors import UserError
from model.files import ROOT
from model.generate import Generate
from tests.conftest import greedy, toy_model

PROMPT = [5, 9, 7, 5, 9, 7, 11]
IDS = torch.tensor([PROMPT])
EMBEDDED = str(ROOT / "data/embedded")


def stock(model, **settings):
    return model.generate(IDS, max_new_tokens=30, do_sample=False, pad_token_id=0, **settings)[
        0, len(PROMPT) :
    ].tolist()


@pytest.mark.parametrize("method", ["vanilla", "dynamic"])
def test_the_models_own_processors_are_applied(method):
    model = toy_model("llama-grouped")
    plain = stock(model)
    decoder = Decoder(model, method=method)
    model.generation_config.repetition_penalty = 1.5
    penalised = stock(model)
    assert decoder.generate(PROMPT, max_new_tokens=30).ids == penalised != plain
    given = Sampling(repetition_penalty=2.5)
    assert decoder.generate(PROMPT, max_new_tokens=30, sampling=given).ids == stock(model, repetition_penalty=2.5)
    model.generation_config.no_repeat_ngram_size = 1
    assert decoder.generate(PROMPT, max_new_tokens=30).ids == stock(model) != penalised


def test_what_is_not_applied_of_a_models_own_settings_is_said(caplog):
    model = toy_model("llama-grouped")
    decoder = Decoder(model, method="vanilla")
    assert not any("generation_config" in name for name in decoder.settings)
    model.generation_config.update(do_sample=True, temperature=0.6, num_beams=4)
    assert (
        decoder.settings["not applied of the model's generation_config"]
        == "do_sample=True, temperature=0.6, num_beams=4"
    )
    with caplog.at_level(logging.WARNING):
        for sampling in (Sampling(temperature=0.5), GREEDY, GREEDY):
            decoder.generate(PROMPT, max_new_tokens=3, sampling=sampling)
    warnings = [record.message for record in caplog.records if "answers are greedy" in record.message]
    assert len(warnings) == 1 and warnings[0].endswith("the model's own do_sample=True, temperature=0.6, num_beams=4")


def linears(model):
    return {type(layer) for layer in model.modules() if isinstance(layer, torch.nn.Linear)}


def test_a_decoder_that_cannot_be_made_leaves_the_model_as_it_was(monkeypatch):
    model = toy_model("llama-grouped")

    def fails(error, **settings):
        with pytest.raises(error):
            Decoder(model, linear="fused", **settings)
        assert linears(model) == {torch.nn.Linear}

    for wrong in ({"method": "nope"}, {"execution": "graph"}, {"start": "nowhere"}):
        fails(UserError, **wrong)
    for error in (KeyboardInterrupt, RuntimeError):

        def failing(*arguments, error=error, **settings):
            assert linears(model) != {torch.nn.Linear}
            raise error

        monkeypatch.setattr("model.decoder.make_method", failing)
        fails(error)


def test_state_files_that_cannot_be_are_one_line(tmp_path):
    decoder = Decoder(toy_model("llama"), method="recycling")
    with pytest.raises(UserError, match="names no file"):
        decoder.save_state("")
    with pytest.raises(UserError, match="is not a saved state"):
        decoder.load_state(tmp_path)
    decoder.save_state(tmp_path / "state")

    def damaged(state):
        raise KeyError("size")

    decoder.method.load_state_dict = damaged
    with pytest.raises(UserError, match=r"state is no state of this method \(KeyError\('size'\)\)"):
        decoder.load_state(tmp_path / "state")


def test_a_context_is_a_number_of_tokens():
    for context in (-5, 0, 1, "abc", 2.5):
        with pytest.raises(UserError, match=f"context={context}: must be"):
            Decoder(toy_model("llama"), context=context)


def test_a_copy_of_a_decoder_says_how_to():
    """Masks and caches are kept by the addresses of things that a copy has elsewhere."""
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(UserError, match="copy the model"):
            copied(Decoder(toy_model("llama")))


def test_training_with_gradient_checkpointing_is_refused_by_name():
    model, generate = toy_model("llama"), Generate()
    decoder = Decoder(model)
    answer = decoder.generate(PROMPT, max_new_tokens=5).ids
    model.generate(IDS, max_new_tokens=5, custom_generate=generate)
    model.gradient_checkpointing_enable()
    assert decoder.generate(PROMPT, max_new_tokens=5).ids == answer
    model.train()
    for way in (
        lambda: Decoder(model),
        lambda: decoder.generate(PROMPT, max_new_tokens=5),
        lambda: model.generate(IDS, max_new_tokens=5, custom_generate=generate),
    ):
        with pytest.raises(UserError, match=r"gradient checkpointing, which keeps no cache; call eval\(\)"):
            way()


def test_a_temperature_that_overflows_is_refused():
    with pytest.raises(UserError, match=r"sampling.temperature=1e-40: out of range"):
        Sampling(temperature=1e-40)
    decoder, cold = Decoder(toy_model("llama"), method="vanilla"), Sampling(temperature=1e-20)
    texts = [decoder.generate(PROMPT, max_new_tokens=20, sampling=sampling).ids for sampling in (GREEDY, cold)]
    assert texts[0] == texts[1]


def test_prompts_are_checked_before_the_first_is_answered(monkeypatch, tmp_path, capsys):
    decoder = Decoder.from_pretrained(EMBEDDED, method="vanilla")
    monkeypatch.setattr(Decoder, "generate", lambda *_, **__: pytest.fail("answered"))
    with pytest.raises(UserError, match="prompt 2: prompt of 5000 tokens"):
        decoder.generate_all([[5, 6], [5] * 5000, [7]], progress=False)
    (tmp_path / "prompts").write_text(f"one\n{'word ' * 6000}\nthree\n")
    monkeypatch.setattr(Decoder, "from_pretrained", lambda *_, **__: decoder)
    with pytest.raises(SystemExit):
        cli.main(["generate", EMBEDDED, "--file", str(tmp_path / "prompts")])
    assert "prompt 2: prompt of" in capsys.readouterr().err


def test_set_takes_settings_of_the_method_alone(capsys):
    for name in ("execution", "dtype", "device", "linear", "quantize", "model", "tokenizer", "eos"):
        with pytest.raises(SystemExit):
            cli.main(["generate", EMBEDDED, "--prompt", "x", "--set", f"{name}=abc"])
        assert f"--set {name}=abc: {name} is no setting of a method" in capsys.readouterr().err


def test_a_chat_survives_a_wrong_setting_and_says_what_ends_a_long_one():
    decoder = Decoder.from_pretrained(EMBEDDED, context=128)
    out = io.StringIO()
    chat = cli.Chat(decoder, out, colours=False, max_new_tokens=40, sampling=GREEDY)
    assert chat.say("Hello there.") and chat.say("/method dynamic eos=1") and len(chat.turns) == 2
    assert "eos is no setting of a method" in out.getvalue()
    for _ in range(9):
        chat.say("Tell me about a river.")
    assert "/reset forgets it" in out.getvalue()
    chat.say("/reset")
    assert chat.say("Hello there.") and len(chat.turns) == 2


@pytest.mark.parametrize("method", ["vanilla", "dynamic"])
def test_conversations_in_turns_keep_what_they_forwarded(method, forwarded):
    """Also with short prompts in between, and though all begin alike."""
    model = toy_model("llama-grouped")
    decoder, fresh = Decoder(model, method=method), Decoder(model, method="vanilla", start="cold")
    system = [3 + i for i in range(20)]
    chats = [[*system, 10 + i, *((7 * i + j) % 50 + 3 for j in range(25))] for i in range(3)]
    for turn in range(3):
        for i, prompt in enumerate(chats):
            forwarded.clear()
            answer = decoder.generate(prompt, max_new_tokens=8).ids
            assert forwarded[0] <= 6 if turn else forwarded[0] >= 25
            assert answer == fresh.generate(prompt, max_new_tokens=8).ids
            chats[i] = [*prompt, *answer, 40 + turn, 6]
            decoder.generate([5, 6, 7 + i], max_new_tokens=4)


def test_streams_at_once_leave_a_few_caches():
    decoder = Decoder(toy_model("llama"), method="vanilla", context=256)
    with contextlib.ExitStack() as open_streams:
        for i in range(8):
            stream = open_streams.enter_context(contextlib.closing(decoder.stream([5 + i] * 100, max_new_tokens=20)))
            next(stream)
    pool = decoder.target.caches
    one = max(cache.nbytes for cache in pool._free)
    copies = sum(states.numel() * states.element_size() for saved in pool._saved for states in saved.states)
    assert len(pool._free) <= 3 and pool.nbytes + copies <= 4 * one
    for i in range(9):
        decoder.generate([5 + i] * 100, max_new_tokens=20)
    assert sum(len(saved.text) for saved in pool._saved) <= decoder.target.context


def test_generate_takes_more_tokens_than_the_model_has_positions():
    """Stock `generate` does, and stops at the end of its answer; a model is driven for a longer text by one target."""
    model, ids = toy_model("llama"), torch.tensor([[5, 6, 7]])
    own = greedy(model, [5, 6, 7], 253)
    for eos in (own[30], None):
        settings = dict(max_new_tokens=5000, do_sample=False, eos_token_id=eos, pad_token_id=0)
        text = model.generate(ids, custom_generate=Generate(nodes=8), **settings)[0, 3:].tolist()
        assert text == (own if eos is None else own[: own.index(eos) + 1])
