"""Batches in the library: a decoder's answers, transformers' padded `generate`, and the command."""

import pytest
import torch
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
)

from model.decoder import Decoder
from model.engine import Sampling
from model.errors import UserError
from model.generate import Generate
from tests.checkpoint import write_tokenizer
from tests.conftest import greedy, toy_model
from tests.model.test_decoder import Letters
from tests.model.test_generate_settings import Noted

PROMPTS = [
    [5, 9, 7, 5, 9, 7, 11],
    [8],
    [30, 31, 32] * 9,
    [5, 9, 7, 5],
    [40, 3],
    [12, 13, 14, 15, 16],
]
LONGEST = max(map(len, PROMPTS))


@pytest.fixture(scope="module")
def model():
    model = toy_model("llama-grouped")
    model.generation_config.pad_token_id = None
    return model


@pytest.mark.parametrize("method", ["dynamic", "recycling"])
def test_a_decoder_answers_in_order_with_the_texts_of_one_by_one(model, method):
    decoder = Decoder(model, Letters(), method=method, linear="torch")
    settings = dict(max_new_tokens=16, progress=False)
    drawn = dict(sampling=Sampling(temperature=0.9, seed=3))
    for more in ({}, drawn):
        one_by_one = decoder.generate_all(PROMPTS, **settings, **more)
        for batch in (2, 9):
            answers = decoder.generate_all(PROMPTS, batch=batch, **settings, **more)
            assert [(a.ids, a.text) for a in answers] == [(a.ids, a.text) for a in one_by_one]
            for answer in answers:
                assert sum(answer.accept_lengths) == len(answer.ids)
    assert [a.ids for a in one_by_one] != [greedy(model, prompt, 16) for prompt in PROMPTS]


def test_stop_strings_ends_and_the_models_own_penalties(tmp_path):
    write_tokenizer(tmp_path)
    model = toy_model("llama-grouped")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model.generation_config = GenerationConfig(
        repetition_penalty=1.3, no_repeat_ngram_size=3, max_time=60.0
    )
    decoder = Decoder(
        model, tokenizer, method="recycling", tree="2.2.2", eos=[35, 54], linear="torch"
    )
    stop = [
        tokenizer.decode([token])
        for token in decoder.generate(PROMPTS[0], max_new_tokens=30).ids[12:13]
    ]
    settings = dict(max_new_tokens=30, progress=False, stop=stop)
    answers = decoder.generate_all(PROMPTS, batch=3, **settings)
    one_by_one = decoder.generate_all(PROMPTS, **settings)
    assert [(a.ids, a.stop) for a in answers] == [(a.ids, a.stop) for a in one_by_one]
    assert len({a.stop for a in answers}) > 1


def test_what_a_decoder_refuses_of_a_batch(model):
    cold = Decoder(model, method="recycling", start="cold", linear="torch")
    with pytest.raises(
        UserError, match="^start=cold: forgets between answers what those of a batch"
    ):
        cold.generate_all(PROMPTS, batch=2, progress=False)
    decoder = Decoder(model, method="vanilla", start="cold", linear="torch")
    answers = decoder.generate_all(PROMPTS[:2], batch=2, progress=False, max_new_tokens=3)
    assert answers[1].ids == greedy(model, [8], 3)
    with pytest.raises(UserError, match="^prompt 7: prompt: has no tokens"):
        decoder.generate_all([*PROMPTS, []], batch=2, progress=False)


def padded(prompts):
    ids = torch.tensor([[0] * (LONGEST - len(prompt)) + prompt for prompt in prompts])
    return ids, (ids != 0).long()


def rows(model, ids, mask, **settings):
    return model.generate(
        ids,
        **dict(attention_mask=mask, max_new_tokens=16, do_sample=False, pad_token_id=0) | settings,
    )


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"eos_token_id": [35, 54, 20]},
        {"eos_token_id": 54, "pad_token_id": 60, "return_dict_in_generate": True},
        # without a pad id rows are filled with the first EOS id, not the smallest
        {"eos_token_id": [47, 36], "pad_token_id": None},
        {
            "repetition_penalty": 1.4,
            "no_repeat_ngram_size": 2,
            "suppress_tokens": [7, 9],
            "bad_words_ids": [[11, 12]],
        },
    ],
    ids=str,
)
def test_padded_rows_inside_generate_are_those_of_one_by_one_and_padded_as_stock_pads(
    model, settings
):
    ours = Generate("dynamic", linear="torch")
    ids, mask = padded(PROMPTS)
    mine = rows(model, ids, mask, custom_generate=ours, **settings)
    if "return_dict_in_generate" in settings:
        answers, mine = [out.tokens for out in mine.generations], mine.sequences
        assert all(
            row[LONGEST : LONGEST + len(new)] == new
            for row, new in zip(mine.tolist(), answers, strict=True)
        )
    stock = {name: value for name, value in settings.items() if name != "return_dict_in_generate"}
    assert mine.equal(rows(model, ids, mask, **stock)), "of a toy model padding changes no token"
    for row, prompt in zip(mine.tolist(), PROMPTS, strict=True):
        alone = rows(model, torch.tensor([prompt]), torch.ones(1, len(prompt)).long(), **stock)[
            0
        ].tolist()
        answer = alone[len(prompt) :]
        assert row[LONGEST : LONGEST + len(answer)] == answer
    one = rows(model, ids[1:2], mask[1:2], custom_generate=ours, **stock)
    assert one.equal(rows(model, ids[1:2], mask[1:2], **stock)), "one padded row, too"


def test_rows_are_drawn_with_the_seeds_of_one_by_one(model):
    ours = Generate("recycling", linear="torch")
    (ids, mask) = padded(PROMPTS)
    drawn = dict(
        do_sample=True,
        temperature=0.9,
        top_k=0,
        top_p=0.95,
        eos_token_id=None,
        custom_generate=ours,
    )
    torch.manual_seed(5)
    mine = rows(model, ids, mask, **drawn)
    torch.manual_seed(5)
    for row, prompt in zip(mine.tolist(), PROMPTS, strict=True):
        alone = rows(model, torch.tensor([prompt]), torch.ones(1, len(prompt)).long(), **drawn)
        assert row[LONGEST:] == alone[0, len(prompt) :].tolist()


class Counts(StoppingCriteria):
    def __call__(self, ids, scores, **kwargs):
        return torch.zeros(len(ids), dtype=torch.bool)


REFUSED = [
    (dict(min_new_tokens=5, eos_token_id=54), "a batch has no .*MinNewTokensLength"),
    (dict(begin_suppress_tokens=[5]), "a batch has no SuppressTokensAtBegin"),
    (dict(stopping_criteria=StoppingCriteriaList([Counts()])), "a batch has no .*Counts"),
    (dict(token_streamer=Noted()), "a batch has no streamer"),
    (dict(streamer=Noted()), "a batch has no streamer"),
    (dict(logits_processor=[RepetitionPenaltyLogitsProcessor(1.3, 4)]), "prompt_ignore_length"),
    (dict(attention_mask=padded(PROMPTS)[1].flip(1)), "padding but on the left"),
    (dict(custom_generate=Generate(start="cold", linear="torch")), "^start=cold: forgets"),
]


def test_what_generate_refuses_of_a_batch(model):
    ids, mask = padded(PROMPTS)
    for settings, why in REFUSED:
        with pytest.raises(UserError, match=why):
            rows(model, ids, mask, **dict(custom_generate=Generate(linear="torch")) | settings)
