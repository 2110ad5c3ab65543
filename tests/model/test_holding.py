"""16-bit checkpoints that compute in float32: the numbers of a float32 model, from half the bytes, or that model."""

import copy
import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM as Auto

from evaluation.loading import models
from model import holding
from model.decoder import Decoder
from model.engine.linear import halves, is_held
from model.errors import UserError
from model.generate import ATTRIBUTE, Generate
from tests.checkpoint import write_checkpoint
from tests.conftest import CONFIGS, greedy, toy_model

PROMPT = [5, 9, 13, 7, 5, 9, 13, 8, 20, 21]
NOT_HELD = ("gemma", "gemma2", "gemma3")  # the embedding's scale is rounded with the weights
needs_half = pytest.mark.skipif(not halves(), reason="no x86 processor with FBGEMM")
pytestmark = needs_half


@pytest.fixture
def saved(tmp_path):
    """Save a toy model in 16 bits, in shards; return the folder."""

    def save(name="llama-grouped", dtype=torch.bfloat16):
        toy_model(name).to(dtype).save_pretrained(tmp_path, max_shard_size="20KB")
        return tmp_path

    return save


def load(folder, **settings):
    return holding.load(lambda dtype: Auto.from_pretrained(folder, dtype=dtype, **settings).eval(), str(folder))


def kind(model, linear="auto"):
    """How the target that `generate` made for a model multiplies."""
    return vars(model)[ATTRIBUTE].targets[linear].copies.kind


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_held_model_says_what_the_float32_model_says(name, dtype, saved):
    folder = saved(name, dtype)
    wide, held = Auto.from_pretrained(folder, dtype=torch.float32).eval(), load(folder)
    assert is_held(held) == (name not in NOT_HELD)
    expected = greedy(wide, PROMPT, 30)
    assert greedy(held, PROMPT, 30) == expected, "transformers' own loop"
    decoder = Decoder(held, eos=())
    assert decoder.generate(PROMPT, max_new_tokens=30).ids == expected
    with torch.inference_mode():
        logits = [model(input_ids=torch.tensor([PROMPT])).logits for model in (held, wide)]
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5 * logits[1].abs().max().item())
    if is_held(held):
        assert decoder.target.copies.kind == "half"
        for key, parameter in held.named_parameters():
            assert torch.equal(parameter.float(), wide.get_parameter(key)), key
            assert parameter.dtype is (torch.float32 if parameter.dim() == 1 else dtype) or name == "gpt2"


def test_weights_of_a_held_model_are_exact_wherever_they_are_read(saved, tmp_path_factory):
    """Copies, pickles and checkpoints of it, an owner's training, and a release."""
    folder = saved()
    decoder, wide = Decoder(load(folder), eos=()), Auto.from_pretrained(folder, dtype=torch.float32).eval()
    held, expected, elsewhere = decoder.target.model, greedy(wide, PROMPT, 20), tmp_path_factory.mktemp("again")
    assert decoder.settings["linear"] == "half (float32 from weights of 16 bits)"
    held.save_pretrained(elsewhere)
    files = [
        {k: v for path in f.glob("*.safetensors") for k, v in load_file(path).items()} for f in (folder, elsewhere)
    ]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(tensor.float(), files[1][key].float()) for key, tensor in files[0].items())
    assert greedy(copy.deepcopy(held), PROMPT, 20) == expected
    torch.save(held, elsewhere / "model.pt")
    assert greedy(torch.load(elsewhere / "model.pt", weights_only=False), PROMPT, 20) == expected
    decoder.release()
    assert greedy(held, PROMPT, 20) == expected and is_held(held)
    for model in (held, wide):
        model.model.layers[0].mlp.down_proj.weight.data.neg_()  # which torch does not count
    assert Decoder(held, eos=()).generate(PROMPT, max_new_tokens=20).ids == greedy(wide, PROMPT, 20) != expected
    loss = held(input_ids=torch.tensor([PROMPT]), labels=torch.tensor([PROMPT])).loss
    loss.backward()
    assert held.model.layers[0].mlp.down_proj.weight.grad.abs().sum() > 0
    assert held.model.layers[0].mlp.down_proj.weight.dtype is torch.bfloat16


def test_a_config_of_another_type_than_the_files_narrows_nothing(tmp_path):
    toy_model("llama-grouped").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16", "torch_dtype": "bfloat16"}))
    model = load(tmp_path)
    assert not is_held(model) and model.dtype is torch.float32
    assert greedy(model, PROMPT, 20) == greedy(toy_model("llama-grouped"), PROMPT, 20)


@pytest.mark.parametrize("value", [float("nan"), 3.3e38])
def test_a_weight_that_does_not_fit_is_widened(value, saved):
    folder = saved()
    name, shard = next(
        (key, path) for path in sorted(folder.glob("*.safetensors")) for key in load_file(path) if "up_proj" in key
    )
    state = load_file(shard)
    state[name][0, 0] = value
    save_file(state, shard, metadata={"format": "pt"})
    model, wide = load(folder), Auto.from_pretrained(folder, dtype=torch.float32).eval()
    layer = model.get_submodule(name.removesuffix(".weight"))
    copies = Decoder(model, eos=()).target.copies
    assert is_held(model) and copies.by_layer[layer].exponent is None and copies.kind == "half"
    x = torch.randn(1, 9, layer.in_features)
    with torch.inference_mode(), copies.used():
        torch.testing.assert_close(layer(x), wide.get_submodule(name.removesuffix(".weight"))(x), equal_nan=True)


def test_a_truncated_shard_is_one_line(saved):
    shard = sorted(saved().glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(UserError, match="cannot be loaded") as error:
        Decoder.from_pretrained(str(shard.parent))
    assert "\n" not in str(error.value)


def test_generate_on_a_users_own_model_copies_its_weights_in_16_bits(saved):
    """float16 and float32 whose values fit; the model's own weights and forwards stay, bfloat16 as it was."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        model = toy_model("llama-grouped").to(torch.bfloat16 if dtype is torch.bfloat16 else torch.float16).to(dtype)
        expected = greedy(model, PROMPT, 20)
        generate, ids = Generate(), torch.tensor([PROMPT])
        settings = dict(attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, pad_token_id=0)
        text = model.generate(ids, custom_generate=generate, eos_token_id=None, **settings)[0, len(PROMPT) :].tolist()
        assert text == expected
        assert (kind(model) == "half") == (dtype is not torch.bfloat16) and not is_held(model)


def test_a_checkpoint_larger_than_the_free_memory_is_refused_before_it_is_loaded(saved, monkeypatch):
    """Twice as large if it cannot be held."""
    folder, loaded = saved("gemma"), []
    monkeypatch.setattr(holding, "MARGIN", 0)
    needed = holding.needed_bytes(folder)
    assert needed == int(1.06 * sum(path.stat().st_size for path in folder.glob("*.safetensors")))

    def loader(dtype):
        loaded.append(dtype)
        return Auto.from_pretrained(folder, dtype=dtype)

    once = [torch.bfloat16]
    for free, dtypes in ((needed - 1, []), (needed, once), (2 * needed, [*once, torch.float32])):
        loaded.clear()
        monkeypatch.setattr(holding.psutil, "virtual_memory", lambda free=free: SimpleNamespace(available=free))
        with nullcontext() if len(dtypes) == 2 else pytest.raises(UserError, match="GB of memory on a CPU, and 0.0 GB"):
            holding.load(loader, str(folder))
        assert loaded == dtypes


def test_too_little_memory_is_said_as_that_alone(tmp_path, monkeypatch):
    """Not as a folder that cannot be loaded, or is not there."""
    folder = write_checkpoint(tmp_path / "toy")
    monkeypatch.setattr(holding, "MARGIN", 0)
    monkeypatch.setattr(holding.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    for load_it in (
        lambda path: Decoder.from_pretrained(path, device="cpu"),
        lambda path: models._load(models.ModelSettings("toy", path, device="cpu")),
    ):
        with pytest.raises(UserError, match=r"^model \S+: takes 0.0 GB of memory on a CPU"):
            load_it(str(folder))
