"""16-bit checkpoints that compute in float32: the numbers of a float32 model, from half the bytes, or that model."""

import copy
import json
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM as Auto

from evaluation.answerers import build_answerer
from evaluation.loading import models
from model import holding
from model.decoder import Decoder
from model.engine import generate as decode_with
from model.engine.linear import SAMPLED, PackedLinear, halves, is_held
from model.errors import UserError
from model.files import ROOT
from model.generate import ATTRIBUTE, Generate
from model.methods.vanilla import Vanilla
from tests.checkpoint import write_checkpoint
from tests.conftest import CONFIGS, greedy, toy_model
from tests.model.families import toy

PROMPT = [5, 9, 13, 7, 5, 9, 13, 8, 20, 21]
IDS = torch.tensor([PROMPT])
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
    return holding.load(
        lambda dtype: Auto.from_pretrained(folder, dtype=dtype, **settings).eval(), str(folder)
    )


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
            assert (
                parameter.dtype is (torch.float32 if parameter.dim() == 1 else dtype)
                or name == "gpt2"
            )


def test_weights_of_a_held_model_are_exact_wherever_they_are_read(saved, tmp_path_factory):
    """Copies, pickles and checkpoints of it, an owner's training, and a release."""
    folder = saved()
    decoder, wide = (
        Decoder(load(folder), eos=()),
        Auto.from_pretrained(folder, dtype=torch.float32).eval(),
    )
    held, expected, elsewhere = (
        decoder.target.model,
        greedy(wide, PROMPT, 20),
        tmp_path_factory.mktemp("again"),
    )
    assert decoder.settings["linear"].startswith(
        "half (float32 from weights of 16 bits; measured: "
    )
    held.save_pretrained(elsewhere)
    files = [
        {k: v for path in f.glob("*.safetensors") for k, v in load_file(path).items()}
        for f in (folder, elsewhere)
    ]
    assert files[0].keys() == files[1].keys()
    assert all(
        torch.equal(tensor.float(), files[1][key].float()) for key, tensor in files[0].items()
    )
    assert greedy(copy.deepcopy(held), PROMPT, 20) == expected
    torch.save(held, elsewhere / "model.pt")
    assert greedy(torch.load(elsewhere / "model.pt", weights_only=False), PROMPT, 20) == expected
    decoder.release()
    assert greedy(held, PROMPT, 20) == expected and is_held(held)
    for model in (held, wide):
        model.model.layers[0].mlp.down_proj.weight.data.neg_()  # which torch does not count
    assert (
        Decoder(held, eos=()).generate(PROMPT, max_new_tokens=20).ids
        == greedy(wide, PROMPT, 20)
        != expected
    )
    loss = held(input_ids=torch.tensor([PROMPT]), labels=torch.tensor([PROMPT])).loss
    loss.backward()
    assert held.model.layers[0].mlp.down_proj.weight.grad.abs().sum() > 0
    assert held.model.layers[0].mlp.down_proj.weight.dtype is torch.bfloat16


def _stored(folder, config=None, **types):
    """Write tensors, by a part of their names, in other types; `config`: the type that the file says."""
    for path in folder.glob("*.safetensors"):
        state = load_file(path)
        for part, dtype in types.items():
            state |= {
                name: tensor.to(dtype) * 1.0001 for name, tensor in state.items() if part in name
            }
        save_file(state, path, metadata={"format": "pt"})
    if config is not None:
        said = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(
            json.dumps(said | {"dtype": config, "torch_dtype": config})
        )


@pytest.mark.parametrize(
    ("dtype", "config", "types"),
    [
        (torch.bfloat16, None, {"norm": torch.float32}),  # as a held model is saved
        (torch.bfloat16, None, {"down_proj": torch.float32, "norm": torch.float64}),
        (torch.bfloat16, None, {"down_proj": torch.float16}),
        (torch.float16, None, {"q_proj": torch.bfloat16, "embed": torch.float32}),
        (torch.float16, "bfloat16", {}),
        (torch.bfloat16, "float16", {}),
        (torch.float16, "float32", {}),
    ],
)
def test_the_files_own_types_decide_what_is_kept(dtype, config, types, saved):
    folder = saved(dtype=dtype)
    _stored(folder, config, **types)
    wide, held = Auto.from_pretrained(folder, dtype=torch.float32).eval(), load(folder)
    assert is_held(held)
    for name, parameter in held.named_parameters():
        assert torch.equal(parameter.float(), wide.get_parameter(name)), name
        other = any(part in name for part in types)
        assert parameter.dtype is (torch.float32 if other or parameter.dim() == 1 else dtype), name
    assert Decoder(held, eos=()).generate(PROMPT, max_new_tokens=20).ids == greedy(wide, PROMPT, 20)


def test_wide_tensors_that_the_model_calls_otherwise_are_loaded_by_transformers(tmp_path):
    """Experts are joined when they are loaded."""
    toy("mixtral").to(torch.bfloat16).save_pretrained(tmp_path)
    assert is_held(load(tmp_path))
    _stored(tmp_path, experts=torch.float32)
    wide, model = Auto.from_pretrained(tmp_path, dtype=torch.float32).eval(), load(tmp_path)
    assert not is_held(model) and torch.equal(model(IDS).logits, wide(IDS).logits)


@pytest.mark.parametrize("pickled", [False, True])
def test_what_files_have_of_no_part_of_the_model_changes_nothing(pickled, tmp_path):
    """Angles in float32, as in files of LLaMA and Vicuna."""
    toy_model("llama-grouped").to(torch.bfloat16).save_pretrained(tmp_path)
    expected, file = load(tmp_path)(IDS).logits, tmp_path / "model.safetensors"
    state = load_file(file) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.rand(4)}
    if pickled:
        torch.save(state | {"note": "none of a tensor"}, tmp_path / "pytorch_model.bin")
        file.unlink()
    else:
        save_file(state, file, {"format": "pt"})
    held = load(tmp_path, use_safetensors=not pickled)
    assert is_held(held) and torch.equal(held(IDS).logits, expected)


def test_a_saved_held_model_is_held_again(saved, tmp_path_factory):
    held, elsewhere = load(saved()), tmp_path_factory.mktemp("again")
    held.save_pretrained(elsewhere)
    again = load(elsewhere)
    assert is_held(again) and _bytes(again) == _bytes(held)


def _bytes(model):
    return sum(parameter.nbytes for parameter in model.parameters())


def test_an_explicit_type_is_that_type():
    """A float32 model keeps what its owner writes."""
    folder = str(ROOT / "data" / "embedded")
    for dtype in ("float32", torch.float32, "bfloat16"):
        model = Decoder.from_pretrained(folder, dtype=dtype, device="cpu").target.model
        assert not is_held(model) and {parameter.dtype for parameter in model.parameters()} == {
            model.dtype
        }
        assert str(model.dtype).endswith(str(dtype))
    loaded = models._load(models.ModelSettings("toy", folder, device="cpu", dtype="float32"))
    assert not is_held(loaded.target.model)
    assert is_held(models._load(models.ModelSettings("toy", folder, device="cpu")).target.model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_cast_makes_it_the_stock_model_cast_alike(dtype, saved):
    held, stock = load(folder := saved()), Auto.from_pretrained(folder, dtype=torch.float32).eval()
    for model in (held, stock):
        model.to(dtype)
        model(input_ids=IDS, labels=IDS).loss.backward()
    assert not is_held(held)
    for name, parameter in held.named_parameters():
        assert torch.equal(parameter.grad, stock.get_parameter(name).grad), name
    assert greedy(held, PROMPT, 20) == greedy(stock, PROMPT, 20)
    if dtype in (torch.float32, torch.float64):
        assert Decoder(held, eos=()).generate(PROMPT, max_new_tokens=20).ids == greedy(
            stock, PROMPT, 20
        )


def test_a_config_of_another_type_than_the_files_narrows_nothing(tmp_path):
    toy_model("llama-grouped").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"dtype": "bfloat16", "torch_dtype": "bfloat16"})
    )
    model = load(tmp_path)
    assert not is_held(model) and model.dtype is torch.float32
    assert greedy(model, PROMPT, 20) == greedy(toy_model("llama-grouped"), PROMPT, 20)


@pytest.mark.parametrize("value", [float("nan"), 3.3e38])
def test_a_weight_that_does_not_fit_is_widened(value, saved):
    folder = saved()
    name, shard = next(
        (key, path)
        for path in sorted(folder.glob("*.safetensors"))
        for key in load_file(path)
        if "up_proj" in key
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
        torch.testing.assert_close(
            layer(x), wide.get_submodule(name.removesuffix(".weight"))(x), equal_nan=True
        )


@pytest.mark.parametrize("family", ["llama", "phi"])  # phi's head has a bias
@pytest.mark.parametrize("change", [4, -4])
def test_a_held_model_can_be_resized(family, change, tmp_path):
    toy(family).to(torch.bfloat16).save_pretrained(tmp_path)
    held, stock = load(tmp_path), Auto.from_pretrained(tmp_path, dtype=torch.float32).eval()
    for model in (held, stock):
        model.resize_token_embeddings(model.config.vocab_size + change)
    stock.load_state_dict(held.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(held(IDS).logits, stock(IDS).logits)
    for linear in ("half", "onednn", "torch"):
        decoder = Decoder(held, eos=(), linear=linear)
        assert decoder.generate(PROMPT, max_new_tokens=20).ids == greedy(stock, PROMPT, 20)
    assert is_held(held)


@pytest.mark.parametrize("released", [False, True])
def test_a_new_decoder_packs_anew_what_samples_do_not_show(released, saved):
    held = load(saved())
    first = Decoder(held, eos=())
    said = first.generate(PROMPT, max_new_tokens=1).ids[0]
    weight = held.lm_head.weight
    of_row = torch.arange(weight.numel()).view_as(weight)[said]
    unseen = of_row[of_row % (weight.numel() // SAMPLED | 1) != 0]
    weight.data.view(-1)[unseen] = 0
    if released:
        first.release()
    text = Decoder(held, eos=()).generate(PROMPT, max_new_tokens=20).ids
    assert text == greedy(held, PROMPT, 20) and text[0] != said


def test_hf_measures_a_stock_model_loaded_once(monkeypatch):
    """Neither widened weights nor packed ones; left out where memory does not hold both."""
    loaded = models._load(
        models.ModelSettings("toy", str(ROOT / "data" / "embedded"), device="cpu")
    )
    hf = build_answerer(loaded, {"name": "hf", "drafter": None}, {}, "cold", "eager")
    monkeypatch.setattr(models.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    with pytest.raises(
        UserError, match=r"^hf: toy as transformers loads it takes 0.0 GB more in float32"
    ):
        hf.answer(PROMPT, 20)
    monkeypatch.undo()
    expected = decode_plainly(loaded, PROMPT, 20)
    monkeypatch.setattr(PackedLinear, "forward", lambda *_: pytest.fail("not a stock layer"))
    assert hf.answer(PROMPT, 20).tokens == expected
    stock, _ = loaded.stock, hf.answer(PROMPT, 5)
    assert loaded.stock is stock is not loaded.target.model and stock.dtype is torch.float32
    monkeypatch.undo()
    wide = models._load(replace(loaded.settings, dtype="float32"))
    assert wide.stock is wide.target.model


def decode_plainly(loaded, prompt, tokens):
    return decode_with(
        loaded.target, Vanilla(loaded.target.device), prompt, max_new_tokens=tokens
    ).tokens


def test_a_truncated_shard_is_one_line(saved):
    shard = sorted(saved().glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(UserError, match="cannot be loaded") as error:
        Decoder.from_pretrained(str(shard.parent))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("linear", ["auto", "torch"])
def test_an_index_that_is_none_is_one_line(saved, linear):
    folder = saved()
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(UserError, match="cannot be loaded"):
        Decoder.from_pretrained(str(folder), linear=linear)


def test_generate_on_a_users_own_model_copies_its_weights_in_16_bits(saved):
    """float16 and float32 whose values fit; the model's own weights and forwards stay, bfloat16 as it was."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        model = (
            toy_model("llama-grouped")
            .to(torch.bfloat16 if dtype is torch.bfloat16 else torch.float16)
            .to(dtype)
        )
        expected = greedy(model, PROMPT, 20)
        generate, ids = Generate(), torch.tensor([PROMPT])
        settings = dict(
            attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, pad_token_id=0
        )
        text = model.generate(ids, custom_generate=generate, eos_token_id=None, **settings)[
            0, len(PROMPT) :
        ].tolist()
        assert text == expected
        assert (kind(model) == "half") == (dtype is not torch.bfloat16) and not is_held(model)


@pytest.mark.parametrize("size", ["5GB", "30KB"])
def test_a_second_copy_of_the_weights_takes_no_memory(tmp_path, size):
    """Mistral's consolidated.safetensors was counted, too: refused for memory although it fits."""
    toy_model("llama-grouped").save_pretrained(tmp_path, max_shard_size=size)
    files = [*tmp_path.glob("*.safetensors")]
    assert (len(files) > 1) == (size == "30KB")
    needed = holding.needed_bytes(tmp_path)
    assert needed == int(1.06 * sum(path.stat().st_size for path in files)) + holding.MARGIN
    weights = b"".join(path.read_bytes() for path in files)
    for name in (
        "consolidated.safetensors",
        "model.fp16.safetensors",
        "pytorch_model.bin",
        "adapter.safetensors",
    ):
        (tmp_path / name).write_bytes(weights)
    (tmp_path / "consolidated.safetensors.index.json").write_text(
        '{"weight_map": {"a": "consolidated-1.safetensors"}}'
    )
    assert holding.needed_bytes(tmp_path) == needed
    if len(files) > 1:  # the whole file is read where there are both
        (tmp_path / "model.safetensors").write_bytes(b"0" * 7)
        assert holding.needed_bytes(tmp_path) == int(1.06 * 7) + holding.MARGIN


def test_a_checkpoint_larger_than_the_free_memory_is_refused_before_it_is_loaded(
    saved, monkeypatch
):
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
        monkeypatch.setattr(
            holding.psutil, "virtual_memory", lambda free=free: SimpleNamespace(available=free)
        )
        with (
            nullcontext()
            if len(dtypes) == 2
            else pytest.raises(UserError, match="GB of memory on a CPU, and 0.0 GB")
        ):
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
