"""EAGLE-3 against the public code's own trace, its tree by hand, layers, layouts, bad files.

eagle3_trace.jsonl: one line a turn of the sample bench (prompts and texts are those of official_trace.jsonl) and
setting, recorded from github.com/SafeAILab/EAGLE (commit cb7e084, transformers 4.53.1, torch 2.13, float32, one thread)
with the shipped head. The public code cannot read three states of four layers, so it ran on the shipped model with
three layers put in that change nothing, where its own rule finds the states that config.json names here. `drafts`:
step, tokens and parents of some drafts, root first. `total_token` counts the root, `depth` one level less than here.
"""

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from model.engine import Target, generate
from model.errors import UserError
from model.files import ROOT
from model.methods.eagle import ConfidenceTree, Eagle3
from model.structures.heads import Head, head_config, load_eagle3_head, load_head
from tests.conftest import NARROW, SIZES, greedy, toy_model
from tests.model.methods.heads import check_refused, write_eagle, write_eagle3
from tests.model.methods.public_traces import SOME_OR_ALL, embedded, lines, paths_of, retaken, watched

TRACE = lines("eagle3_trace.jsonl")


@SOME_OR_ALL
def test_every_step_and_draft_is_the_public_codes(execution, every):
    target, seen, steps = Target(embedded()), 0, 0
    for setting in ((60, 7, 10), (24, 5, 8)):
        nodes, depth, top_k = setting
        sizes = dict(depth=depth + 1, top_k=top_k, nodes=nodes - 1)
        drafter = Eagle3(target, eagle3_path=str(ROOT / "data/embedded/eagle3"), **sizes)
        drafts = watched(drafter)
        turns = [turn for turn in TRACE if (turn["total_token"], turn["depth"], turn["top_k"]) == setting]
        for turn in turns[::every]:
            drafts.clear()
            out = retaken(drafter, target, turn, execution)
            assert [step.nodes for step in out.steps] == [1] + [nodes] * len(turn["accept_lengths"])
            steps += len(turn["accept_lengths"])
            for step, tokens, parents in turn.get("drafts", ()):
                draft = drafts[step]
                assert paths_of(draft.tokens.tolist(), draft.tree.parent_of) == paths_of(tokens, parents), step
                seen += 1
    assert seen >= 3 and (every > 1 or (seen, steps) == (60, 766))


class Table(Head):
    """What it puts out after a token is that token's row; notes positions, and which drafted nodes each sees."""

    def __init__(self, model, rows):
        super().__init__(head_config(model.config.to_dict() | {"num_hidden_layers": 1}), torch.eye(rows))
        self.weight, self.asked = nn.Parameter(torch.zeros(1)), []

    def _run(self, features, tokens, angles, mask, cache):
        seen = None if mask is None else (mask[0, 0, :, 4:] == 0).sum(-1).tolist()
        self.asked.append((tokens[0].tolist(), round(float(torch.acos(angles[0][0, -1, 0])), 3), seen))
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
    lm_head.weight.copy_(torch.tensor([float(number) for number in PROBABILITIES.split()]).view(6, 6).log().T)
    head, (top_k, depth, nodes) = Table(model, 6), sizes
    settings = dict(depth=depth + 1, top_k=top_k, nodes=nodes - 1)
    drafter = ConfidenceTree(Target(model), head, lm_head, torch.arange(6), **settings)
    session = drafter.session()
    session.begin([5, 5, 5, 5])
    session.observe_prompt_hidden([5, 5, 5, 5, 0], torch.zeros(5, 32))
    with torch.inference_mode():
        draft = session.draft(0)
    assert paths_of(draft.tokens.tolist(), draft.tree.parent_of) == paths_of(tokens, parents)
    if sizes == (3, 2, 8):  # the second beam is 2 below 1, 3 below 2, 3 below 1; positions 3, 4 and 5
        assert head.asked[0][1:] == (3.0, None) and [asked[2] for asked in head.asked[1:]] == [[1] * 3, [2] * 3]
        assert head.asked[2][:2] == ([2, 3, 3], round(float(torch.acos(torch.tensor(5.0).cos())), 3))
    session.close()


def test_official_layers_and_those_that_a_target_does_not_have(tmp_path):
    """Three states need 3 or at least 7 layers by the public code's rule, which takes the same state once."""
    folder = write_eagle3(tmp_path, toy_model("llama"), outputs=())
    for layers, reads in {3: (0, 1, 2), 7: (2, 3, 4), 8: (2, 4, 5), 32: (2, 16, 29), 40: (2, 20, 37)}.items():
        assert load_eagle3_head(folder, target_of_layers(layers)).reads == reads
    for layers, outputs in {2: r"\[1, 0, -2\]", 4: r"\[1, 1, 0\]", 5: r"\[1, 1, 1\]", 6: r"\[1, 2, 2\]"}.items():
        with pytest.raises(UserError, match=rf"outputs of layers {outputs} .*of the {layers} of LlamaForCausalLM"):
            load_eagle3_head(folder, target_of_layers(layers))
    own = write_eagle3(tmp_path / "own", toy_model("llama"), outputs=(0, 1, 3))
    assert load_eagle3_head(own, target_of_layers(5)).reads == (1, 2, 4)
    with pytest.raises(UserError, match=r"outputs of layers \[0, 1, 3\] .*of the 4 of"):
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
    w = {name.removeprefix("midlayer."): tensor for name, tensor in load_file(f"{folder}/model.safetensors").items()}

    def norm(x, name):
        return x / ((x * x).mean() + eps).sqrt() * w[f"{name}.weight"]

    states, token = torch.randn(64), 7
    h = w["fc.weight"] @ states
    x = torch.cat((norm(model.get_input_embeddings().weight[token], "input_layernorm"), norm(h, "hidden_norm")))
    value = (w["self_attn.v_proj.weight"] @ x).view(2, 8).repeat_interleave(2, 0).flatten()
    h = h + w["self_attn.o_proj.weight"] @ value
    x = norm(h, "post_attention_layernorm")
    h = h + w["mlp.down_proj.weight"] @ (F.silu(w["mlp.gate_proj.weight"] @ x) * (w["mlp.up_proj.weight"] @ x))
    with torch.no_grad():
        out = head(head.features(states)[None, None], torch.tensor([[token]]), head.angles(1))[0, 0]
        torch.testing.assert_close(out, h)
        torch.testing.assert_close(head.lm_head(head.norm(out)), w["lm_head.weight"] @ norm(h, "norm"))


def target_of_layers(count):
    return Target(LlamaForCausalLM(LlamaConfig(**SIZES | NARROW | dict(num_hidden_layers=count))).eval())


@pytest.mark.parametrize("how", [dict(rows=61), dict(hidden=16), dict(pickled=True), dict(hidden=16, rows=7)])
def test_layouts_of_heads_draft(tmp_path, how):
    """A draft vocabulary that is the target's, a head of another width with its own embedding, a torch file."""
    model = toy_model("llama")
    target = Target(model)
    drafter = Eagle3(target, eagle3_path=write_eagle3(tmp_path, model, **how), top_k=3, nodes=9)
    drafts = watched(drafter)
    assert generate(target, drafter, [5, 6, 7], max_new_tokens=20).tokens == greedy(model, [5, 6, 7], 20)
    known = set(range(61)) if drafter.ids is None else set(drafter.ids.tolist())
    assert (drafter.ids is None) == (how.get("rows") == 61) and known <= set(range(61))
    assert all(set(draft.tokens[1:].tolist()) <= known and len(draft.tree) == 10 for draft in drafts[1:])


BROKEN = [
    (dict(change=lambda state: state.pop("d2t")), r"d2t is missing, should be \[40\]"),
    (dict(change=lambda state: state.update(d2t=state["d2t"][:-1])), r"d2t is \[39\] of torch.int64, should be \[40\]"),
    (dict(change=lambda state: state.update(d2t=state["d2t"] + 22)), "d2t leads to ids outside the vocabulary of 61"),
    (dict(change=lambda state: state.update(d2t=state["d2t"] - 1)), "d2t leads to ids outside the vocabulary of 61"),
    (dict(change=lambda state: state.update(d2t=state["d2t"].float())), r"d2t is \[40\] of torch.float32, should be"),
    (dict(change=lambda state: state["d2t"][1].add_(1)), "d2t leads to other ids than those that t2d marks"),
    (dict(draft_vocab_size="40"), "config.json: draft_vocab_size='40' must be from 1 to 61, a whole number"),
    (dict(draft_vocab_size=None), "draft_vocab_size=None must be"),
    (dict(eagle_config="x"), "outputs of layers 'x' .*lists them in config.json"),
    (dict(eagle_config={"eagle_aux_hidden_state_layer_ids": 5}), "outputs of layers 5 .*lists them in config.json"),
    (dict(draft_vocab_size=39), r"d2t is \[40\] of torch.int64, should be \[39\]"),
    (
        dict(hidden=16, change=lambda state: state.pop("embed_tokens.weight")),
        r"has no embed_tokens.weight, and the target's is \[61, 32\] and should",
    ),
    (dict(change=lambda state: state.pop("midlayer.hidden_norm.weight")), "midlayer.hidden_norm.weight is missing"),
    (dict(outputs=(0, 0)), r"outputs of layers \[0, 0\]"),
    (dict(target_hidden_size=48), "target_hidden_size of 48, .* has 32"),
    (dict(num_hidden_layers=2), "num_hidden_layers=2"),
]


def test_bad_heads_are_refused_in_one_line(tmp_path):
    """What all heads share is refused as in test_medusa."""
    model = toy_model("llama")
    target = Target(model)
    check_refused(BROKEN, tmp_path, lambda folder, how: load_eagle3_head(write_eagle3(folder, model, **how), target))
    with pytest.raises(UserError, match="no draft_vocab_size.*method=eagle2"):
        load_eagle3_head(write_eagle(tmp_path / "eagle", model), target)
    with pytest.raises(UserError, match="has a draft_vocab_size.*method=eagle3"):
        load_head(write_eagle3(tmp_path / "eagle3", model), target)
