"""EAGLE-3 against the public code's own trace, its tree by hand, layers, layouts, bad files.

eagle3_trace.jsonl: one line a turn of the sample bench (prompts and texts are those of official_trace.jsonl) and
setting, recorded from github.com/SafeAILab/EAGLE (commit cb7e084, transformers 4.53.1, torch 2.13, float32, one thread)
with the shipped head. The public code cannot read three states of four layers, so it ran on the shipped model with
three layers put in that change nothing, where its own rule finds the states that config.json names here. `drafts`:
step, tokens and parents of some drafts, root first. `total_token` counts the root, `depth` one level less than here.
"""

import json
import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from model.engine import Target, generate
from model.errors import UserError
from model.files import ROOT
from model.methods.eagle import ConfidenceTree, Eagle2, Eagle3, load_eagle3_head, load_head
from model.structures.heads import Head, layer_config
from tests.conftest import NARROW, SIZES, greedy, toy_model
from tests.model.methods.heads import check_refused, sums, write_eagle, write_eagle3, written
from tests.model.methods.public_traces import (
    SOME_OR_ALL,
    embedded,
    lines,
    paths_of,
    retaken,
    watched,
)

TRACE = lines("eagle3_trace.jsonl")


@SOME_OR_ALL
def test_every_step_and_draft_is_the_public_codes(execution, every):
    target, seen, steps = Target(embedded()), 0, 0
    for setting in ((60, 7, 10), (24, 5, 8)):
        nodes, depth, top_k = setting
        sizes = dict(depth=depth + 1, top_k=top_k, nodes=nodes - 1)
        drafter = Eagle3(target, eagle3_path=str(ROOT / "data/embedded/eagle3"), **sizes)
        drafts = watched(drafter)
        turns = [
            turn for turn in TRACE if (turn["total_token"], turn["depth"], turn["top_k"]) == setting
        ]
        for turn in turns[::every]:
            drafts.clear()
            out = retaken(drafter, target, turn, execution)
            assert [step.nodes for step in out.steps] == [1] + [nodes] * len(turn["accept_lengths"])
            steps += len(turn["accept_lengths"])
            for step, tokens, parents in turn.get("drafts", ()):
                draft = drafts[step]
                assert paths_of(draft.tokens.tolist(), draft.tree.parent_of) == paths_of(
                    tokens, parents
                ), step
                seen += 1
    assert seen >= 3 and (every > 1 or (seen, steps) == (60, 766))


IDS = "eagle_aux_hidden_state_layer_ids"
OF_LAYER = (
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
    "rope_theta",
)
QKV = tuple(f"midlayer.self_attn.{name}_proj" for name in "qkv")


def added(**lengths):
    """Put random norms into a head's tensors."""
    return lambda state: state.update(
        {f"{name}.weight": 1 + torch.rand(size) for name, size in lengths.items()}
    )


def biased(*layers):
    return lambda state: state.update(
        {f"{name}.bias": torch.randn(len(state[f"{name}.weight"])) for name in layers}
    )


def called(old, new):
    """Call a part of the tensors' names otherwise."""

    def change(state):
        for name in [name for name in state if old in name]:
            state[name.replace(old, new, 1)] = state.pop(name)

    return change


def nested(folder, name, keys):
    """Move keys of a head's config.json into a configuration of their own there."""
    file = Path(folder, "config.json")
    values = json.loads(file.read_text())
    inner = {key: values.pop(key) for key in keys if key in values}
    file.write_text(json.dumps(values | {name: values.get(name, {}) | inner}))


def check_sums(drafter, state, values, embedding):
    """Compare outputs at 6 positions, and their logits, with those of a file's tensors by the specification."""
    state = {name.removeprefix("model."): tensor for name, tensor in state.items()}
    tokens, width = torch.arange(6) * 9 + 3, 32 * len(drafter.head.reads)
    hidden = torch.randn(6, width, generator=torch.Generator().manual_seed(9))
    out, last = sums(values, state, state.get("embed_tokens.weight", embedding), hidden, tokens)
    with torch.no_grad():
        ours = drafter.head(
            drafter.head.features(hidden)[None], tokens[None], drafter.head.angles(6)
        )[0]
        torch.testing.assert_close(ours, out, rtol=1e-4, atol=1e-4)
        if "lm_head.weight" in state:
            logits = last @ state["lm_head.weight"].T + state.get("lm_head.bias", 0.0)
            torch.testing.assert_close(drafter.lm_head(ours), logits, rtol=1e-3, atol=1e-3)


class Table(Head):
    """What it puts out after a token is that token's row; notes positions, and which drafted nodes each sees."""

    def __init__(self, model, rows):
        super().__init__(
            layer_config(model.config.to_dict() | {"num_hidden_layers": 1}), torch.eye(rows)
        )
        self.weight, self.asked = nn.Parameter(torch.zeros(1)), []

    def forward(self, features, tokens, angles, mask=None, cache=None):
        seen = None if mask is None else (mask[0, 0, :, 4:] == 0).sum(-1).tolist()
        self.asked.append(
            (tokens[0].tolist(), round(float(torch.acos(angles[0][0, -1, 0])), 3), seen)
        )
        return self.embed(tokens)


# Row: a token, column: the probability of the next one
PROBABILITIES = """.02 .50 .30 .10 .05 .03   .02 .03 .60 .25 .06 .04   .40 .03 .02 .45 .06 .04
                   .05 .15 .05 .05 .60 .10   .70 .10 .06 .05 .04 .05   .1 .2 .3 .15 .15 .1"""
PUBLIC = [  # top_k, depth and nodes as there; tokens, parents
    ((2, 2, 6), [0, 1, 2, 2, 3, 3], [-1, 0, 0, 1, 2, 3]),
    ((2, 2, 11), [0, 1, 2, 2, 3, 3, 0, 3, 0, 4, 1], [-1, 0, 0, 1, 1, 2, 2, 3, 3, 5, 5]),
    ((3, 2, 8), [0, 1, 2, 2, 3, 3, 0, 3], [-1, 0, 0, 1, 1, 2, 2, 3]),
    ((1, 3, 5), [0, 1, 2, 3, 4], [-1, 0, 1, 2, 3]),
]


@pytest.mark.parametrize("sizes, tokens, parents", PUBLIC)
def test_the_tree_of_a_table_is_the_public_codes(sizes, tokens, parents):
    """Printed by the public code, with this table in place of its network."""
    model = toy_model("llama")
    lm_head = nn.Linear(6, 6, bias=False).requires_grad_(False)
    lm_head.weight.copy_(
        torch.tensor([float(number) for number in PROBABILITIES.split()]).view(6, 6).log().T
    )
    head, (top_k, depth, nodes) = Table(model, 6), sizes
    settings = dict(depth=depth + 1, top_k=top_k, nodes=nodes - 1)
    drafter = ConfidenceTree(Target(model), head, lm_head, torch.arange(6), **settings)
    session = drafter.session()
    session.begin([5, 5, 5, 5])
    session.observe_prompt_hidden([5, 5, 5, 5, 0], torch.zeros(5, 32))
    with torch.inference_mode():
        draft = session.draft(0)
    assert paths_of(draft.tokens.tolist(), draft.tree.parent_of) == paths_of(tokens, parents)
    # the second beam is 2 below 1, 3 below 2, 3 below 1; positions 3, 4 and 5
    if sizes == (
        3,
        2,
        8,
    ):
        assert head.asked[0][1:] == (3.0, None) and [asked[2] for asked in head.asked[1:]] == [
            [1] * 3,
            [2] * 3,
        ]
        assert head.asked[2][:2] == (
            [2, 3, 3],
            round(float(torch.acos(torch.tensor(5.0).cos())), 3),
        )
    session.close()


def test_official_layers_and_those_that_a_target_does_not_have(tmp_path):
    """Three states need 3 or at least 7 layers by the public code's rule, which takes the same state once."""
    folder = write_eagle3(tmp_path, toy_model("llama"), outputs=())
    for layers, reads in {
        3: (0, 1, 2),
        7: (2, 3, 4),
        8: (2, 4, 5),
        32: (2, 16, 29),
        40: (2, 20, 37),
    }.items():
        assert load_eagle3_head(folder, target_of_layers(layers)).reads == reads
    for layers, states in {
        2: r"\[2, 1, -1\]",
        4: r"\[2, 2, 1\]",
        5: r"\[2, 2, 2\]",
        6: r"\[2, 3, 3\]",
    }.items():
        with pytest.raises(
            UserError,
            match=rf"hidden states {states} \(the public code's\).* the {layers} of LlamaForCausalLM",
        ):
            load_eagle3_head(folder, target_of_layers(layers))
    own = write_eagle3(tmp_path / "own", toy_model("llama"), outputs=(0, 1, 3))
    assert load_eagle3_head(own, target_of_layers(5)).reads == (1, 2, 4)
    with pytest.raises(
        UserError, match=r"outputs are read, \[0, 1, 3\].* the 4 of .*method.layers="
    ):
        load_eagle3_head(own, target_of_layers(4))
    unlisted = target_of_layers(7)
    unlisted.model.config.num_hidden_layers = 8
    with pytest.raises(UserError, match="does not list its 8 layers"):
        load_eagle3_head(folder, unlisted)


def test_the_layer_of_one_pair_worked_out_from_the_file(tmp_path):
    """Attention to itself alone is its value, so that no angle matters; an epsilon that every norm shows."""
    model, eps = toy_model("llama"), 0.5
    folder = write_eagle3(tmp_path, model, rms_norm_eps=eps)
    head = load_eagle3_head(folder, Target(model))
    w = {
        name.removeprefix("midlayer."): tensor
        for name, tensor in load_file(f"{folder}/model.safetensors").items()
    }

    def norm(x, name):
        return x / ((x * x).mean() + eps).sqrt() * w[f"{name}.weight"]

    states, token = torch.randn(64), 7
    h = w["fc.weight"] @ states
    x = torch.cat(
        (
            norm(model.get_input_embeddings().weight[token], "input_layernorm"),
            norm(h, "hidden_norm"),
        )
    )
    value = (w["self_attn.v_proj.weight"] @ x).view(2, 8).repeat_interleave(2, 0).flatten()
    h = h + w["self_attn.o_proj.weight"] @ value
    x = norm(h, "post_attention_layernorm")
    h = h + w["mlp.down_proj.weight"] @ (
        F.silu(w["mlp.gate_proj.weight"] @ x) * (w["mlp.up_proj.weight"] @ x)
    )
    with torch.no_grad():
        out = head(head.features(states)[None, None], torch.tensor([[token]]), head.angles(1))[0, 0]
        torch.testing.assert_close(out, h)
        torch.testing.assert_close(
            head.lm_head(head.norm(out)), w["lm_head.weight"] @ norm(h, "norm")
        )


def target_of_layers(count):
    return Target(
        LlamaForCausalLM(LlamaConfig(**SIZES | NARROW | dict(num_hidden_layers=count))).eval()
    )


@pytest.mark.parametrize(
    "how", [dict(rows=61), dict(hidden=16), dict(pickled=True), dict(hidden=16, rows=7)]
)
def test_layouts_of_heads_draft(tmp_path, how):
    """A draft vocabulary that is the target's, a head of another width with its own embedding, a torch file."""
    model = toy_model("llama")
    target = Target(model)
    drafter = Eagle3(target, eagle3_path=write_eagle3(tmp_path, model, **how), top_k=3, nodes=9)
    drafts = watched(drafter)
    assert generate(target, drafter, [5, 6, 7], max_new_tokens=20).tokens == greedy(
        model, [5, 6, 7], 20
    )
    known = set(range(61)) if drafter.ids is None else set(drafter.ids.tolist())
    assert (drafter.ids is None) == (how.get("rows") == 61) and known <= set(range(61))
    assert all(
        set(draft.tokens[1:].tolist()) <= known and len(draft.tree) == 10 for draft in drafts[1:]
    )


LOADED = {  # what the file is like; each changes the sums, or takes other names for the same
    "plain": {},
    "norm_before_residual": dict(norm_before_residual=True),
    "norm_output": dict(norm_output=True),
    "one norm before fc": dict(
        eagle_config={IDS: [-1, 0], "norm_before_fc": True}, change=added(input_norm=64)
    ),
    "a norm for each": dict(fc_norm=True, change=added(**{"fc_norm.0": 32, "fc_norm.1": 32})),
    "all norms": dict(
        norm_before_residual=True,
        norm_output=True,
        norm_before_fc=True,
        change=added(input_norm=64),
    ),
    "biases": dict(change=biased(*QKV)),
    "qkv_bias": dict(change=biased(*QKV), qkv_bias=True, attention_bias=False, rope_theta=30),
    "attention_bias": dict(change=biased(*QKV, "midlayer.self_attn.o_proj"), attention_bias=True),
    "mlp_bias": dict(
        change=biased(*(f"midlayer.mlp.{name}_proj" for name in ("gate", "up", "down"))),
        mlp_bias=True,
    ),
    "bias": dict(change=biased("fc"), bias=True),
    "layers.0": dict(change=called("midlayer.", "layers.0.")),
    "model.layers.0": dict(change=called("midlayer.", "model.layers.0.")),
    "hidden_act": dict(hidden_act="gelu", rms_norm_eps=0.3),
    "linear rope": dict(rope_scaling={"type": "linear", "factor": 4.0}, rope_theta=30.0),
    "rope_parameters": dict(
        rope_parameters={"rope_type": "default", "rope_theta": 30.0}, rope_theta=None
    ),
    "mrope": dict(rope_scaling={"type": "mrope", "mrope_section": [1, 1, 2]}, rope_theta=30.0),
    "nulls": dict(
        attention_bias=None,
        mlp_bias=None,
        rope_scaling=None,
        sliding_window=None,
        fc_norm=None,
        no_rope_layers=[],
    ),
    "unused window": dict(
        sliding_window=512, use_sliding_window=False, max_window_layers=28, model_type="phi3"
    ),
    "full attention": dict(
        layer_types=["full_attention"], logit_scale=1.0, partial_rotary_factor=1.0
    ),
    "harmless": dict(
        torch_dtype="bfloat16", transformers_version="4.51.0", pretraining_tp=1, training_steps=7
    ),
    "written by transformers 4.48": dict(_attn_implementation_autoset=True),
}


@pytest.mark.parametrize("how", LOADED.values(), ids=LOADED)
@pytest.mark.parametrize("inside", [None, "transformer_layer_config"])
def test_what_a_file_asks_for_is_computed(tmp_path, how, inside):
    """As in vLLM, SGLang, speculators and SpecForge; tensors and outputs by a specification of our own."""
    model = toy_model("llama")
    folder = write_eagle3(tmp_path, model, **how)
    values = json.loads(Path(folder, "config.json").read_text())
    values = {
        key: value
        for key, value in (values | values.pop("eagle_config")).items()
        if value is not None
    }
    if inside:
        nested(
            folder,
            inside,
            [*OF_LAYER, "num_hidden_layers", "rms_norm_eps", "rope_scaling", "model_type"],
        )
    target = Target(model)
    check_sums(
        Eagle3(target, eagle3_path=folder),
        load_file(f"{folder}/model.safetensors"),
        values,
        model.get_input_embeddings().weight.detach(),
    )


@pytest.mark.parametrize("tied", [False, True])
def test_a_whole_vocabulary_without_a_matrix_of_its_own_takes_the_targets(tmp_path, tied):
    model = toy_model("llama")
    if tied:
        model.config.tie_word_embeddings = True
        model.lm_head.weight = model.model.embed_tokens.weight
    how = dict(rows=61, change=lambda state: state.pop("lm_head.weight"), draft_vocab_size=None)
    folder, target = (
        write_eagle3(tmp_path / "a", model, **how, tie_word_embeddings=tied),
        Target(model),
    )
    drafter = Eagle3(target, eagle3_path=folder, top_k=3, nodes=9)
    x = torch.randn(5, 32)
    with torch.no_grad():
        torch.testing.assert_close(drafter.lm_head(x), model.lm_head(drafter.head.norm(x)))
    assert generate(target, drafter, [5, 6, 7], max_new_tokens=9).tokens == greedy(
        model, [5, 6, 7], 9
    )
    for number, more in enumerate(
        [dict(rows=40), dict(hidden=16), *([] if tied else [dict(tie_word_embeddings=True)])]
    ):
        wrong = how | dict(draft_vocab_size=more.get("rows", 61)) | more
        with pytest.raises(UserError, match="lm_head.weight is missing and should be"):
            load_eagle3_head(write_eagle3(tmp_path / str(number), model, **wrong), target)


COUNTED = [  # config.json, method.layers, the hidden states read of eight layers
    ({}, None, (2, 4, 5)),
    ({"eagle_config": {IDS: [1, 3, 4]}}, None, (2, 4, 5)),
    ({"eagle_config": {IDS: [4, 1, 3]}}, None, (2, 4, 5)),
    ({"eagle_config": {"aux_hidden_state_layer_ids": [1, 3, 4]}}, None, (2, 4, 5)),
    ({IDS: [2, 4, 5]}, None, (2, 4, 5)),
    ({"aux_hidden_state_layer_ids": [0, 1, 7]}, None, (0, 1, 7)),
    ({"transformer_layer_config": {}, IDS: [1, 3, 4]}, None, (1, 3, 4)),
    ({"eagle_config": {IDS: []}, IDS: None}, None, (2, 4, 5)),
    ({"eagle_config": {IDS: [2, 4, 5]}}, [2, 4, 5], (2, 4, 5)),
    ({IDS: [1, 3, 4]}, [5, 2, 4], (2, 4, 5)),
    ({"eagle_config": {IDS: [1, 3, 4]}, IDS: [2, 4, 5]}, None, "layer_ids is"),
    ({"eagle_config": {IDS: [2, 5, 7]}}, None, r"outputs are read, \[2, 5, 7\].* the 8 of"),
    ({IDS: [2, 5, 8]}, None, r"hidden states \[2, 5, 8\].* the 8 of"),
    ({"eagle_config": {"layer_ids": [2, 5, 6]}}, None, "layer_ids=.* changes a head's sums"),
    ({}, [2, 4, 8], r"method.layers\).* the 8 of"),
    ({}, [2, 4, 4], "must differ"),
    ({}, [], "must differ"),
]


@pytest.mark.parametrize("config, layers, reads", COUNTED)
def test_hidden_states_are_counted_as_their_writers_do_unless_they_are_set(
    tmp_path, config, layers, reads
):
    target = target_of_layers(8)
    folder = write_eagle3(tmp_path, toy_model("llama"), outputs=(), **config)
    if isinstance(reads, str):
        with pytest.raises(UserError, match=reads):
            Eagle3(target, eagle3_path=folder, layers=layers)
        return
    drafter = Eagle3(target, eagle3_path=folder, layers=layers)
    assert drafter.needs.hidden == reads and drafter.describe()["hidden_states"].startswith(
        f"{reads} ("
    )
    assert ("method.layers" in drafter.describe()["hidden_states"]) == (layers is not None)


BROKEN = [
    (dict(change=lambda state: state.pop("d2t")), r"d2t is missing, should be \[40\]"),
    (
        dict(change=lambda state: state.update(d2t=state["d2t"][:-1])),
        r"d2t is \[39\] of torch.int64, should be \[40\]",
    ),
    (
        dict(change=lambda state: state.update(d2t=state["d2t"] + 22)),
        "d2t leads to ids outside the vocabulary of 61",
    ),
    (
        dict(change=lambda state: state.update(d2t=state["d2t"] - 1)),
        "d2t leads to ids outside the vocabulary of 61",
    ),
    (
        dict(change=lambda state: state.update(d2t=state["d2t"].float())),
        r"d2t is \[40\] of torch.float32, should be",
    ),
    (
        dict(change=lambda state: state["d2t"][1].add_(1)),
        "d2t leads to other ids than those that t2d marks",
    ),
    (
        dict(draft_vocab_size="40"),
        "config.json: draft_vocab_size='40' must be from 1 to 61, a whole number",
    ),
    (dict(draft_vocab_size=None), r"d2t is \[40\] of torch.int64, should be \[61\]"),
    (dict(eagle_config={IDS: 5}), "outputs are read, 5.*method.layers="),
    (dict(draft_vocab_size=39), r"d2t is \[40\] of torch.int64, should be \[39\]"),
    (
        dict(hidden=16, change=lambda state: state.pop("embed_tokens.weight")),
        r"has no embed_tokens.weight, and the target's is \[61, 32\] and should",
    ),
    (
        dict(change=lambda state: state.pop("midlayer.hidden_norm.weight")),
        "midlayer.hidden_norm.weight is missing",
    ),
    (dict(outputs=(0, 0)), r"outputs are read, \[0, 0\]"),
    (dict(target_hidden_size=48), "target_hidden_size of 48, .* has 32"),
    (dict(num_hidden_layers=2), "num_hidden_layers=2"),
    (dict(use_aux_hidden_state=False), "use_aux_hidden_state=False changes"),
    (
        dict(rope_scaling={"rope_type": "default", "factor": 3.0}),
        r"rope_type=default with \['factor'\]",
    ),
    (dict(rope_interleaved=True), "rope_interleaved=True changes"),
    (dict(truncated_vocab_size=40), "truncated_vocab_size of 40, .* has 61"),
    (
        dict(speculators_model_type="peagle"),
        "speculators_model_type=peagle changes .*those of eagle3 are supported",
    ),
    (dict(norm_before_fc=True), r"fc_norm.0.weight is missing and should be \[64\]"),
    (
        dict(change=added(input_norm=64)),
        r"fc_norm.0.weight is \[64\] and has no place in such a head",
    ),
    (
        dict(attention_bias=True),
        "attention_bias=True in config.json, and midlayer.self_attn.q_proj.bias in the file: False",
    ),
    (
        dict(attention_bias=False, change=biased(*QKV)),
        "attention_bias=False in config.json, and midlayer.*: True",
    ),
    (dict(norm_output=True, eagle_config={"norm_output": False}), "norm_output is True and False"),
    (
        dict(change=lambda s: s.update({"layers.0.mlp.up_proj.weight": torch.zeros(1)})),
        "layers.0.mlp.* has no place",
    ),
]


def test_bad_heads_are_refused_in_one_line(tmp_path):
    """What all heads share is refused as in test_medusa."""
    model = toy_model("llama")
    target = Target(model)
    check_refused(
        BROKEN,
        tmp_path,
        lambda folder, how: load_eagle3_head(write_eagle3(folder, model, **how), target),
    )
    with pytest.raises(UserError, match="no draft_vocab_size.*method=eagle2"):
        load_eagle3_head(write_eagle(tmp_path / "eagle", model), target)
    with pytest.raises(UserError, match="has a draft_vocab_size.*method=eagle3"):
        load_head(write_eagle3(tmp_path / "eagle3", model), target)


def with_biases(*layers):
    def change(state):
        for name in [name for name in state if name.removesuffix(".weight").endswith(layers)]:
            state[name.replace(".weight", ".bias")] = torch.randn(len(state[name])) * 0.3

    return change


QKVO, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
ANY = [  # of one group one at a time: keys, what becomes of the tensors, what a refusal must name (None: it is loaded)
    (
        "",
        {
            "training_steps": 3,
            "base_model_name_or_path": "x",
            "speculators_config": {"algorithm": "a"},
        },
        None,
        None,
    ),
    (
        "",
        {
            "torch_dtype": "float16",
            "use_cache": True,
            "attention_dropout": 0.1,
            "pretraining_tp": 1,
        },
        None,
        None,
    ),
    ("", {"logit_scale": 1, "is_causal": True, "mlp_bias": None, "head_dim": None}, None, None),
    ("window", {"sliding_window": 9, "use_sliding_window": False}, None, None),
    ("window", {"sliding_window": 9}, None, "sliding_window=9"),
    ("window", {"layer_types": ["sliding_attention"]}, None, "layer_types="),
    ("eps", {"rms_norm_eps": 0.2}, None, None),
    ("act", {"hidden_act": "gelu"}, None, None),
    ("act", {"hidden_act": "relu"}, None, None),
    ("act", {"hidden_act": "none"}, None, "no LLaMA layer"),
    ("theta", {"rope_theta": 70.0}, None, None),
    ("rope", {"rope_scaling": {"type": "linear", "factor": 3.0}}, None, None),
    ("rope", {"rope_scaling": {"rope_type": "dynamic", "factor": 3.0}}, None, "rope_type=dynamic"),
    ("rope", {"rope_scaling": {"rope_type": "default", "factor": 3.0}}, None, "factor"),
    (
        "rope",
        {"rope_scaling": {"rope_type": "llama3", "factor": 3.0}},
        None,
        "no LLaMA layer.*low_freq_factor",
    ),
    (
        "rope",
        {"rope_parameters": {"partial_rotary_factor": 0.5}},
        None,
        "partial_rotary_factor=0.5",
    ),
    ("heads", {"num_attention_heads": "4"}, None, "no LLaMA layer"),
    ("heads", {"num_key_value_heads": 3}, None, "no LLaMA layer"),
    ("heads", {"num_hidden_layers": 2}, None, "num_hidden_layers=2"),
    ("vocab", {"vocab_size": 60}, None, "vocab_size of 60"),
    ("type", {"model_type": "gemma3"}, None, "model_type=gemma3"),
    ("quant", {"quantization_config": {"bits": 4}}, None, "quantization_config="),
    ("scale", {"final_logit_softcapping": 3.0}, None, "final_logit_softcapping=3.0"),
    ("scale", {"residual_multiplier": 0.5}, None, "residual_multiplier=0.5"),
    ("bias", {"qkv_bias": True}, None, "qkv_bias=True"),
    ("bias", {"attention_bias": False}, with_biases("v_proj"), "attention_bias=False"),
    ("bias", {"qkv_bias": True}, with_biases(*QKVO[:3]), None),
    ("bias", {"attention_bias": True}, with_biases(*QKVO), None),
    ("bias", {}, with_biases(*QKVO), None),
    ("mlp", {"mlp_bias": True}, with_biases(*MLP), None),
    ("mlp", {"mlp_bias": True}, with_biases("gate_proj", "up_proj"), "mlp_bias=True"),
    (
        "lost",
        {},
        lambda state: state.pop(next(name for name in state if "o_proj.w" in name)),
        "o_proj.weight is miss",
    ),
    (
        "extra",
        {},
        lambda state: state.update({"extra.weight": torch.ones(3)}),
        "extra.weight is .* has no place",
    ),
    (
        "fc",
        {},
        lambda state: state.update({"fc.weight": torch.ones(3, 3)}),
        "fc.weight is .* and should be",
    ),
]
OF_KIND = {
    "eagle": [
        ("norm", {key: True}, None, f"{key}=True")
        for key in ("norm_output", "fc_norm", "layernorms")
    ],
    "eagle3": [
        ("fed", {"norm_before_residual": True}, None, None),
        ("out", {"norm_output": True}, None, None),
        ("fc", {"norm_before_fc": True}, added(input_norm=64), None),
        ("fc", {"norm_before_fc": True}, None, "fc_norm.0.weight is missing"),
        ("fc", {"fc_norm": True}, added(**{"fc_norm.0": 32, "fc_norm.1": 32}), None),
        (
            "fc",
            {},
            added(**{"fc_norm.0": 32, "fc_norm.1": 32}),
            "fc_norm.0.weight is .* has no place",
        ),
        ("aux", {"use_aux_hidden_state": False}, None, "use_aux_hidden_state=False"),
        ("aux", {"use_mtp_layernorm": True}, None, "use_mtp_layernorm=True"),
        ("head", {}, lambda state: state.pop("lm_head.weight"), "lm_head.weight is missing"),
        ("head", {}, with_biases("lm_head"), None),
    ],
}
NAMES = {
    "eagle": {"fc.": "fusion_fc.", "layers.0.": "transformer."},
    "eagle3": {"midlayer.": "layers.0."},
}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("kind", OF_KIND)
def test_a_head_of_random_keys_nesting_names_and_tensors_is_right_or_refused_by_name(
    tmp_path, kind, seed
):
    rng, model, loaded = random.Random(f"{kind} {seed}"), toy_model("llama"), 0
    target, embedding = Target(model), model.get_input_embeddings().weight.detach()
    write, make = (write_eagle, Eagle2) if kind == "eagle" else (write_eagle3, Eagle3)
    for number in range(300):
        folder = Path(write(tmp_path / str(number), model))
        config, state = (
            json.loads((folder / "config.json").read_text()),
            load_file(folder / "model.safetensors"),
        )
        chosen = {
            group: rest for group, *rest in rng.sample(ANY + OF_KIND[kind], rng.randint(1, 4))
        }
        for more, change, _ in chosen.values():
            config |= more
            if change is not None:
                change(state)
        reasons = [says for _, _, says in chosen.values() if says is not None]
        values = {key: value for key, value in config.items() if value is not None}
        public = dict(state)
        for old, new in NAMES[kind].items():
            if rng.random() < 0.4:
                called(old, new)(state)
        if rng.random() < 0.3:
            state = {f"model.{name}": tensor for name, tensor in state.items()}
        written(folder, state, config, False)
        inside = rng.choice(("transformer_layer_config", "eagle_config", "model", "anything"))
        nested(
            folder, inside, [key for key in config if key != "eagle_config" and rng.random() < 0.3]
        )
        path = {"head_path" if kind == "eagle" else "eagle3_path": str(folder)}
        if reasons:
            with pytest.raises(UserError, match="|".join(reasons)) as caught:
                make(target, **path, top_k=2, nodes=3)
            assert "\n" not in str(caught.value)
        else:
            check_sums(make(target, **path, top_k=2, nodes=3), public, values, embedding)
            loaded += 1
    assert 30 < loaded < 270
