"""Batches in the library: a decoder's answers, transformers' padded `generate`, and the command."""

from concurrent.futures import ThreadPoolExecutor

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
from model.engine.sampling import Sampling
from model.errors import UserError
from model.generate import Generate
from tests.checkpoint import write_tokenizer
from tests.conftest import greedy, toy_model
from tests.model.test_decoder import Letters

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
    return toy_model("llama-grouped")


@pytest.mark.parametrize("method", ["vanilla", "dynamic", "recycling", "suffix_decoding"])
def test_a_decoder_answers_in_order_with_the_texts_of_one_by_one(model, method):
    decoder = Decoder(model, Letters(), method=method, linear="torch")
    settings = dict(max_new_tokens=25, progress=False)
    drawn = dict(sampling=Sampling(temperature=0.9, seed=3))
    for more in ({}, drawn):
        one_by_one = decoder.generate_all(PROMPTS, **settings, **more)
        for batch in (2, 4, 9):
            answers = decoder.generate_all(PROMPTS, batch=batch, **settings, **more)
            assert [a.ids for a in answers] == [a.ids for a in one_by_one]
            assert [a.text for a in answers] == [a.text for a in one_by_one]
            assert all(sum(a.accept_lengths) == len(a.ids) for a in answers)
            kept = [a.metrics["speculative_decoding"]["num_accepted_draft_tokens"] for a in answers]
            assert all(
                count >= len(a.ids) - len(a.accept_lengths)
                for count, a in zip(kept, answers, strict=True)
            )
    assert [a.ids for a in one_by_one] != [greedy(model, prompt, 25) for prompt in PROMPTS]


def test_stop_strings_ends_and_the_models_own_penalties(tmp_path):
    write_tokenizer(tmp_path)
    model, tokenizer = toy_model("llama-grouped"), AutoTokenizer.from_pretrained(tmp_path)
    model.generation_config = GenerationConfig(
        repetition_penalty=1.3, no_repeat_ngram_size=3, max_time=60.0
    )
    decoder = Decoder(
        model, tokenizer, method="recycling", tree="2.2.2", eos=[35, 54], linear="torch"
    )
    stop = [
        tokenizer.decode([token])
        for token in decoder.generate(PROMPTS[0], max_new_tokens=30).ids[20:21]
    ]
    settings = dict(max_new_tokens=30, progress=False, stop=stop)
    answers = decoder.generate_all(PROMPTS, batch=3, **settings)
    one_by_one = decoder.generate_all(PROMPTS, **settings)
    assert [(a.ids, a.stop) for a in answers] == [(a.ids, a.stop) for a in one_by_one]
    assert len({a.stop for a in answers}) > 1


def test_threads_share_a_decoder_and_a_processor_may_call_the_model(model):
    """Between the forward of a batch and what is learnt from it another batch steps, or the model itself is called."""
    decoder = Decoder(model, method="dynamic", nodes=8, linear="torch")

    def reads(ids, scores):
        with torch.no_grad():
            model(ids[:, -3:])
        if ids.shape[1] % 9 == 0:
            decoder.target.model.generate(
                ids[:, -4:], custom_generate=ours, max_new_tokens=3, pad_token_id=0
            )
        return scores

    ours = Generate("dynamic", nodes=8, linear="torch")
    expected = [a.ids for a in decoder.generate_all(PROMPTS, progress=False, max_new_tokens=20)]
    settings = dict(batch=3, progress=False, max_new_tokens=20)
    ways = [{}, {"sampling": Sampling(processors=(reads,))}, {}]
    with ThreadPoolExecutor() as pool:
        runs = [*pool.map(lambda way: decoder.generate_all(PROMPTS, **settings, **way), ways)]
    assert [[a.ids for a in answers] for answers in runs] == [expected] * 3


def test_what_a_decoder_refuses_of_a_batch(model):
    decoder = Decoder(model, method="recycling", start="cold", linear="torch")
    with pytest.raises(
        UserError, match="^start=cold: forgets between answers what those of a batch share; use hot"
    ):
        decoder.generate_all(PROMPTS, batch=2, progress=False)
    decoder = Decoder(model, method="vanilla", start="cold", linear="torch")
    assert decoder.generate_all(PROMPTS[:2], batch=2, progress=False, max_new_tokens=3)[
        1
    ].ids == greedy(model, [8], 3)
    with pytest.raises(UserError, match="^batch=0: must be a number of sequences, at least 1$"):
        decoder.generate_all(PROMPTS, batch=0, progress=False)
    with pytest.raises(UserError, match="^prompt 7: prompt: has no tokens"):
        decoder.generate_all([*PROMPTS, []], batch=2, progress=False)


def padded(prompts):
    ids = torch.tensor([[0] * (LONGEST - len(prompt)) + prompt for prompt in prompts])
    return ids, (
        torch.arange(LONGEST) >= torch.tensor([[LONGEST - len(prompt)] for prompt in prompts])
    ).long()


def rows(model, ids, mask, **settings):
    return model.generate(
        ids,
        attention_mask=mask,
        **dict(max_new_tokens=25, do_sample=False, pad_token_id=0) | settings,
    )


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"eos_token_id": [35, 54, 20]},
        {"eos_token_id": 54, "pad_token_id": 60, "return_dict_in_generate": True},
        {
            "repetition_penalty": 1.4,
            "no_repeat_ngram_size": 2,
            "suppress_tokens": [7, 9],
            "bad_words_ids": [[11, 12]],
        },
    ],
    ids=str,
)
@pytest.mark.parametrize("method", ["dynamic", "vanilla", "pld"])
def test_padded_rows_inside_generate_are_those_of_one_by_one_and_padded_as_stock_pads(
    model, method, settings
):
    ours = Generate(method, linear="torch")
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


@pytest.mark.parametrize("eos", [[47, 36], [36, 47, 9], torch.tensor([47, 36]), 36, None], ids=str)
@pytest.mark.parametrize("pad", [None, 60])
def test_ended_rows_are_filled_with_the_id_that_stock_takes(eos, pad):
    """Without a pad id that is the first EOS id as they are listed; it was the smallest."""
    model, (ids, mask) = toy_model("llama-grouped"), padded(PROMPTS)
    model.generation_config.pad_token_id = None
    settings = dict(eos_token_id=eos, pad_token_id=pad)
    stock = rows(model, ids, mask, **settings)
    assert rows(
        model, ids, mask, custom_generate=Generate("pld", linear="torch"), **settings
    ).equal(stock)
    ends = {47, 36} if eos is not None else set()
    assert bool(torch.isin(stock[:, LONGEST:], torch.tensor([*ends])).any()) == bool(ends)


def test_rows_are_drawn_with_the_seeds_of_one_by_one(model):
    ours, (ids, mask) = Generate("recycling", linear="torch"), padded(PROMPTS)
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


def test_what_generate_refuses_of_a_batch(model):
    ids, mask = padded(PROMPTS)
    ours = dict(custom_generate=Generate(linear="torch"))
    for settings, name in (
        (
            {"min_new_tokens": 5, "eos_token_id": 54},
            "MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor",
        ),
        ({"begin_suppress_tokens": [5]}, "SuppressTokensAtBeginLogitsProcessor"),
        ({"stopping_criteria": StoppingCriteriaList([Counts()])}, "Counts"),
        ({"token_streamer": Counts()}, "token_streamer"),
        ({"logits_processor": [RepetitionPenaltyLogitsProcessor(1.3, 4)]}, "prompt_ignore_length"),
    ):
        with pytest.raises(
            UserError, match=f"^custom_generate: a batch has no .*{name}; leave it out"
        ):
            rows(model, ids, mask, **settings, **ours)
    for wrong in (mask.flip(1), mask.index_fill(1, torch.tensor([LONGEST - 1]), 0)):
        with pytest.raises(UserError, match="padding but on the left"):
            rows(model, ids, wrong, **ours)
    with pytest.raises(UserError, match="position_ids"):
        rows(model, ids, mask, position_ids=torch.arange(LONGEST).repeat(len(PROMPTS), 1), **ours)
    with pytest.raises(
        UserError, match="^start=cold: forgets between answers what those of a batch share"
    ):
        rows(model, ids, mask, custom_generate=Generate(start="cold", linear="torch"))
