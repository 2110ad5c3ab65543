"""The trainer: trained heads accept more than random ones, bad input is one line."""

import json
import random
from itertools import islice

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from model.engine import Target, generate
from model.methods import make_method
from tests.conftest import greedy, toy_model
from tools import heads
from tools.heads import Recipe, main, new_heads, save, sequences, train

LENGTH = 30  # tokens of text behind its first three


@pytest.fixture(scope="module")
def words() -> PreTrainedTokenizerFast:
    """A word a token: w0 to w60."""
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(61)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("kind, path", [("medusa", "heads_path"), ("eagle", "head_path")])
def test_trained_heads_accept_more_than_untrained_ones(words, tmp_path, kind, path, monkeypatch):
    """Of a toy model that seldom repeats itself, trained on its own greedy text."""
    model = toy_model("llama-grouped", seed=7)
    target = Target(model)
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 61) for _ in range(3)] for _ in range(6)]
    rows = [prompt + greedy(model, prompt, LENGTH) for prompt in prompts]
    text = tmp_path / "text.jsonl"
    documents = [{"text": " ".join(f"w{i}" for i in row)} for row in rows]
    text.write_text("\n".join(json.dumps(document) for document in documents))

    monkeypatch.setattr(heads, "CLASS_WEIGHT", 1.0)
    recipe = Recipe(kind, steps=50, batch_tokens=400, rate=2e-2, heads=3)
    save(new_heads(recipe, target), recipe, target, tmp_path / "new")
    save(train(recipe, target, words, str(text)), recipe, target, tmp_path / "trained")
    chain = tmp_path / "chain.yaml"
    chain.write_text("[[0], [0, 0], [0, 0, 0]]")  # one guess a depth: luck does not help
    accepted = []
    for name in ("new", "trained"):
        drafter = make_method(kind, target, tree_path=str(chain), **{path: str(tmp_path / name)})
        outs = [generate(target, drafter, row[:3], max_new_tokens=LENGTH) for row in rows[:4]]
        assert [out.tokens for out in outs] == [row[3:] for row in rows[:4]]
        accepted.append(4 * LENGTH / sum(len(out.steps) for out in outs))
    assert accepted[1] > accepted[0] + 0.3


def test_of_plain_text_all_is_predicted_of_dialogues_the_answers(tmp_path, words):
    file = tmp_path / "text.txt"
    file.write_text(" ".join(f"w{i}" for i in range(1, 31)))
    items = list(islice(sequences(str(file), words, 10), 3))
    assert sorted(i for item in items for i in item.ids) == list(range(1, 31))
    assert all(all(item.answer) for item in items)
    tokenizer = AutoTokenizer.from_pretrained("data/embedded")
    item = next(sequences("embedded", tokenizer, 1024))
    assert any(item.answer)
    assert not all(item.answer)
    assert len(item) <= 1024


COMMON = ["--model", "data/embedded", "--text", "embedded", "--steps", "1", "--batch-tokens", "256"]


def test_the_command_trains(tmp_path):
    for kind, flags in (("medusa", ["--shared-lm-head"]), ("eagle", [])):
        main([kind, *COMMON, *flags, "--output", str(tmp_path / kind)])
    config = json.loads((tmp_path / "medusa/config.json").read_text())
    assert config["shared_lm_head"] is True
    assert config["medusa_num_heads"] == 4
    assert all(file.stat().st_size <= 2e6 for file in tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize(
    "flag, value, says",
    [
        ("--text", "nowhere.txt", "cannot be read (No such file"),
        ("--steps", "0", "must be at least 1"),
        ("--rate", "nan", "above 0"),
        ("--output", "README.md", "README.md: File exists"),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, flag, value, says):
    with pytest.raises(SystemExit) as left:
        main(["eagle", *COMMON, "--output", str(tmp_path), flag, value])
    error = capsys.readouterr().err
    assert left.value.code == 2
    assert error.startswith("error: ")
    assert says in error
    assert error.count("\n") == 1
