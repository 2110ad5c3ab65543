"""16-bit checkpoints that compute in float32: the numbers of a float32 model, from half the bytes."""

import copy
import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM as Auto

from evaluation.loading import models
from evaluation.loading.answerers import build_answerer
from model.decoder import Decoder
from model.errors import UserError
from model.files import ROOT
from model.weights import narrow_weights
from model.weights.linear import PackedLinear, halves, is_narrow
from tests.conftest import greedy, toy_model
from tests.model.test_changed_models import fused_adamw

PROMPT = [5, 9, 13, 7, 5, 9, 13, 8, 20, 21]
IDS = torch.tensor([PROMPT])
EMBEDDED = models.ModelSettings("toy", str(ROOT / "data" / "embedded"), device="cpu")
NOT_NARROW = ("gemma", "gemma2")  # the embedding's scale is rounded with the weights
pytestmark = pytest.mark.skipif(not halves(), reason="no x86 processor with FBGEMM")


@pytest.fixture
def saved(tmp_path):
    """Save a toy model in 16 bits, in shards; return the folder."""

    def save(name="llama-grouped", dtype=torch.bfloat16):
        toy_model(name).to(dtype).save_pretrained(tmp_path, max_shard_size="20KB")
        return tmp_path

    return save


def load(folder, **settings):
    def loader(dtype):
        return Auto.from_pretrained(folder, dtype=dtype, **settings).eval()

    return narrow_weights.load(loader, folder, f"model {folder}")


def load_wide(folder):
    return Auto.from_pretrained(folder, dtype=torch.float32).eval()


def decoded(model, tokens=20, **settings):
    return Decoder(model, eos=(), **settings).generate(PROMPT, max_new_tokens=tokens).ids


# Conv1D, biases, norms of other kinds, embeddings that are scaled or tied.
KINDS = ("llama-grouped", "qwen2", "qwen3", "gemma", "gemma2", "phi3", "olmo2", "gpt-neox", "gpt2")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.bfloat16) for name in KINDS),
        ("llama-grouped", torch.float16),
        ("gpt2", torch.float16),
    ],
)
def test_a_held_model_says_what_the_float32_model_says(name, dtype, saved):
    folder = saved(name, dtype)
    wide = load_wide(folder)
    kept = load(folder)
    assert is_narrow(kept) == (name not in NOT_NARROW)
    expected = greedy(wide, PROMPT, 20)
    assert greedy(kept, PROMPT, 20) == expected == decoded(kept, 20)
    with torch.inference_mode():
        own = kept(IDS).logits
        other = wide(IDS).logits
    torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-5 * other.abs().max().item())
    if is_narrow(kept) and name != "gpt2":
        for key, parameter in kept.named_parameters():
            assert torch.equal(parameter.float(), wide.get_parameter(key)), key
            assert parameter.dtype is (torch.float32 if parameter.dim() == 1 else dtype)


def test_a_model_that_casts_to_its_weights_type_is_loaded_in_float32(saved):
    folder = saved()

    def loader(dtype):
        model = Auto.from_pretrained(folder, dtype=dtype).eval()
        mlp = model.model.layers[0].mlp
        own = mlp.forward
        mlp.forward = lambda x: own(x.to(mlp.gate_proj.weight.dtype).to(x.dtype))
        return model

    assert not is_narrow(narrow_weights.load(loader, folder, "model"))


def added(model):
    model.model.layers[0].mlp.down_proj.weight.data.add_(0.25)  # which torch does not count


def resized(model):
    torch.manual_seed(2)
    model.resize_token_embeddings(57)


@pytest.mark.parametrize("write", [fused_adamw, added, resized, torch.nn.Module.float])
def test_an_owner_may_write_cast_and_resize_it_as_a_stock_model(write, saved):
    folder = saved()
    kept = load(folder)
    stock = load_wide(folder)
    decoded(kept)
    for model in (kept, stock):
        write(model)
    stock.load_state_dict(kept.state_dict())  # the kept one has rounded what was written
    expected = greedy(stock, PROMPT, 20)
    assert greedy(kept, PROMPT, 20) == expected
    for linear in ("half", "onednn", "torch") if is_narrow(kept) else ("auto",):
        assert decoded(kept, linear=linear) == expected, linear


def test_it_is_saved_copied_and_released_exactly(saved, tmp_path_factory):
    folder = saved()
    elsewhere = tmp_path_factory.mktemp("again")
    kept = load(folder)
    expected = greedy(load_wide(folder), PROMPT, 20)
    decoder = Decoder(kept, eos=())
    said = decoder.settings["linear"]
    assert said.startswith("half (float32 from weights of 16 bits; measured: ")
    kept.save_pretrained(elsewhere)
    again = load(elsewhere)
    stored = {tensor.dtype for tensor in load_file(elsewhere / "model.safetensors").values()}
    assert stored == {torch.float32, torch.bfloat16}, "its norms are saved in float32"
    assert is_narrow(again)
    for model in (again, copy.deepcopy(kept)):
        assert greedy(model, PROMPT, 20) == expected
    decoder.release()
    assert greedy(kept, PROMPT, 20) == expected and is_narrow(kept)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_files_own_type_decides_what_is_kept(dtype, saved):
    folder = saved(dtype=dtype)
    wide = load_wide(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    kept = load(folder)
    assert is_narrow(kept) == (dtype is not torch.float32)
    assert decoded(kept) == greedy(wide, PROMPT, 20)


def test_what_files_have_of_no_part_of_the_model_changes_nothing(tmp_path):
    """Angles in float32, as in files of LLaMA and Vicuna."""
    toy_model("llama-grouped").to(torch.bfloat16).save_pretrained(tmp_path)
    expected = load(tmp_path)(IDS).logits
    file = tmp_path / "model.safetensors"
    state = load_file(file) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.rand(4)}
    save_file(state, file, {"format": "pt"})
    kept = load(tmp_path)
    assert is_narrow(kept) and torch.equal(kept(IDS).logits, expected)


def test_an_explicit_type_is_that_type():
    for dtype in (torch.float32, "bfloat16"):
        settings = dict(dtype=dtype, device="cpu", method="vanilla")
        model = Decoder.from_pretrained(EMBEDDED.path, **settings).target.model
        assert not is_narrow(model) and str(model.dtype).endswith(str(dtype))
        assert {parameter.dtype for parameter in model.parameters()} == {model.dtype}


@pytest.mark.parametrize("value", [float("nan"), 3.3e38])
def test_a_weight_that_does_not_fit_is_widened(value, saved):
    folder = saved()
    name = "model.layers.0.mlp.up_proj.weight"
    (shard,) = [path for path in folder.glob("*.safetensors") if name in load_file(path)]
    state = load_file(shard)
    state[name][0, 0] = value
    save_file(state, shard, metadata={"format": "pt"})
    model = load(folder)
    layer = model.model.layers[0].mlp.up_proj
    copies = Decoder(model, eos=()).target.copies
    assert is_narrow(model) and copies.by_layer[layer].exponent is None and copies.kind == "half"
    x = torch.randn(1, 9, layer.in_features)
    with torch.inference_mode(), copies.used():
        expected = load_wide(folder).model.layers[0].mlp.up_proj(x)
        torch.testing.assert_close(layer(x), expected, equal_nan=True)


def test_hf_measures_a_stock_model_loaded_once(monkeypatch):
    """Neither widened weights nor packed ones; left out where memory does not hold both."""
    loaded = models.load_model(EMBEDDED)
    hf = build_answerer(loaded, {"name": "hf", "drafter": None}, {}, "cold", "eager")
    with monkeypatch.context() as patched:
        patched.setattr(models.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
        with pytest.raises(UserError, match=r"^hf: toy as transformers loads it takes 0.0 GB more"):
            hf.answer(PROMPT, 20)
    decoder = Decoder(loaded.target, eos=loaded.eos, method="vanilla")
    expected = decoder.generate(PROMPT, max_new_tokens=20).ids
    monkeypatch.setattr(PackedLinear, "forward", lambda *_: pytest.fail("not a stock layer"))
    assert hf.answer(PROMPT, 20).tokens == expected
    assert loaded.stock is loaded.stock is not loaded.target.model


def test_a_checkpoint_larger_than_the_free_memory_is_refused_before_it_is_loaded(
    saved, monkeypatch
):
    """Twice as large if it cannot be kept, as Gemma."""
    folder = saved("gemma")
    monkeypatch.setattr(narrow_weights, "MARGIN", 0)
    needed = narrow_weights.needed_bytes(folder)
    memory = SimpleNamespace()
    monkeypatch.setattr(narrow_weights.psutil, "virtual_memory", lambda: memory)
    for memory.available in (1000, needed):
        with pytest.raises(UserError, match=r"^model \S+: takes 0.0 GB of memory on a CPU"):
            Decoder.from_pretrained(str(folder), device="cpu")
    memory.available = 2 * needed
    load(folder)


def test_a_checkpoint_of_several_types_is_widened_only_where_memory_holds_it(tmp_path, monkeypatch):
    model = toy_model("llama-grouped").to(torch.bfloat16)
    model.model.norm.float().weight.data += 1e-5  # no bfloat16 number
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(narrow_weights, "MARGIN", 0)
    memory = SimpleNamespace(available=narrow_weights.needed_bytes(tmp_path))
    monkeypatch.setattr(narrow_weights.psutil, "virtual_memory", lambda: memory)
    with pytest.raises(UserError, match="of memory on a CPU"):
        load(tmp_path)
    memory.available *= 2
    assert not is_narrow(load(tmp_path))
