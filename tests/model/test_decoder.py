"""A decoder in other people's code: prompts as they come, streams, kept caches, a model's own settings, mistakes."""

import contextlib
import copy
import logging
import pickle
import random

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, BatchEncoding, GenerationConfig

from model import tuning
from model.decoder import Decoder, pieces, whole
from model.engine import StepRecord
from model.engine.linear import stock_linears
from model.engine.sampling import GREEDY, Sampling
from model.errors import UserError
from model.files import ROOT
from model.generate import Generate
from model.methods import make_method
from tests.checkpoint import write_tokenizer
from tests.conftest import greedy, toy_model

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


def test_a_decoder_answers_text_and_ids_and_streams_the_same():
    model = toy_model("llama")
    decoder = Decoder(model, Letters(), method="dynamic", nodes=8)
    prompt = decoder.ids_of("hello")
    answer = decoder.generate("hello", max_new_tokens=30)
    assert (
        answer.ids == greedy(model, prompt, 30) == decoder.generate(prompt, max_new_tokens=30).ids
    )
    assert sum(answer.accept_lengths) == len(answer.ids) == 30 and answer.stop == "length"
    assert answer.mat == 30 / len(answer.accept_lengths) and answer.text == Letters().decode(
        answer.ids, True
    )
    shown = list(pieces(decoder.stream("hello", max_new_tokens=30), decoder.text_of))
    assert "".join(text for text, _ in shown) == answer.text and sum(n for _, n in shown) == 30
    assert whole(decoder.stream("hello", max_new_tokens=30)).tokens == answer.ids
    drawn = decoder.generate("hello", max_new_tokens=30, sampling=Sampling(temperature=2.0, seed=1))
    assert drawn.ids != answer.ids


def test_a_character_in_two_steps_comes_whole():
    steps = [StepRecord([5, 42], 1, ()), StepRecord([43], 1, ()), StepRecord([42], 1, ())]
    decoded = []
    shown = list(
        pieces(iter(steps), lambda ids: decoded.append(len(ids)) or Letters().decode(ids, True))
    )
    assert shown == [("xé", 3), ("\ufffd", 1)], "what is never finished comes at the end as it is"
    list(
        pieces(
            (StepRecord([5], 1, ()) for _ in range(50)),
            lambda ids: decoded.append(len(ids)) or "x" * len(ids),
        )
    )
    assert max(decoded) <= 4, "a step's work does not grow with the answer"


@pytest.mark.parametrize("clean", [False, True])
def test_pieces_join_to_the_text_of_any_ids(clean, tmp_path):
    """Also where later tokens change the text: a run of byte tokens is decoded whole, and clean-up removes spaces."""
    write_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.clean_up_tokenization_spaces = clean
    tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = clean
    decoder = Decoder(toy_model("llama"), tokenizer, method="vanilla")
    often, rng = (
        tokenizer(" do n't 's . , ' 've ? n' I 'm", add_special_tokens=False).input_ids,
        random.Random(0),
    )
    for _ in range(150):
        pool = [rng.randrange(len(tokenizer)) for _ in range(20)] + 2 * often
        steps = [
            StepRecord([rng.choice(pool) for _ in range(rng.randint(1, 4))], 1, ())
            for _ in range(12)
        ]
        shown = list(pieces(iter(steps), decoder.text_of, decoder.probes))
        assert "".join(text for text, _ in shown) == decoder.text_of(
            [i for step in steps for i in step.tokens]
        )
        assert sum(length for _, length in shown) == sum(step.accepted for step in steps)


@pytest.mark.parametrize("method", ["vanilla", "dynamic"])
def test_stop_strings_cut_as_in_generate(method):
    decoder = Decoder.from_pretrained(
        str(ROOT / "data/embedded"), method=method, **({} if method == "vanilla" else {"nodes": 8})
    )
    model, prompt = decoder.target.model, decoder.ids_of("USER: Tell me about a river. ASSISTANT:")
    plain = decoder.generate(prompt, max_new_tokens=60)
    words, ids = plain.text.split(), torch.tensor([prompt])
    tried = [
        words[4],
        words[9][1:],
        plain.text[20:23],
        [words[12], words[7][:2]],
        "ASSISTANT",
        "not in it",
    ]
    lengths = set()
    for stop in tried:
        options = dict(
            stop_strings=stop, tokenizer=decoder.tokenizer, max_new_tokens=60, pad_token_id=0
        )
        with stock_linears(model):
            expected = model.generate(ids, **options)[0, len(prompt) :].tolist()
        model.generation_config.stop_strings = None
        given = decoder.generate(prompt, max_new_tokens=60, stop=stop)
        model.generation_config.stop_strings = stop
        own = decoder.generate(prompt, max_new_tokens=60)
        assert given.ids == expected == own.ids and sum(given.accept_lengths) == len(expected), stop
        assert given.stop == ("stop" if len(expected) < len(plain.ids) else plain.stop)
        lengths.add(len(expected))
        state = decoder.method.state_dict()
        assert "text" not in state or state["text"].tolist()[-len(own.ids) :] == own.ids, (
            "nothing behind it is learnt"
        )
    assert len(lengths) > 3
    assert decoder.generate(prompt, max_new_tokens=60, stop=[]).ids == plain.ids, (
        "the model's own are replaced"
    )
    with pytest.raises(UserError, match=r"stop=\[3\]: "):
        decoder.generate(prompt, stop=[3])


def test_several_prompts_are_checked_and_answered_one_after_the_other(capsys):
    model = toy_model("llama")
    prompts = [[5, 9, 7], [8, 3], [5, 9, 7]]
    decoder = Decoder(model)
    answers = decoder.generate_all(prompts, max_new_tokens=12)
    assert [answer.ids for answer in answers] == [
        greedy(model, prompt, 12, [2]) for prompt in prompts
    ]
    assert "3/3" in capsys.readouterr().err
    decoder.generate = lambda *_, **__: pytest.fail("answered")
    with pytest.raises(UserError, match="prompt 2: prompt of 5000 tokens"):
        decoder.generate_all([[5, 6], [5] * 5000, [7]], progress=False)


def test_each_answer_of_each_seed_is_a_draw_of_its_own(capsys):
    """Three seeds of eight samples each were 10 texts of 24: the second answer of seed 0 was the first of seed 1."""
    decoder, prompt, drawn = Decoder(toy_model("llama")), [5, 9, 7], set()
    for seed in (0, 1, 2, (1 << 63) - 1, -5):
        settings = dict(max_new_tokens=12, sampling=Sampling(temperature=2.0, seed=seed))
        answers = [a.ids for a in decoder.generate_all([prompt] * 8, progress=False, **settings)]
        assert answers[0] == decoder.generate(prompt, **settings).ids, "as it is alone"
        assert answers == [
            a.ids for a in decoder.generate_all((prompt for _ in range(8)), batch=3, **settings)
        ]
        drawn |= set(map(tuple, answers))
    assert len(drawn) == 5 * 8


ONE_ROW = {
    "rows of one": [[5, 6, 7]],
    "NumPy": np.array([5, 6, 7], dtype=np.int32),
    "NumPy (1, 3)": np.array([[5, 6, 7]]),
    "NumPy's numbers": list(np.array([5, 6, 7])),
    "tensors": [torch.tensor([5, 6, 7])],
    "encoding": BatchEncoding({"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1]}),
    "encoding (1, 3)": BatchEncoding(
        {"input_ids": [[5, 6, 7]], "attention_mask": [[1, 1, 1]]}, tensor_type="pt"
    ),
    "dictionary": {"input_ids": torch.tensor([[5, 6, 7]])},
}


def test_one_row_of_ids_is_taken_as_it_comes():
    decoder = Decoder(toy_model("llama"))
    for kind, prompt in ONE_ROW.items():
        ids = decoder.ids_of(prompt)
        assert ids == [5, 6, 7] and all(type(token) is int for token in ids), kind


NO_ROW = [
    (torch.tensor([[5, 6, 7], [8, 9, 10]]), "prompt: has 2 rows"),
    ([[5, 6, 7], [8]], "prompt: has 2 rows"),
    ({"input_ids": [[5, 6], [7, 8]]}, "prompt: has 2 rows"),
    (
        {"input_ids": [[0, 6]], "attention_mask": [[0, 1]]},
        "attention_mask leaves 1 of 2 tokens out",
    ),
    ({"ids": [5, 6]}, "mapping of ids, without input_ids"),
    (torch.tensor([True, False]), "holds 'True', which is no token id"),
    ([5, 6.0], "holds '6.0', which is no token id"),
    (["hello", "you"], "holds 'hello', which is no token id"),
    ([{"role": "user", "content": "hi"}], "is a chat, and this decoder has no tokenizer"),
    (b"hello", "is of type bytes"),
    (None, "is of type NoneType"),
    (5, "is of type int; give text, a chat or a list of token ids"),
    ("text", "is text, and this decoder has no tokenizer"),
    ([], "no tokens"),
    (torch.zeros((1, 0), dtype=torch.long), "no tokens"),
]
NO_DECODER = [
    *(({"context": context}, f"context={context}: must be") for context in (-5, 0, 1, "abc", 2.5)),
    ({"linear": "fast"}, "linear=fast: there is auto, half, onednn, fused, torch"),
    ({"execution": "quick"}, "execution=quick: there is auto, eager, graph"),
    ({"execution": "graph"}, "execution=graph: needs a CUDA device"),
    ({"method": "nope"}, "method nope: unknown"),
    ({"start": "nowhere"}, "no saved state at nowhere"),
]
MISTAKES = [
    *((lambda decoder, prompt=prompt: decoder.ids_of(prompt), says) for prompt, says in NO_ROW),
    *(
        (lambda decoder, more=more: Decoder(decoder.target.model, **more), says)
        for more, says in NO_DECODER
    ),
    (lambda decoder: Decoder(decoder.target.model, method=decoder.method, k=4), "made already"),
    (
        lambda decoder: Decoder(decoder.target.model, Letters()).ids_of([{"role": "user"}]),
        "has no template",
    ),
    *(
        (
            lambda decoder, said=said: Decoder(decoder.target.model, Letters()).ids_of(said),
            "holds a lone surrogate",
        )
        for said in ("N\udcff", [{"role": "user", "content": "N\udcff"}])
    ),
    (lambda decoder: decoder.generate([5, 61]), "outside the vocabulary of 61"),
    (lambda decoder: decoder.save_state(""), "names no file"),
    (lambda decoder: decoder.load_state("."), "is not a saved state"),
    # masks and caches are kept by the addresses of things that a copy has elsewhere
    (
        copy.deepcopy,
        "copy the model",
    ),
    (pickle.dumps, "copy the model"),
    (lambda _: Generate(eos=1), "eos_token_id"),
    (lambda decoder: decoder.generate([5], stop="x"), "stop: needs a tokenizer"),
    (lambda decoder: decoder.generate([5], stop=5), "stop=5: must be a text, or several"),
    (
        lambda decoder: decoder.generate([5], max_new_tokens=2.5),
        "max_new_tokens=2.5: must be a whole number",
    ),
    (
        lambda decoder: decoder.generate([5], max_new_tokens=None),
        "max_new_tokens=None: must be a whole number",
    ),
    (lambda _: Sampling(temperature="hot"), "sampling.temperature=hot: must be a number"),
    (lambda _: Sampling(top_k=2.5), "sampling.top_k=2.5: must be a whole number"),
    (lambda decoder: decoder.generate([5], sampling={"temperature": 1}), "must be a Sampling"),
    (
        lambda decoder: decoder.generate_all([[5]], sampling={"temperature": 1}),
        "must be a Sampling",
    ),
    (lambda decoder: Decoder(decoder.target.model, eos="</s>"), "eos=</s>: must be a token id"),
    (lambda decoder: Decoder(decoder.target.model, eos=1.5), "eos=1.5: must be a token id"),
    (
        lambda decoder: Decoder(decoder.target.model, method=5),
        "method=5: must be a name or a drafter",
    ),
    (
        lambda decoder: Decoder(decoder.target.model, chat_template_kwargs="x"),
        "chat_template_kwargs=x: must be a map",
    ),
]


def test_a_mistake_is_one_line():
    decoder = Decoder(toy_model("llama"))
    for mistake, says in MISTAKES:
        with pytest.raises(UserError, match=says) as refused:
            mistake(decoder)
        assert "\n" not in str(refused.value)


def test_what_cannot_be_loaded_is_an_error_of_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "empty").mkdir()
    names = (
        "/nowhere/at/all",
        "no/such/folder",
        "../missing",
        "~/missing",
        "org/",
        "",
        "org/name",
        "data/embeded",
    )
    for name in (*names, "~/empty"):
        with pytest.raises(UserError) as caught:
            Decoder.from_pretrained(name)
        why = (
            "no such folder, and https://huggingface.co is not in reach"
            if name in names
            else "cannot be loaded"
        )
        assert str(caught.value).startswith(f"model {name}: {why} (") and "\n" not in str(
            caught.value
        )
    (tmp_path / "toy").symlink_to(ROOT / "data/embedded")
    assert Decoder.from_pretrained("~/toy", method="vanilla").tokenizer is not None


def test_a_damaged_state_is_one_line(monkeypatch, tmp_path):
    decoder = Decoder(toy_model("llama"), method="recycling")
    decoder.save_state(tmp_path / "state")

    decoder.generate(PROMPT, max_new_tokens=5)
    learnt, load = decoder.method.matrix.candidates.clone(), decoder.method.matrix.load_state_dict

    def damaged(state):
        load(state)
        if not state["candidates"].any():
            raise KeyError("size")

    monkeypatch.setattr(decoder.method.matrix, "load_state_dict", damaged)
    with pytest.raises(UserError, match=r"start: a damaged state \(KeyError\('size'\)\)"):
        decoder.load_state(tmp_path / "state")
    assert decoder.method.matrix.candidates.equal(learnt), "what was half loaded is taken back"


def test_a_decoder_that_cannot_be_made_leaves_the_model_as_it_was(monkeypatch):
    model = toy_model("llama-grouped")

    def fails(error, **settings):
        with pytest.raises(error):
            Decoder(model, linear="fused", **settings)
        assert layer_types(model) == {"Linear"}

    for wrong in ({"method": "nope"}, {"execution": "graph"}, {"start": "nowhere"}):
        fails(UserError, **wrong)
    for error in (KeyboardInterrupt, RuntimeError):

        def failing(*arguments, error=error, **settings):
            assert layer_types(model) != {"Linear"}
            raise error

        monkeypatch.setattr("model.decoder.make_method", failing)
        fails(error)


def test_settings_say_what_was_chosen_and_release_undoes_it(tmp_path):
    model = toy_model("llama-grouped")
    before = model(IDS).logits
    decoder = Decoder(model, method="vanilla")
    settings = decoder.settings
    assert (
        Decoder(model, method="dynamic").settings["nodes"] == "auto, at most 80"
        and settings["nodes"] == "0"
    )
    assert (
        settings["method"] == "Vanilla"
        and settings["dtype"] == "float32"
        and settings["device"] == "cpu"
    )
    assert (
        settings["execution"].startswith("eager (")
        and settings["linear"].split()[0] == decoder.target.linear.copy
    )
    assert torch.allclose(copy.deepcopy(model)(IDS).logits, before, atol=1e-5)
    decoder.release()
    assert layer_types(model) == {"Linear"} and torch.equal(model(IDS).logits, before)
    model.save_pretrained(tmp_path)
    assert torch.equal(type(model).from_pretrained(tmp_path)(IDS).logits, before)


def test_threads_are_the_free_cores_unless_somebody_says_how_many(monkeypatch):
    """With one of two cores busy, two threads took 20 to 100 times as long as one."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(tuning.psutil, "cpu_count", lambda: 4)
    monkeypatch.setattr(tuning, "_threads", (0, ""))
    busy = tuning.BusyCores()
    with monkeypatch.context() as patched:
        patched.setattr(tuning.BusyCores, "_now", staticmethod(lambda: (0.0, 0.0)))
        still = tuning.BusyCores()
        patched.setattr(tuning.BusyCores, "_now", staticmethod(lambda: (2.0, 6.2)))
        assert still.cores_busy(0.0) == 3.1 and still.threads() == 1
    assert 0 <= busy.cores_busy(0.05) < 100
    monkeypatch.setattr(tuning.BusyCores, "cores_busy", lambda load: cores)
    model, before = toy_model("llama"), torch.get_num_threads()
    try:
        for cores, threads, says in (
            (0.3, 2, False),
            (2.4, 2, False),
            (2.6, 1, True),
            (4.0, 1, True),
        ):
            torch.set_num_threads(2)
            said = tuning.choose_threads()
            assert torch.get_num_threads() == threads and (f"threads: {threads}" in said) is says
            assert (
                Decoder(model).settings["threads"]
                == f"{threads} ({max(1, round(4 - cores))} of 4 cores were free)"
            )
        torch.set_num_threads(2)
        assert (
            Decoder(model)
            .settings["threads"]
            .startswith("2; 1 of 4 cores are free: OMP_NUM_THREADS=1")
        )
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        assert tuning.choose_threads() == "" and tuning.threads_why() == "OMP_NUM_THREADS"
        assert (
            tuning.choose_threads(1) == ""
            and torch.get_num_threads() == 1
            and tuning.threads_why() == "asked for"
        )
        with pytest.raises(UserError, match="threads=0"):
            tuning.choose_threads(0)
    finally:
        torch.set_num_threads(before)


def stock(model, **settings):
    settings = dict(max_new_tokens=30, do_sample=False, pad_token_id=0) | settings
    return model.generate(IDS, **settings)[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("method", ["vanilla", "dynamic"])
def test_the_models_own_processors_are_applied(method):
    model = toy_model("llama-grouped")
    plain, eos = stock(model), stock(model)[5]
    decoder, ending = Decoder(model, method=method), Decoder(model, method=method, eos=eos)
    model.generation_config.min_new_tokens = 20
    assert ending.generate(PROMPT, max_new_tokens=30).ids == stock(model, eos_token_id=eos) != plain
    model.generation_config.min_new_tokens = None
    model.generation_config.repetition_penalty = 1.5
    penalised = stock(model)
    assert decoder.generate(PROMPT, max_new_tokens=30).ids == penalised != plain
    given = Sampling(repetition_penalty=2.5)
    assert decoder.generate(PROMPT, max_new_tokens=30, sampling=given).ids == stock(
        model, repetition_penalty=2.5
    )
    model.generation_config.no_repeat_ngram_size = 1
    assert decoder.generate(PROMPT, max_new_tokens=30).ids == stock(model) != penalised


def test_what_is_not_applied_of_a_models_own_settings_is_said(caplog):
    model, name = toy_model("llama-grouped"), "not applied of the model's generation_config"
    decoder = Decoder(model, method="vanilla")
    assert name not in decoder.settings
    model.generation_config.update(do_sample=True, temperature=0.6, num_beams=4)
    assert decoder.settings[name] == "do_sample=True, temperature=0.6, num_beams=4"
    with caplog.at_level(logging.WARNING):
        for sampling in (Sampling(temperature=0.5), GREEDY, GREEDY):
            decoder.generate(PROMPT, max_new_tokens=3, sampling=sampling)
    warnings = [
        record.message for record in caplog.records if "answers are greedy" in record.message
    ]
    assert len(warnings) == 1 and warnings[0].endswith(
        "the model's own do_sample=True, temperature=0.6, num_beams=4"
    )


NOT_APPLIED = dict(
    token_healing=True, guidance_scale=2.0, num_return_sequences=2, num_beams=3, stop_strings=["x"]
)
NOT_APPLIED |= dict(
    cache_implementation="quantized", watermarking_config={"bias": 2.0}, use_mtp=True, top_h=0.3
)


def test_every_setting_of_a_models_own_is_applied_or_listed():
    """Several raised, or were applied, only where a penalty was set next to them; two were not listed."""
    model, name = toy_model("llama-grouped"), "not applied of the model's generation_config"
    decoder = Decoder(model, method="vanilla")
    for penalty in (1.0, 1.5):
        model.generation_config = GenerationConfig(eos_token_id=2, repetition_penalty=penalty)
        expected = stock(model)
        for key, value in NOT_APPLIED.items():
            model.generation_config = GenerationConfig(eos_token_id=2, repetition_penalty=penalty)
            setattr(model.generation_config, key, value)
            assert decoder.generate(PROMPT, max_new_tokens=30).ids == expected, key
            assert key == "top_h" or f"{key}={value}" == decoder.settings[name]
        model.generation_config = GenerationConfig(
            eos_token_id=2, repetition_penalty=penalty, max_time=0.0
        )
        answer = decoder.generate(PROMPT, max_new_tokens=30)
        assert (
            answer.ids == stock(model) == expected[:1]
            and answer.stop == "stop"
            and name not in decoder.settings
        )
    model.generation_config.bad_words_ids = []
    with pytest.raises(UserError, match="its generation_config is refused"):
        decoder.generate(PROMPT)


def test_ends_may_be_a_tensor():
    model = toy_model("llama-grouped")
    ends = torch.tensor(stock(model)[5:7])
    expected = stock(model, eos_token_id=ends.tolist())
    assert stock(model, eos_token_id=ends, custom_generate=Generate()) == expected
    for eos in (ends, list(ends), ends.numpy()):
        assert (
            Decoder(model, method="vanilla", eos=eos).generate(PROMPT, max_new_tokens=30).ids
            == expected
        )


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
        with pytest.raises(
            UserError, match=r"gradient checkpointing, which keeps no cache; call eval\(\)"
        ):
            way()


def test_a_kept_cache_is_of_the_text_and_the_weights_as_they_are():
    """Keys of an abandoned draft, or of old weights, would be attended to in silence."""
    model, prompt = toy_model("llama-grouped"), [5, 9, 7, 11, 8, 20]
    decoder = Decoder(model, method="recycling", tree="best:9")
    steps = decoder.stream(prompt, max_new_tokens=40)
    prompt += [token for _, step in zip(range(3), steps, strict=False) for token in step.tokens]
    steps.close()
    for change in ("abandoned", "trained", "loaded"):
        prompt = [*prompt, 40]
        with torch.no_grad():
            if change == "trained":
                for parameter in model.parameters():
                    parameter.mul_(1.3)
            if change == "loaded":
                model.load_state_dict(toy_model("llama-grouped", seed=3).state_dict())
        answer = decoder.generate(prompt, max_new_tokens=20).ids
        assert answer == greedy(model, prompt, 20, [2]), change
        prompt += answer


def test_a_prompt_is_forwarded_again_for_a_method_that_has_not_seen_it(forwarded):
    decoder, prompt = (
        Decoder(toy_model("llama-grouped"), method="vanilla"),
        [5, 9, 7, 11, 8, 20, 31],
    )
    decoder.generate(prompt, max_new_tokens=8)
    forwarded.clear()
    decoder.method = make_method("dynamic", decoder.target, eos=decoder.eos, nodes=4)
    decoder.generate(prompt, max_new_tokens=8)
    assert forwarded[0] == len(prompt) - 1


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
            stream = open_streams.enter_context(
                contextlib.closing(decoder.stream([5 + i] * 100, max_new_tokens=20))
            )
            next(stream)
    pool = decoder.target.caches
    sizes = [sum(buffer.nbytes for buffer in cache._buffers) for cache in pool._free]
    copies = sum(states.nbytes for saved in pool._saved for states in saved.states)
    assert len(pool._free) <= 3 and sum(sizes) + copies <= 4 * max(sizes)
    for i in range(9):
        decoder.generate([5 + i] * 100, max_new_tokens=20)
    assert sum(len(saved.text) for saved in pool._saved) <= decoder.target.context
