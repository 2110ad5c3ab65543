"""Learned heads: static trees worked out from the file, what a file asks for, bad files."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from model.engine import Target, generate
from model.errors import UserError
from model.methods import make_method
from model.methods.trained.eagle import Eagle2, Eagle3
from model.methods.trained.medusa import Medusa
from tests.conftest import NARROW, SIZES, greedy, toy_model
from tests.model.methods.heads import (
    IDS,
    LOADERS,
    WRITERS,
    added,
    biased,
    called,
    sums,
    without,
    write_eagle3,
    write_medusa,
)
from tests.model.methods.public_traces import watched

PROMPT = [5, 9, 33, 12, 7]
QKV = ("q_proj", "k_proj", "v_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def weights(folder):
    (file,) = Path(folder).glob("*.safetensors")
    return load_file(file)


@torch.no_grad()
def states(model, text):
    return model.get_decoder()(torch.tensor([text])).last_hidden_state[0]


def eagle_logits(model, folder, text, chain):
    """The head's logits after a chain of drafted tokens; of the text, the root is the last token."""
    values = json.loads(Path(folder, "config.json").read_text())
    state = weights(folder)
    own = model.get_input_embeddings().weight.detach()
    embedding = state.pop("embed_tokens.weight", own)
    features = states(model, text[:-1])
    tokens = torch.tensor(text[1:] + chain)
    while True:
        out, _ = sums(values, state, embedding, features, tokens[: len(features)])
        if len(features) == len(tokens):
            return model.get_output_embeddings()(out[-1]).detach()
        features = torch.cat((features, out[-1:]))


def medusa_logits(model, folder, text, chain):
    """Of heads that share the model's own projection."""
    state = weights(folder)
    i = len(chain)
    x = states(model, text[:-1])[-1]
    for j in range(2):
        x = x + F.silu(state[f"{i}.{j}.linear.weight"] @ x + state[f"{i}.{j}.linear.bias"])
    return model.lm_head.weight.detach() @ x


STATIC = [
    ("medusa", medusa_logits, "llama", dict(layers=2, shared=True)),
    ("eagle", eagle_logits, "llama-grouped", {}),
]
PATHS = {"medusa": "heads_path", "eagle": "head_path"}
LEVELS = {"medusa": [1, 10, 28, 23, 2], "eagle": [1, 4, 8, 8, 3, 2]}  # of the published lists


@pytest.mark.parametrize("kind, logits_after, architecture, how", STATIC)
def test_each_node_of_a_static_tree_is_the_heads_choice_after_its_path(
    tmp_path, kind, logits_after, architecture, how
):
    """Hydra's are those of the public code's trace."""
    model = toy_model(architecture)
    folder = WRITERS[kind](tmp_path, model, **how)
    target = Target(model)
    drafter = make_method(kind, target, **{PATHS[kind]: folder})
    drafts = watched(drafter)
    out = generate(target, drafter, PROMPT, max_new_tokens=7)
    end = len(PROMPT) + 1
    for draft, step in zip(drafts, out.steps[1:], strict=True):
        text = (PROMPT + out.tokens)[:end]
        tokens = draft.tokens.tolist()
        assert tokens[0] == text[-1]
        assert [b - a for a, b in draft.tree.levels] == LEVELS[kind]
        ranked = {}
        for chain, path in zip(draft.tree.chain_of, draft.tree.rank_paths, strict=True):
            if not path:
                continue
            above = chain[-2]
            if above not in ranked:
                logits = logits_after(model, folder, text, [tokens[i] for i in chain[1:-1]])
                ranked[above] = logits.sort(descending=True).indices
            assert tokens[chain[-1]] == ranked[above][path[-1]]
        end += step.accepted


def test_a_tree_of_ones_own_and_fewer_heads(tmp_path):
    """The published tree is cut to as many heads as there are."""
    model = toy_model("llama")
    target = Target(model)
    two = write_medusa(tmp_path, model, heads=2)
    assert Medusa(target, heads_path=two).tree.max_depth == 2
    own = tmp_path / "tree.yaml"
    own.write_text("[[0], [1], [0, 1], [0, 1, 0]]")
    with pytest.raises(UserError, match=r"3 deep.*there are 2 heads"):
        Medusa(target, heads_path=two, tree_path=str(own))


@pytest.mark.parametrize("kind", WRITERS)
def test_both_layouts_are_read_alike(tmp_path, kind):
    """An embedding equal to the target's is not stored twice."""
    model = toy_model("llama-grouped")
    target = Target(model)
    own = model.get_input_embeddings().weight
    public = {  # how public files differ; their numbers of heads and blocks may be wrong
        "medusa": dict(medusa_num_heads=2),
        "hydra": dict(hydra_num_layers=1),
        "eagle": dict(change=lambda state: state.update({"embed_tokens.weight": own.clone()})),
        "eagle3": {},
    }
    ours = LOADERS[kind](WRITERS[kind](tmp_path / "ours", model), target)
    folder = WRITERS[kind](tmp_path / "public", model, pickled=True, **public[kind])
    theirs = LOADERS[kind](folder, target)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, theirs.state_dict()[name])
    if kind != "medusa":
        assert theirs.embedding.data_ptr() == own.data_ptr()


def nested(folder, name, keys):
    """Move keys of a head's config.json into a configuration of their own there."""
    file = Path(folder, "config.json")
    values = json.loads(file.read_text())
    inner = {key: values.pop(key) for key in keys if key in values}
    file.write_text(json.dumps(values | {name: inner}))


def layers(where, *names):
    return [f"{where}.{'mlp' if name in MLP else 'self_attn'}.{name}" for name in names]


MIDDLE = layers("midlayer", *QKV)
LOADED = {  # what the file is like: each changes the sums, or takes other names for the same
    "eagle": {
        "plain": {},
        "no bias": dict(change=without("fc.bias")),
        "Qwen2's biases": dict(change=biased(*layers("layers.0", *QKV)), qkv_bias=True),
    },
    "eagle3": {
        "the target's matrix": dict(
            rows=61, change=without("lm_head.weight"), draft_vocab_size=None
        ),
        "norm_before_residual": dict(norm_before_residual=True),
        "norm_output": dict(norm_output=True),
        "one norm before fc": dict(norm_before_fc=True, change=added(input_norm=64)),
        "a norm for each": dict(fc_norm=True, change=added(**{"fc_norm.0": 32, "fc_norm.1": 32})),
        "qkv_bias": dict(change=biased(*MIDDLE), qkv_bias=True, attention_bias=False),
        "mlp_bias": dict(change=biased(*layers("midlayer", *MLP)), mlp_bias=True),
        "model.layers.0": dict(change=called("midlayer.", "model.layers.0.")),
        "hidden_act": dict(hidden_act="gelu", rms_norm_eps=0.3),
        "linear rope": dict(rope_scaling={"type": "linear", "factor": 4.0}, rope_theta=30.0),
        "rope_parameters": dict(rope_parameters={"rope_theta": 30.0}, rope_theta=None),
        "mrope": dict(rope_scaling={"type": "mrope", "mrope_section": [1, 1, 2]}),
        "unused": dict(sliding_window=512, use_sliding_window=False, logit_scale=1.0, fc_norm=None),
    },
}


@pytest.mark.parametrize("inside", [None, "transformer_layer_config"])
@pytest.mark.parametrize("kind", LOADED)
def test_what_a_file_asks_for_is_computed(tmp_path, kind, inside):
    """As in vLLM, SGLang, speculators and SpecForge; by a specification of our own."""
    model = toy_model("llama")
    target = Target(model)
    tokens = torch.arange(6) * 9 + 3
    for name, how in LOADED[kind].items():
        folder = WRITERS[kind](tmp_path / name, model, **how)
        values = json.loads(Path(folder, "config.json").read_text())
        values = {key: value for key, value in values.items() if value is not None}
        if inside:
            nested(folder, inside, ["hidden_size", "rope_theta", "rms_norm_eps", "rope_scaling"])
        state = {}
        for given, tensor in weights(folder).items():
            state[given.removeprefix("model.")] = tensor

        made = Eagle2(target, head_path=folder) if kind == "eagle" else None
        drafter = made or Eagle3(target, eagle3_path=folder)
        head = drafter.head
        hidden = torch.randn(6, 32 * len(head.reads))
        embedding = model.get_input_embeddings().weight.detach()
        out, last = sums(values, state, embedding, hidden, tokens)
        with torch.no_grad():
            ours = head(head.features(hidden)[None], tokens[None], head.angles(6))[0]
            torch.testing.assert_close(ours, out, rtol=1e-4, atol=1e-4, msg=name)
            if kind == "eagle3":
                matrix = state.get("lm_head.weight", model.lm_head.weight)
                torch.testing.assert_close(
                    drafter.lm_head(ours), last @ matrix.T, rtol=1e-3, atol=1e-3
                )


def test_an_eagle3_head_of_another_width_and_a_small_draft_vocabulary(tmp_path):
    model = toy_model("llama")
    target = Target(model)
    folder = write_eagle3(tmp_path, model, hidden=16, rows=7)
    drafter = Eagle3(target, eagle3_path=folder, top_k=3, nodes=9)
    drafts = watched(drafter)
    out = generate(target, drafter, PROMPT, max_new_tokens=20)
    assert out.tokens == greedy(model, PROMPT, 20)
    for draft in drafts:
        assert set(draft.tokens[1:].tolist()) <= {0, 10, 20, 30, 40, 50, 60}


class Malicious:
    def __reduce__(self):
        return (print, ("this code must never run",))


BROKEN = [  # kind, how its folder differs from a good one, what the message says
    ("medusa", dict(change=without("1.0.linear.bias")), "Missing.*1.0.linear.bias"),
    ("medusa", dict(change=lambda state: state.clear()), r"keys such as \[\] are not those"),
    ("medusa", dict(pickled=True, change=lambda state: state.update(a=Malicious())), "corrupt or"),
    ("medusa", dict(vocab_size=32000), "vocab_size of 32000.*has 61"),
    ("hydra", dict(hydra_head_arch="mlp"), "hydra_head_arch=mlp .* prefix-mlp are supported"),
    ("eagle", dict(hidden_size=48), "hidden_size of 48, .* has 32"),
    (
        "eagle",
        dict(change=lambda s: s.update(other=s["fc.bias"].clone())),
        "Unexpected.*other",
    ),
    ("eagle", dict(model_type="gemma3_text"), "model_type=gemma3_text"),
    ("eagle", dict(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "rope_type=dynamic"),
    ("eagle", dict(draft_vocab_size=40), "draft_vocab_size.*method=eagle3"),
    ("eagle3", dict(change=without("midlayer.hidden_norm.weight")), "method=eagle2"),
    ("eagle3", dict(change=without("d2t")), r"d2t is missing and should be \[40\]"),
    ("eagle3", dict(hidden=16, change=without("embed_tokens.weight")), r"\[61, 32\] and should"),
    ("eagle3", dict(target_hidden_size=48), "target_hidden_size of 48, .* has 32"),
]


@pytest.mark.parametrize("kind", WRITERS)
def test_bad_heads_are_refused_in_one_line(tmp_path, kind, capsys):
    model = toy_model("llama")
    target = Target(model)
    for number, (_, how, says) in enumerate(row for row in BROKEN if row[0] == kind):
        folder = WRITERS[kind](tmp_path / str(number), model, **how)
        with pytest.raises(UserError, match=says) as refused:
            LOADERS[kind](folder, target)
        assert "\n" not in str(refused.value)
    assert "must never run" not in capsys.readouterr().out

    folder = Path(WRITERS[kind](tmp_path / "damaged", model))
    (file,) = folder.glob("*.safetensors")
    for says, damage in {
        "corrupt or cut short": lambda: file.write_bytes(file.read_bytes()[:-8]),
        "has no weights": file.unlink,
        "not a readable JSON object": lambda: (folder / "config.json").write_text("[1]"),
        "configs/companions names public ones": lambda: folder.rename(tmp_path / "elsewhere"),
    }.items():
        damage()
        with pytest.raises(UserError, match=says):
            LOADERS[kind](str(folder), target)


CHANGES = dict(  # sums, in a public loader or model, with no tensor that shows it
    layer_types=["sliding_attention"],
    is_causal=False,
    logit_scale=0.5,
    attn_logit_softcapping=30.0,
    use_qk_norm=True,
    partial_rotary_factor=0.5,
    quant_method="fp8",
    parallel_drafting=True,
    speculators_model_type="dflash",
    sliding_window=8,
)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_keys_that_change_sums_are_refused_by_name(tmp_path, kind):
    """Wherever they are nested."""
    model = toy_model("llama")
    target = Target(model)
    for key, value in CHANGES.items():
        for config in ({key: value}, {"unknown": {key: value}}):
            folder = WRITERS[kind](tmp_path, model, **config)
            with pytest.raises(UserError, match=f"{key}=.* changes a head's sums; those of .*"):
                LOADERS[kind](folder, target)


def target_of_layers(count):
    config = LlamaConfig(**SIZES | NARROW | dict(num_hidden_layers=count))
    return Target(LlamaForCausalLM(config).eval())


COUNTED = [  # layers, config.json, method.layers, the hidden states read; none: refused
    (3, {}, None, (0, 1, 2)),
    (32, {}, None, (2, 16, 29)),
    (4, {}, None, None),  # the same state twice
    (8, {"eagle_config": {IDS: [4, 1, 3]}}, None, (2, 4, 5)),
    (8, {IDS: [2, 4, 5]}, None, (2, 4, 5)),
    (8, {"transformer_layer_config": {}, IDS: [1, 3, 4]}, None, (1, 3, 4)),
    (8, {"eagle_config": {IDS: [2, 4, 5]}}, [2, 4, 5], (2, 4, 5)),
    (8, {}, [2, 4, 8], None),
]


@pytest.mark.parametrize("count, config, chosen, reads", COUNTED)
def test_hidden_states_are_counted_as_their_writers_do(tmp_path, count, config, chosen, reads):
    target = target_of_layers(count)
    folder = write_eagle3(tmp_path, toy_model("llama"), outputs=(), **config)
    if reads is None:
        with pytest.raises(UserError, match="hidden states"):
            Eagle3(target, eagle3_path=folder, layers=chosen)
        return
    drafter = Eagle3(target, eagle3_path=folder, layers=chosen)
    assert drafter.needs.hidden == reads
    assert drafter.describe()["hidden_states"] == str(reads)
