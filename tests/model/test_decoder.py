"""In other people's code: a decoder of text, methods by name, and transformers' generate with this decoding inside."""

import copy

import numpy as np
import pytest
import torch
from transformers import (
    BatchEncoding,
    EosTokenCriteria,
    LogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from model import generate as transformers_generate
from model.decoder import Decoder, pieces, whole
from model.engine import StepRecord, Target, generate
from model.engine.sampling import Sampling
from model.errors import UserError
from model.files import ROOT
from model.generate import ATTRIBUTE, Generate
from model.methods import make_method
from tests.conftest import greedy, toy_model

V = 61


def target_in(model):
    (target,) = vars(model)[ATTRIBUTE].targets.values()
    return target


def drafter_in(model, generate):
    return vars(model)[ATTRIBUTE].drafters[generate][-1]


def ends_of(drafter):
    """Of a dynamic drafter: below what it drafts nothing."""
    return set(drafter.loop_rows[-1].nonzero()[0].tolist())


def ids_of(*tokens):
    return torch.tensor([list(tokens)])


class Stop(StoppingCriteria):
    """After a given token was seen a second time."""

    def __call__(self, ids, scores, **kwargs):
        return torch.tensor([(row == row[-1]).sum() >= 3 for row in ids])


class Odd(LogitsProcessor):
    """Odd tokens only, behind an even one: looks at each row's own text."""

    def __call__(self, ids, scores):
        odd = torch.arange(scores.shape[1]) % 2 == 1
        return scores.masked_fill((ids[:, -1:] % 2 == 0) & ~odd, -1e9)


WAYS = {
    "criteria": dict(stopping_criteria=StoppingCriteriaList([Stop()])),
    "eos by criterion": dict(stopping_criteria=StoppingCriteriaList([EosTokenCriteria(16)])),
    "own processor": dict(logits_processor=[Odd()], repetition_penalty=1.4),
}


def test_criteria_and_processors_do_what_they_do_in_generate():
    model, ids = toy_model("llama"), ids_of(5, 9, 5, 9, 5)
    settings = dict(do_sample=False, pad_token_id=0, max_new_tokens=50)
    plain, ours = model.generate(ids, **settings), Generate("recycling")
    for way, more in WAYS.items():
        expected = model.generate(ids, **settings, **more)
        answer = model.generate(ids, **settings, **more, custom_generate=ours)
        assert answer.tolist() == expected.tolist() != plain.tolist(), way
    output = model.generate(ids, **settings, return_dict_in_generate=True, custom_generate=ours)
    assert output.sequences.equal(plain)


class Heard(BaseStreamer):
    def __init__(self):
        self.tokens, self.ended = [], 0

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended += 1


def test_drawn_text_follows_torchs_seed_and_not_the_method():
    model, texts = toy_model("llama"), []
    for seed, method in ((1, "recycling"), (1, "vanilla"), (1, "dynamic"), (2, "vanilla")):
        torch.manual_seed(seed)
        drawn = dict(do_sample=True, temperature=1.3, top_k=20, max_new_tokens=40)
        texts.append(model.generate(ids_of(5, 6, 7), custom_generate=Generate(method), **drawn).tolist())
    assert texts[0] == texts[1] == texts[2] != texts[3]


class Letters:
    """A tokenizer of one letter a token, some of which are half a character."""

    eos_token_id = None
    chat_template = None

    def __call__(self, text):
        return {"input_ids": [3 + ord(c) % 50 for c in text]}

    def decode(self, ids, skip_special_tokens):
        return b"".join("é".encode()[i % 2 : i % 2 + 1] if i > 40 else b"x" for i in ids).decode(errors="replace")


def test_a_decoder_answers_text_and_ids_and_streams_the_same():
    model = toy_model("llama")
    decoder = Decoder(model, Letters(), method="dynamic", nodes=8)
    prompt = decoder.ids_of("hello")
    answer = decoder.generate("hello", max_new_tokens=30)
    assert answer.ids == greedy(model, prompt, 30) == decoder.generate(prompt, max_new_tokens=30).ids
    assert sum(answer.accept_lengths) == len(answer.ids) == 30 and answer.stop == "length"
    assert answer.mat == 30 / len(answer.accept_lengths) and answer.text == Letters().decode(answer.ids, True)
    shown = list(pieces(decoder.stream("hello", max_new_tokens=30), decoder.text_of))
    assert "".join(text for text, _ in shown) == answer.text and sum(n for _, n in shown) == 30
    assert whole(decoder.stream("hello", max_new_tokens=30)).tokens == answer.ids
    drawn = decoder.generate("hello", max_new_tokens=30, sampling=Sampling(temperature=2.0, seed=1))
    assert drawn.ids != answer.ids


def test_a_character_in_two_steps_comes_whole():
    steps = [StepRecord([5, 42], 1, ()), StepRecord([43], 1, ()), StepRecord([42], 1, ())]
    shown = list(pieces(iter(steps), lambda ids: Letters().decode(ids, True)))
    assert shown == [("xé", 3), ("\ufffd", 1)], "what is never finished comes at the end as it is"


def test_a_streamer_hears_every_token_once_also_in_the_hubs_layout():
    """transformers loads custom_generate/generate.py of a local path, and runs it for whoever trusts it."""
    model, ids, settings = toy_model("llama"), ids_of(5, 9, 5), dict(max_new_tokens=30, do_sample=False)
    expected, hub = model.generate(ids, **settings), dict(custom_generate=str(ROOT), trust_remote_code=True)
    for way in (hub, hub | dict(method="pld"), dict(custom_generate=Generate(), token_streamer=Heard())):
        streamer = way.get("token_streamer", Heard())
        assert model.generate(ids, **settings, **way, streamer=streamer).equal(expected)
        assert streamer.tokens == expected[0].tolist() and streamer.ended == 1


def test_what_was_learnt_outlives_a_longer_text_and_another_model(monkeypatch):
    monkeypatch.setattr(transformers_generate, "DEFAULT_CONTEXT", 32)
    first, second, ids, generate = toy_model("llama"), toy_model("qwen3"), ids_of(5, 9, 5), Generate("recycling")
    for model in (first, second):
        model.generate(ids, max_new_tokens=20, do_sample=False, custom_generate=generate)
    learnt = drafter_in(first, generate).state_dict()["candidates"].clone()
    first.generate(ids_of(7), max_new_tokens=100, do_sample=False, custom_generate=generate)
    kept = drafter_in(first, generate).state_dict()["candidates"]
    seen = learnt.any(-1)
    assert target_in(first).context > 32 and bool(seen.any()) and bool(kept.any(-1)[seen].all())


def test_an_end_is_one_id_or_several_of_the_decoder_or_of_the_call():
    """Methods do not draft below an end: they are made for those of the call, and keep what they learnt."""
    model, prompt, generate = toy_model("llama"), [5, 9, 5], Generate("dynamic", nodes=8)
    free = greedy(model, prompt, 30)
    for eos in (free[12], [free[12]], {free[12], free[20]}):
        decoder = Decoder(model, eos=eos, nodes=8)
        assert decoder.generate(prompt, max_new_tokens=30).ids == free[: free.index(free[12]) + 1]
        assert free[12] in ends_of(decoder.method) == decoder.eos
    learnt = 0
    for eos in (free[12], [free[20]]):
        settings = dict(eos_token_id=eos, max_new_tokens=30, do_sample=False, pad_token_id=0)
        answer = model.generate(ids_of(*prompt), custom_generate=generate, **settings)
        assert answer.equal(model.generate(ids_of(*prompt), **settings))
        drafter = drafter_in(model, generate)
        assert ends_of(drafter) == ({eos} if isinstance(eos, int) else set(eos)) and drafter.rows.seen.sum() > learnt
        learnt = drafter.rows.seen.sum()
    with pytest.raises(UserError, match="eos_token_id"):
        Generate(eos=1)


def test_processors_see_one_row_at_a_time_and_change_nothing_else():
    model, ids = toy_model("llama"), ids_of(5, 9, 5)
    settings = dict(max_new_tokens=40, do_sample=False)
    settings["prefix_allowed_tokens_fn"] = lambda row, text: [[int(text[-1]) % 50 + 3, 7, 11, 20]][row]
    assert model.generate(ids, custom_generate=Generate(), **settings).equal(model.generate(ids, **settings))

    def written(ids, scores):
        scores[:, 7] = 1e4
        return scores

    lengths = []
    for processor in (written, lambda ids, scores: written(ids, scores.clone())):
        drafter = make_method("recycling", Target(model), tree="best:9")
        sampling = Sampling(processors=(processor,))
        out = generate(Target(model), drafter, [5, 9, 5], max_new_tokens=12, sampling=sampling)
        lengths.append((out.accept_lengths, drafter.state_dict()["candidates"].tolist()))
    assert lengths[0] == lengths[1]


ONE_ROW = {
    "rows of one": [[5, 6, 7]],
    "NumPy": np.array([5, 6, 7], dtype=np.int32),
    "NumPy (1, 3)": np.array([[5, 6, 7]]),
    "NumPy's numbers": list(np.array([5, 6, 7])),
    "tensors": [torch.tensor([5, 6, 7])],
    "encoding": BatchEncoding({"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1]}),
    "encoding (1, 3)": BatchEncoding({"input_ids": [[5, 6, 7]], "attention_mask": [[1, 1, 1]]}, tensor_type="pt"),
    "dictionary": {"input_ids": torch.tensor([[5, 6, 7]])},
}
NO_ROW = [
    (torch.tensor([[5, 6, 7], [8, 9, 10]]), "prompt: has 2 rows"),
    (np.array([[5, 6, 7], [8, 9, 10]]), "prompt: has 2 rows"),
    ([[5, 6, 7], [8]], "prompt: has 2 rows"),
    ({"input_ids": [[5, 6], [7, 8]]}, "prompt: has 2 rows"),
    ({"input_ids": [[0, 6]], "attention_mask": [[0, 1]]}, "attention_mask leaves 1 of 2 tokens out"),
    ({"ids": [5, 6]}, "mapping of ids, without input_ids"),
    ([5, True, 7], "holds 'True', which is no token id"),
    (torch.tensor([True, False]), "holds 'True', which is no token id"),
    ([5, 6.0], "holds '6.0', which is no token id"),
    ([5, 61], "outside the vocabulary of 61"),
    (["hello", "you"], "holds 'hello', which is no token id"),
    ([{"role": "user", "content": "hi"}], "is a chat, and this decoder has no tokenizer"),
    (b"hello", "is of type bytes"),
    (None, "is of type NoneType"),
    ("text", "is text, and this decoder has no tokenizer"),
    ([], "no tokens"),
    (torch.zeros((1, 0), dtype=torch.long), "no tokens"),
]


def test_one_row_of_ids_is_taken_as_it_comes_and_all_else_is_refused_by_name():
    decoder = Decoder(toy_model("llama"))
    for kind, prompt in ONE_ROW.items():
        ids = decoder.ids_of(prompt)
        assert ids == [5, 6, 7] and all(type(token) is int for token in ids), kind
    for prompt, says in NO_ROW:
        with pytest.raises(UserError, match=says) as refused:
            decoder.ids_of(prompt)
        assert "\n" not in str(refused.value)
    with pytest.raises(UserError, match="has no template"):
        Decoder(toy_model("llama"), Letters()).ids_of([{"role": "user", "content": "hi"}])
    with pytest.raises(UserError, match="made already"):
        Decoder(toy_model("llama"), method=decoder.method, k=4)


def test_an_abandoned_answer_leaves_a_cache_that_says_what_it_holds():
    model = toy_model("llama-grouped")
    decoder, prompt = Decoder(model, method="recycling", tree="best:9"), [5, 9, 7, 11, 8]
    steps = decoder.stream(prompt, max_new_tokens=40)
    ids = [token for _, step in zip(range(3), steps, strict=False) for token in step.tokens]
    steps.close()
    again = [*prompt, *ids, 6]
    assert decoder.generate(again, max_new_tokens=20).ids == greedy(model, again, 20, [2])


def test_settings_say_what_was_chosen_and_release_undoes_it(tmp_path):
    model, ids = toy_model("llama-grouped"), ids_of(5, 9, 7)
    before = model(ids).logits
    decoder = Decoder(model, method="vanilla")
    settings = decoder.settings
    assert settings["method"] == "Vanilla" and settings["dtype"] == "float32" and settings["device"] == "cpu"
    assert settings["execution"].startswith("eager (") and settings["linear"].split()[0] in ("onednn", "torch")
    twin = copy.deepcopy(model)
    assert torch.allclose(twin(ids).logits, before, atol=1e-5)
    decoder.release()
    assert not [layer for layer in model.modules() if "Packed" in type(layer).__name__]
    assert torch.equal(model(ids).logits, before)
    model.save_pretrained(tmp_path)
    assert torch.equal(type(model).from_pretrained(tmp_path)(ids).logits, before)
    for wrong, says in (
        ({"linear": "fast"}, "linear=fast: there is auto, onednn, fused, torch"),
        ({"execution": "quick"}, "execution=quick: there is auto, eager, graph"),
    ):
        with pytest.raises(UserError, match=says):
            Decoder(model, **wrong)


def test_generate_leaves_a_users_model_as_it_is_unless_asked():
    model, ids = toy_model("llama-grouped"), ids_of(5, 9, 7)
    expected = model.generate(ids, max_new_tokens=20, do_sample=False).tolist()

    def layers():
        return {type(layer).__name__ for layer in model.modules() if isinstance(layer, torch.nn.Linear)}

    assert model.generate(ids, max_new_tokens=20, do_sample=False, custom_generate=Generate()).tolist() == expected
    assert layers() == {"Linear"}
    packing = Generate(linear="fused")
    assert model.generate(ids, max_new_tokens=20, do_sample=False, custom_generate=packing).tolist() == expected
    assert "FusedLinear" in layers()
    packing.release(model)
    assert layers() == {"Linear"}
    assert model.generate(ids, max_new_tokens=20, do_sample=False, custom_generate=Generate()).tolist() == expected


def test_several_prompts_one_after_the_other(capsys):
    model = toy_model("llama")
    prompts = [[5, 9, 7], [8, 3], [5, 9, 7]]
    decoder = Decoder(model)
    answers = decoder.generate_all(prompts, max_new_tokens=12)
    assert [answer.ids for answer in answers] == [greedy(model, prompt, 12, [2]) for prompt in prompts]
    assert "3/3" in capsys.readouterr().err
    drawn = dict(max_new_tokens=9, progress=False, sampling=Sampling(temperature=2.0, seed=1))
    first, second = decoder.generate_all([prompts[0]] * 2, **drawn)
    assert first.ids != second.ids and not capsys.readouterr().err


def test_a_kept_cache_is_of_the_weights_as_they_are():
    """Keys of the old weights would be attended to by the new ones, in silence."""
    model, prompt = toy_model("llama-grouped"), [5, 9, 7, 11, 8, 20]
    decoder = Decoder(model, method="vanilla")
    for change in ("trained", "loaded"):
        prompt = [*prompt, *decoder.generate(prompt, max_new_tokens=12).ids, 40]
        with torch.no_grad():
            if change == "trained":
                for parameter in model.parameters():
                    parameter.mul_(1.3)
            else:
                model.load_state_dict(toy_model("llama-grouped", seed=3).state_dict())
        assert decoder.generate(prompt, max_new_tokens=20).ids == greedy(model, prompt, 20, [2]), change


def test_a_prompt_is_forwarded_again_for_a_method_that_has_not_seen_it(forwarded):
    decoder, prompt = Decoder(toy_model("llama-grouped"), method="vanilla"), [5, 9, 7, 11, 8, 20, 31]
    decoder.generate(prompt, max_new_tokens=8)
    forwarded.clear()
    decoder.method = make_method("dynamic", decoder.target, eos=decoder.eos, nodes=4)
    decoder.generate(prompt, max_new_tokens=8)
    assert forwarded[0] == len(prompt) - 1


def test_what_cannot_be_loaded_is_an_error_of_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "empty").mkdir()
    names = ("/nowhere/at/all", "no/such/folder", "../missing", "~/missing", "org/", "", "org/name", "data/embeded")
    for name in (*names, "~/empty"):
        with pytest.raises(UserError) as caught:
            Decoder.from_pretrained(name)
        why = "no such folder, and the hub's cannot be loaded" if name in names else "cannot be loaded"
        assert str(caught.value).startswith(f"model {name}: {why} (") and "\n" not in str(caught.value)
    (tmp_path / "toy").symlink_to(ROOT / "data/embedded")
    assert Decoder.from_pretrained("~/toy", method="vanilla").tokenizer is not None
