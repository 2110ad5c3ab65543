"""A decoder in other people's code: prompts as they come, streams, kept caches, a model's own settings, mistakes."""

import copy
import logging
import random
import re
import weakref

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, BatchEncoding, GenerationConfig

from model import tuning
from model.decoder import Decoder, pieces
from model.engine import GREEDY, Sampling, StepRecord
from model.errors import UserError
from model.files import ROOT
from model.generate import Generate
from model.methods import make_method
from model.weights.linear import stock_linears
from tests.checkpoint import write_tokenizer
from tests.conftest import generated, greedy, toy_model

PROMPT = [5, 9, 7, 5, 9, 7, 11]
IDS = torch.tensor([PROMPT])


class Letters:
    """A tokenizer of one letter a token, some of which are half a character."""

    eos_token_id = None
    chat_template = None

    def __call__(self, text):
        return {"input_ids": [3 + ord(c) % 50 for c in text]}

    def decode(self, ids, skip_special_tokens):
        return b"".join("é".encode()[i % 2 : i % 2 + 1] if i > 40 else b"x" for i in ids).decode(
            errors="replace"
        )


def layer_types(model):
    return {type(layer).__name__ for layer in model.modules() if isinstance(layer, torch.nn.Linear)}


def stock(model, **settings):
    settings = dict(max_new_tokens=30, do_sample=False, pad_token_id=0) | settings
    return model.generate(IDS, **settings)[0, len(PROMPT) :].tolist()


def test_a_kept_cache_is_of_the_text_as_it_is():
    """Keys of an abandoned draft would be attended to in silence."""
    model = toy_model("llama-grouped")
    prompt = [5, 9, 7, 11, 8, 20]
    decoder = Decoder(model, method="recycling", tree="best:9")
    steps = decoder.stream(prompt, max_new_tokens=40)
    for _ in range(3):
        prompt += next(steps).tokens
    steps.close()
    answer = decoder.generate([*prompt, 40], max_new_tokens=20).ids
    assert answer == greedy(model, [*prompt, 40], 20, [2])


def test_a_prompt_is_forwarded_again_for_a_method_that_has_not_seen_it(forwarded):
    decoder = Decoder(toy_model("llama-grouped"), method="vanilla")
    prompt = [5, 9, 7, 11, 8, 20, 31]
    decoder.generate(prompt, max_new_tokens=8)
    forwarded.clear()
    decoder.method = make_method("dynamic", decoder.target, eos=decoder.eos, nodes=4)
    decoder.generate(prompt, max_new_tokens=8)
    assert forwarded[0] == len(prompt) - 1


def test_a_decoder_answers_text_and_ids_and_streams_the_same():
    model = toy_model("llama")
    decoder = Decoder(model, Letters(), method="dynamic", nodes=8)
    prompt = decoder.ids_of("hello")
    answer = decoder.generate("hello", max_new_tokens=30)
    assert answer.ids == greedy(model, prompt, 30)
    assert answer.ids == decoder.generate(prompt, max_new_tokens=30).ids
    assert sum(answer.accept_lengths) == len(answer.ids) == 30 and answer.stop == "length"
    shown = list(pieces(decoder.stream("hello", max_new_tokens=30), decoder.text_of))
    assert "".join(text for text, _ in shown) == answer.text and sum(n for _, n in shown) == 30


def test_a_character_in_two_steps_comes_whole():
    steps = [StepRecord([5, 42], 1, ()), StepRecord([43], 1, ()), StepRecord([42], 1, ())]
    shown = list(pieces(iter(steps), lambda ids: Letters().decode(ids, True)))
    assert shown == [("xé", 3), ("\ufffd", 1)], "what is never finished comes at the end as it is"


@pytest.mark.parametrize("clean", [False, True])
def test_pieces_join_to_the_text_of_any_ids(clean, tmp_path):
    """A run of byte tokens is decoded whole, and clean-up removes spaces."""
    write_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.clean_up_tokenization_spaces = clean
    tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = clean
    decoder = Decoder(toy_model("llama"), tokenizer, method="vanilla")
    often = tokenizer(" do n't 's . , ' 've ? n' I 'm", add_special_tokens=False).input_ids
    rng = random.Random(0)
    for _ in range(30):
        pool = [rng.randrange(len(tokenizer)) for _ in range(20)] + 2 * often
        steps = [StepRecord(rng.choices(pool, k=rng.randint(1, 4)), 1, ()) for _ in range(12)]
        shown = list(pieces(iter(steps), decoder.text_of, decoder.probes))
        ids = [token for step in steps for token in step.tokens]
        assert "".join(text for text, _ in shown) == decoder.text_of(ids)
        assert sum(length for _, length in shown) == len(ids)


def test_text_that_begins_with_bos_gets_no_second_one():
    decoder = Decoder.from_pretrained(str(ROOT / "data/embedded"), method="vanilla")
    for text in ("USER: hello ASSISTANT:", ""):
        ids = decoder.ids_of(f"<s>{text}")
        assert ids[0] == decoder.tokenizer.bos_token_id and ids.count(ids[0]) == 1
    answer = decoder.generate("USER: hello ASSISTANT:", max_new_tokens=2)
    assert answer.prompt_token_ids == decoder.ids_of("<s>USER: hello ASSISTANT:")


def test_stop_strings_cut_as_in_generate():
    decoder = Decoder.from_pretrained(str(ROOT / "data/embedded"), method="dynamic", nodes=8)
    model = decoder.target.model
    prompt = decoder.ids_of("USER: Tell me about a river. ASSISTANT:")
    plain = decoder.generate(prompt, max_new_tokens=40)
    words = plain.text.split()
    for stop in (words[4], [words[12], words[7][:2]], "not in it"):
        options = dict(stop_strings=stop, tokenizer=decoder.tokenizer)
        with stock_linears(model):
            expected, _ = generated(model, prompt, 40, [*decoder.eos], **options)
        given = decoder.generate(prompt, max_new_tokens=40, stop=stop)
        model.generation_config.stop_strings = stop
        own = decoder.generate(prompt, max_new_tokens=40)
        model.generation_config.stop_strings = None
        assert given.ids == expected == own.ids, stop
        assert given.stop == ("stop" if len(expected) < len(plain.ids) else plain.stop)


def test_several_prompts_are_checked_before_the_first_is_answered(capsys):
    decoder = Decoder(toy_model("llama"))
    decoder.generate_all([[5, 9, 7], [8, 3]], max_new_tokens=2)
    assert "2/2" in capsys.readouterr().err
    with pytest.raises(UserError, match="prompt 2: prompt of 5000 tokens"):
        next(decoder.answers([[5, 6], [5] * 5000, [7]]))


def test_each_answer_of_each_seed_is_a_draw_of_its_own():
    """Three seeds of eight samples each were 10 texts of 24."""
    decoder = Decoder(toy_model("llama"))
    drawn = set()
    for seed in (0, 1, -5):
        settings = dict(max_new_tokens=12, sampling=Sampling(temperature=2.0, seed=seed))
        answers = [answer.ids for answer in decoder.answers([PROMPT] * 8, **settings)]
        assert answers[0] == decoder.generate(PROMPT, **settings).ids, "as it is alone"
        batched = decoder.answers((PROMPT for _ in range(8)), batch=3, **settings)
        assert answers == [answer.ids for answer in batched]
        drawn |= set(map(tuple, answers))
    assert len(drawn) == 3 * 8


def test_one_row_of_ids_is_taken_as_it_comes():
    decoder = Decoder(toy_model("llama"), method="vanilla")
    for prompt in (
        np.array([5, 6, 7], dtype=np.int32),
        list(np.array([5, 6, 7])),
        [torch.tensor([5, 6, 7])],
        BatchEncoding({"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1]}),
        {"input_ids": torch.tensor([[5, 6, 7]])},
    ):
        ids = decoder.ids_of(prompt)
        assert ids == [5, 6, 7] and all(type(token) is int for token in ids)


SEVERAL = [
    (torch.tensor([[5, 6, 7], [8, 9, 10]]), [[5, 6, 7], [8, 9, 10]]),
    (np.array([[5, 6], [7, 8]]), [[5, 6], [7, 8]]),
    (({"input_ids": row} for row in ([5, 6], [7])), [[5, 6], [7]]),
    ([torch.tensor([5, 6]), np.array([[7]])], [[5, 6], [7]]),
    ((), []),
]
ENCODED = BatchEncoding({"input_ids": [[5, 6], [7, 8]]}, tensor_type="pt")
NOT_SEVERAL = [
    ("hello", "prompts: is of type str; give a list of"),
    (ENCODED, "prompts: is of type BatchEncoding"),
    (torch.tensor([5, 6, 7]), "prompt 1: prompt: is of type int"),
    ([[5, 6], None], "prompt 2: prompt: is of type NoneType"),
    ([{"role": "user", "content": "hi"}], "prompt 1: prompt: is a mapping of role, content"),
]


def test_several_prompts_are_taken_as_they_come_and_one_is_not_cut_to_pieces():
    """A text was answered letter by letter, ids one by one, an encoding by its keys."""
    decoder = Decoder(toy_model("llama"), Letters())
    for prompts, rows in SEVERAL:
        answers = decoder.generate_all(prompts, max_new_tokens=5, progress=False)
        alone = [decoder.generate(row, max_new_tokens=5).ids for row in rows]
        assert [answer.ids for answer in answers] == alone
    for prompts, says in NOT_SEVERAL:
        with pytest.raises(UserError, match=f"^{re.escape(says)}") as refused:
            next(decoder.answers(prompts, batch=2))
        assert "\n" not in str(refused.value)


CHAT = [{"role": "user", "content": "hi"}]
NO_PROMPT = [
    ([[5, 6, 7], [8]], "prompt: has 2 rows"),
    ({"input_ids": [[0, 6]], "attention_mask": [[0, 1]]}, "attention_mask leaves"),
    ({"ids": [5, 6]}, "mapping of ids, without input_ids"),
    ([5, 6.0], "holds '6.0', which is no token id"),
    (CHAT, "is a chat, and this decoder has no tokenizer"),
    ("text", "is text, and this decoder has no tokenizer"),
    (5, "is of type int; give text, a chat or a list of token ids"),
    ([], "no tokens"),
    ([5, 61], "outside the vocabulary of 61"),
]
NO_DECODER = [
    ({"context": 1}, "context=1: must be"),
    ({"linear": "fast"}, "linear=fast: there is auto, half, onednn, fused, torch"),
    ({"execution": "quick"}, "execution=quick: there is auto, eager, graph, static"),
    ({"method": "nope"}, "method nope: unknown"),
    ({"method": 5}, "method=5: must be a name or a drafter"),
    ({"start": "nowhere"}, "no saved state at nowhere"),
    ({"eos": "</s>"}, "eos=</s>: must be a token id"),
    ({"contxt": 9}, "method.contxt: no such setting; did you mean context of Decoder or Generate?"),
    ({"max_new_token": 9}, "did you mean max_new_tokens of generate?"),
    ({"nods": 9}, "method.nods: no such setting; did you mean nodes?"),
    ({"chat_template_kwargs": "x"}, "chat_template_kwargs=x: must be a map"),
]
NO_ANSWER = [
    ({"stop": "x"}, "stop: needs a tokenizer"),
    ({"stop": 5}, "stop=5: must be a text, or several"),
    ({"max_new_tokens": 2.5}, "max_new_tokens=2.5: must be a whole number"),
    ({"sampling": {"temperature": 1}}, "must be a Sampling"),
    ({"temperature": 0.7}, r"temperature of sampling=Sampling\(temperature=...\)"),
    ({"num_beams": 2}, "num_beams: no such setting; there is max_new_tokens, sampling, stop"),
]
MISTAKES = [
    (lambda decoder: Decoder(decoder.target, method=decoder.method, k=4), "made already"),
    (lambda decoder: Decoder(decoder.target, Letters()).ids_of(CHAT), "has no template"),
    (lambda decoder: Decoder(decoder.target, Letters()).generate("x", stop=[3]), "stop="),
    (lambda decoder: decoder.save_state(""), "names no file"),
    (lambda decoder: decoder.load_state("."), "is not a saved state"),
    (copy.deepcopy, "copy the model"),  # masks and caches are kept by addresses
    (lambda _: Generate(eos=1), "eos_token_id"),
    (lambda _: Generate(start="warm"), "start=warm: must be hot or cold"),
    (lambda decoder: called(decoder, linaer="fused"), "mean linear of Decoder or Generate?"),
    (lambda decoder: decoder.generate_all([[5]], top_k=5), "did you mean top_k of sampling"),
]


def called(decoder, **settings):
    generate = decoder.target.model.generate
    return generate(torch.tensor([PROMPT]), custom_generate=Generate(**settings))


def test_a_mistake_is_one_line():
    decoder = Decoder(toy_model("llama"))
    mistakes = list(MISTAKES)
    for prompt, says in NO_PROMPT:
        mistakes.append((lambda decoder, prompt=prompt: decoder.generate(prompt), says))
    for settings, says in NO_DECODER:
        mistakes.append((lambda decoder, how=settings: Decoder(decoder.target.model, **how), says))
    for settings, says in NO_ANSWER:
        mistakes.append((lambda decoder, how=settings: decoder.generate([5], **how), says))
    for mistake, says in mistakes:
        with pytest.raises(UserError, match=says) as refused:
            mistake(decoder)
        assert "\n" not in str(refused.value)


def test_a_cold_start_forgets_before_each_prompt():
    for start, forgets in (("cold", True), ("hot", False)):
        decoder = Decoder(toy_model("llama"), start=start, method="recycling", tree="2.2.2")
        first = decoder.generate(PROMPT, max_new_tokens=30)
        again = decoder.generate(PROMPT, max_new_tokens=30)
        assert (first.accept_lengths == again.accept_lengths) == forgets


def test_settings_say_what_was_chosen_and_release_undoes_it():
    model = toy_model("llama-grouped")
    before = model(IDS).logits
    assert Decoder(model, method="dynamic").settings["nodes"] == "auto, at most 80"
    decoder = Decoder(model, method="vanilla")
    settings = decoder.settings
    assert settings["method"] == "Vanilla" and settings["execution"].startswith("eager (")
    assert settings["linear"].split()[0] == decoder.target.linear.copy
    assert torch.allclose(copy.deepcopy(model)(IDS).logits, before, atol=1e-5)
    list(decoder.decode_batch([([5, 6], {"max_new_tokens": 3})], 2))
    target = decoder.target
    kept = [weakref.ref(cache) for cache in (target.idle_batch, *target.caches._free)]
    decoder.release()
    assert len(kept) > 1 and not any(cache() for cache in kept)
    assert layer_types(model) == {"Linear"} and torch.equal(model(IDS).logits, before)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_threads_are_the_free_cores_unless_somebody_says_how_many(two_threads, monkeypatch):
    """With one of two cores busy, two threads took 20 to 100 times as long as one."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(tuning, "_threads", (0, ""))
    for free in (2, 1):
        monkeypatch.setattr(tuning, "free_cores", lambda free=free: free)
        said = tuning.choose_threads()
        assert torch.get_num_threads() == free and bool(said) == (free == 1)
    assert Decoder(toy_model("llama")).settings["threads"].startswith("1 (1 of ")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert tuning.choose_threads() == "" and tuning.threads_why() == "OMP_NUM_THREADS"
    assert tuning.choose_threads(1) == "" and tuning.threads_why() == "asked for"
    with pytest.raises(UserError, match="threads=0"):
        tuning.choose_threads(0)


def test_the_models_own_processors_are_applied():
    model = toy_model("llama-grouped")
    plain = stock(model)
    for name, value in dict(
        min_new_tokens=20,
        repetition_penalty=1.5,
        no_repeat_ngram_size=1,
        max_time=0.0,
    ).items():
        model.generation_config = GenerationConfig(eos_token_id=[2, plain[5]], **{name: value})
        decoder = Decoder(model, method="dynamic")
        answer = decoder.generate(PROMPT, max_new_tokens=30)
        assert answer.ids == stock(model) != plain, name
        assert answer.stop == "stop" or name != "max_time"
    model.generation_config = GenerationConfig(eos_token_id=2, repetition_penalty=1.5)
    given = Sampling(repetition_penalty=2.5)
    answer = Decoder(model).generate(PROMPT, max_new_tokens=30, sampling=given)
    assert answer.ids == stock(model, repetition_penalty=2.5)


NOT_APPLIED = dict(
    token_healing=True,
    num_beams=3,
    stop_strings=["x"],
    cache_implementation="quantized",
    use_mtp=True,
)


def test_what_is_not_applied_of_a_models_own_settings_is_said(caplog):
    model = toy_model("llama-grouped")
    name = "not applied of the model's generation_config"
    decoder = Decoder(model, method="vanilla")
    assert name not in decoder.settings
    for penalty in (1.0, 1.5):
        config = GenerationConfig(eos_token_id=2, repetition_penalty=penalty)
        model.generation_config = config
        expected = stock(model)
        for key, value in NOT_APPLIED.items():
            model.generation_config = copy.deepcopy(config)
            setattr(model.generation_config, key, value)
            assert decoder.generate(PROMPT, max_new_tokens=30).ids == expected, key
            assert decoder.settings[name] == f"{key}={value}"
    model.generation_config = GenerationConfig(do_sample=True, temperature=0.6)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        for sampling in (Sampling(temperature=0.5), GREEDY, GREEDY):
            decoder.generate(PROMPT, max_new_tokens=3, sampling=sampling)
    (warning,) = [record.message for record in caplog.records]
    assert warning.endswith("without the model's own do_sample=True, temperature=0.6")


def test_training_with_gradient_checkpointing_is_refused_by_name():
    model = toy_model("llama")
    decoder = Decoder(model)
    answer = decoder.generate(PROMPT, max_new_tokens=5).ids
    model.gradient_checkpointing_enable()
    assert decoder.generate(PROMPT, max_new_tokens=5).ids == answer
    model.train()
    for way in (lambda: Decoder(model), lambda: decoder.generate(PROMPT, max_new_tokens=5)):
        with pytest.raises(UserError, match=r"gradient checkpointing, which keeps no cache"):
            way()
