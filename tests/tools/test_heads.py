"""The trainer: losses by hand, trained heads accept more than random ones, its files load, bad input is one line."""

import json
import random
from itertools import islice

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from model.engine import Target, generate
from model.methods.eagle import Eagle
from model.methods.medusa import Medusa, MedusaHeads
from tests.conftest import greedy, toy_model
from tools import heads
from tools.heads import Recipe, eagle_loss, main, medusa_loss, new_heads, save, sequences, train

LENGTH = 30  # tokens of text behind its first three


@pytest.fixture(scope="module")
def words() -> PreTrainedTokenizerFast:
    """A word a token: w0 to w60."""
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(61)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture(scope="module")
def world(tmp_path_factory, words):
    """A toy model that seldom repeats itself, and a file of its own greedy text, which heads can learn to foresee."""
    model, rng = toy_model("llama-grouped", seed=7), random.Random(0)
    file = tmp_path_factory.mktemp("text") / "text.jsonl"
    rows = [[rng.randrange(3, 61) for _ in range(3)] for _ in range(6)]
    rows = [row + greedy(model, row, LENGTH) for row in rows]
    file.write_text(
        "".join(json.dumps({"text": " ".join(f"w{i}" for i in row)}) + "\n" for row in rows)
    )
    return Target(model), words, str(file), rows


def accepted(target, drafter, rows):
    """MAT over the beginnings of the rows; the output is the target's own."""
    outs = [generate(target, drafter, row[:3], max_new_tokens=LENGTH) for row in rows[:4]]
    assert [out.tokens for out in outs] == [row[3:] for row in rows[:4]]
    return sum(len(out.tokens) for out in outs) / sum(len(out.steps) for out in outs)


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_trained_heads_accept_more_than_untrained_ones(world, tmp_path, kind, monkeypatch):
    target, tokenizer, file, rows = world
    monkeypatch.setattr(heads, "CLASS_WEIGHT", 1.0)
    recipe = Recipe(kind, steps=50, batch_tokens=400, rate=2e-2, heads=3)
    save(new_heads(recipe, target), recipe, target, tmp_path / "new")
    trained = train(recipe, target, tokenizer, file)
    save(trained, recipe, target, tmp_path / "trained")
    chain = tmp_path / "chain.yaml"
    chain.write_text("[[0], [0, 0], [0, 0, 0]]")  # one guess a depth: luck does not help
    method, path = {"medusa": (Medusa, "heads_path"), "eagle": (Eagle, "head_path")}[kind]
    before, after = (
        accepted(target, method(target, tree_path=str(chain), **{path: str(tmp_path / name)}), rows)
        for name in ("new", "trained")
    )
    assert after > before + 0.3, (before, after)


def test_medusa_loss_by_hand():
    """Head i at position t is judged by token t + i + 2, where that one and the next token are wanted."""
    torch.manual_seed(0)
    heads, lm_head = MedusaHeads(2, 1, 4, 7, shared=True), nn.Linear(4, 7, bias=False)
    nn.init.normal_(heads[1][0].linear.weight)
    features, ids = torch.randn(1, 5, 4), torch.tensor([[1, 2, 3, 4, 5]])
    wanted = torch.tensor([[False, False, True, True, True]])
    f = features[0]
    first = (
        F.cross_entropy(lm_head(f[1]), torch.tensor(4))
        + F.cross_entropy(lm_head(f[2]), torch.tensor(5))
    ) / 2
    block = heads[1][0]
    second = F.cross_entropy(lm_head(f[1] + F.silu(block.linear(f[1]))), torch.tensor(5))
    loss = medusa_loss(heads, lm_head, features, ids, wanted)
    torch.testing.assert_close(loss, 0.8 * first + 0.64 * second)
    assert not medusa_loss(heads, lm_head, features, ids, torch.zeros_like(wanted)).requires_grad


def test_eagle_loss_is_nothing_for_a_head_that_foresees_the_features():
    class Oracle:
        def __init__(self, features):
            self.features = features

        def angles(self, count):
            return torch.zeros(count), torch.zeros(count)

        def __call__(self, features, tokens, angles):
            assert features.shape[1] == tokens.shape[1] == len(angles[0])
            return self.features[:, 1:]

    torch.manual_seed(0)
    features, lm_head, generator = (
        torch.randn(2, 5, 4),
        nn.Linear(4, 7, bias=False),
        torch.Generator(),
    )
    ids, wanted = torch.zeros(2, 5, dtype=torch.long), torch.ones(2, 5, dtype=torch.bool)
    wanted[1, 3] = False
    entropy = (
        torch.distributions.Categorical(logits=lm_head(features[:, 1:-1][wanted[:, 2:]]))
        .entropy()
        .mean()
    )
    loss = eagle_loss(Oracle(features), lm_head, features, ids, wanted, generator)
    torch.testing.assert_close(loss, 0.1 * entropy)
    shifted = features.clone()
    shifted[1, 2] += 100  # predicts token 3 of row 1, which is not wanted
    assert eagle_loss(Oracle(shifted), lm_head, features, ids, wanted, generator) == loss
    shifted[0, 2] += 100
    assert eagle_loss(Oracle(shifted), lm_head, features, ids, wanted, generator) > loss + 1


def test_the_command_trains_and_bad_input_is_one_line(tmp_path, words, capsys, monkeypatch):
    """Of plain text all is predicted, of `embedded` only the answers of dialogues."""
    file = tmp_path / "text.txt"
    file.write_text(" ".join(f"w{i}" for i in range(1, 31)))
    items = list(islice(sequences(str(file), words, 10, seed=0), 3))
    assert sorted(i for item in items for i in item.ids) == list(range(1, 31)) and all(
        all(i.answer) for i in items
    )
    item = next(sequences("embedded", AutoTokenizer.from_pretrained("data/embedded"), 1024, seed=0))
    assert any(item.answer) and not all(item.answer) and len(item) <= 1024
    common = [
        "--model",
        "data/embedded",
        "--text",
        "embedded",
        "--steps",
        "1",
        "--batch-tokens",
        "256",
    ]
    main(["medusa", *common, "--shared-lm-head", "--output", str(tmp_path / "medusa")])
    config = json.loads((tmp_path / "medusa/config.json").read_text())
    assert (
        config["shared_lm_head"] is True
        and config["medusa_num_heads"] == 4
        and config["hidden_size"] == 192
    )
    main(["eagle", *common, "--output", str(tmp_path / "eagle")])
    assert all(file.stat().st_size <= 2e6 for file in tmp_path.rglob("*.safetensors"))
    capsys.readouterr()
    (tmp_path / "short.txt").write_text("word")
    for flag, value, says in [
        ("--text", "nowhere.txt", "cannot be read (No such file"),
        ("--text", str(tmp_path / "short.txt"), "fewer than 8 tokens"),
        ("--steps", "0", "--steps 0"),
        ("--rate", "nan", "above 0"),
        ("--seed", "-1", "--seed -1: must be from 0"),
        ("--output", "README.md", "README.md: File exists"),
    ]:
        with pytest.raises(SystemExit) as left:
            main(
                [
                    "eagle",
                    *common,
                    "--output",
                    str(tmp_path / "eagle"),
                    "--steps",
                    "9999",
                    flag,
                    value,
                ]
            )
        error = capsys.readouterr().err
        assert (
            left.value.code == 2
            and says in error
            and error.startswith("error: ")
            and error.count("\n") == 1
        )

    def interrupted(*_):
        raise KeyboardInterrupt  # as by Ctrl-C, also where a shell's background job ignores the signal

    monkeypatch.setattr(heads, "train", interrupted)
    with pytest.raises(SystemExit):
        main(["eagle", *common, "--output", str(tmp_path / "eagle")])
    assert capsys.readouterr().err == "error: stopped; nothing was written\n"
    with pytest.raises(SystemExit):  # a setting of the other kind is not ignored
        main(["eagle", *common, "--shared-lm-head", "--output", str(tmp_path / "eagle")])
