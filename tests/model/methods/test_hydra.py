"""Hydra against the public code's own trace, its candidates worked out from the file, both layouts, bad files.

hydra_trace.jsonl: one line a turn of the sample bench (prompts and texts are those of official_trace.jsonl), recorded
from github.com/hemingkx/Spec-Bench (commit fd2c1cd, model/hydra, transformers 4.53.1, torch 2.13, float32, one thread)
with the shipped heads and mc_sim_7b_63. `drafts`: step and tokens of some drafts, in the order of the nodes.
"""

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from model.engine import Target, generate
from model.errors import UserError
from model.files import ROOT
from model.methods.hydra import Hydra, load_heads
from tests.conftest import NARROW, SIZES, sharpened, toy_model
from tests.model.methods.heads import HYDRA_FILES, check_refused, write_hydra, write_medusa
from tests.model.methods.public_traces import SOME_OR_ALL, embedded, lines, retaken, watched


@SOME_OR_ALL
def test_every_step_and_draft_is_the_public_codes(execution, every):
    target, seen, steps = Target(embedded()), 0, 0
    drafter = Hydra(target, hydra_path=str(ROOT / "data/embedded/hydra"))
    drafts = watched(drafter)
    for turn in lines("hydra_trace.jsonl")[::every]:
        drafts.clear()
        out = retaken(drafter, target, turn, execution)
        assert [step.nodes for step in out.steps] == [1] + [64] * len(turn["accept_lengths"])
        steps += len(turn["accept_lengths"])
        for step, tokens in turn.get("drafts", ()):
            assert drafts[step].tokens.tolist() == tokens, step
            seen += 1
    assert seen >= 10 and (every > 1 or (seen, steps) == (27, 409))


@pytest.mark.parametrize("blocks", [1, 3])
def test_candidates_are_each_heads_best_tokens_after_its_path(tmp_path, blocks):
    """Every node's token worked out from the file, and the layer by transformers over the whole text."""
    torch.manual_seed(0)
    # the layer's base, too
    config = LlamaConfig(**SIZES | NARROW, num_key_value_heads=2, rope_theta=20.0)
    model = sharpened(LlamaForCausalLM(config).eval())
    folder = write_hydra(tmp_path, model, blocks=blocks)
    state = load_file(f"{folder}/{HYDRA_FILES[0]}")
    prefix, start = (
        LlamaModel(type(model.config)(**model.config.to_dict() | {"num_hidden_layers": 1})).eval(),
        22,
    )
    layer = {
        name[start:]: tensor
        for name, tensor in state.items()
        if name[:start] == "prefix_embeding_layer."
    }
    assert prefix.load_state_dict(layer, strict=False).missing_keys == ["embed_tokens.weight"]
    target, prompt = Target(model), [5, 9, 33, 12, 7]
    drafter = Hydra(target, hydra_path=folder)
    drafts = watched(drafter)
    out = generate(target, drafter, prompt, max_new_tokens=12)
    end = len(prompt) + 1
    embed = model.get_input_embeddings().weight
    for draft, step in zip(drafts, out.steps[1:], strict=True):
        text, tokens = (prompt + out.tokens)[:end], draft.tokens.tolist()
        assert tokens[0] == text[-1] and len(tokens) == 64
        with torch.no_grad():
            hidden = model.model(torch.tensor([text[:-1]])).last_hidden_state
            context = prefix(inputs_embeds=hidden).last_hidden_state[0, -1]
            for node, path in enumerate(draft.tree.rank_paths[1:], 1):
                i, above = len(path) - 1, draft.tree.chain_of[node][:-1]
                x = torch.cat((context, *(embed[tokens[j]] for j in above)))
                for j in range(blocks):
                    w = {name: state.get(f"hydra_mlp.{i}.{1 + 2 * j}.{name}") for name in NAMES}
                    kept = x if j else w["res_connection.weight"] @ x + w["res_connection.bias"]
                    x = kept + F.silu(w["linear.weight"] @ x + w["linear.bias"])
                logits = (
                    state[f"hydra_lm_head.{i}.1.weight"] @ x + state[f"hydra_lm_head.{i}.1.bias"]
                )
                assert tokens[node] == logits.sort(descending=True).indices[path[-1]]
        end += step.accepted


NAMES = [f"{layer}.{kind}" for layer in ("linear", "res_connection") for kind in ("weight", "bias")]


def test_both_layouts_are_read_alike_and_a_heads_later_blocks_are_one(tmp_path):
    model = toy_model("llama-grouped")
    target = Target(model)
    ours = load_heads(write_hydra(tmp_path / "ours", model), target)
    public = load_heads(
        write_hydra(tmp_path / "public", model, pickled=True, hydra_num_layers=1), target
    )
    assert set(ours.state_dict()) == set(public.state_dict()) and len(ours.hydra_mlp) == 4
    assert all(
        torch.equal(tensor, public.state_dict()[name]) for name, tensor in ours.state_dict().items()
    )
    assert (
        all(head[3] is head[5] for head in ours.hydra_mlp)
        and ours.hydra_mlp[0][3] is not ours.hydra_mlp[1][3]
    )
    assert (
        Hydra(target, hydra_path=write_hydra(tmp_path / "two", model, heads=2)).template.max_depth
        == 2
    )


BROKEN = [
    (dict(hydra_head_arch="mlp"), "hydra_head_arch=mlp .* prefix-mlp are supported"),
    (dict(grounded_heads=False), "grounded_heads=False"),
    (dict(hidden_state_offset=1), "hidden_state_offset=1"),
    (
        dict(change=lambda state: state.pop("hydra_mlp.1.3.linear.bias")),
        "hydra_mlp.1.3.linear.bias is missing",
    ),
    (
        dict(change=lambda state: state["hydra_mlp.2.5.linear.weight"].add_(0.1)),
        "hydra_mlp.2.5.linear.weight and hydra_mlp.2.3.linear.weight differ",
    ),
    (
        dict(pickled=True, change=lambda state: state["input_embed_fn.weight"].mul_(1.1)),
        "input_embed_fn.weight is not the embedding of LlamaForCausalLM",
    ),
    (dict(change=lambda state: state.clear()), r"keys such as \[\] are not Hydra's"),
]


def test_bad_heads_are_refused_in_one_line(tmp_path):
    """What all heads share is refused as in test_medusa."""
    model = toy_model("llama")
    target = Target(model)
    check_refused(
        BROKEN, tmp_path, lambda folder, how: load_heads(write_hydra(folder, model, **how), target)
    )
    with pytest.raises(UserError, match="no command here trains one"):
        load_heads(str(tmp_path / "nowhere"), target)
    with pytest.raises(UserError, match="has no weights"):
        load_heads(write_medusa(tmp_path / "medusa"), target)
    with pytest.raises(UserError, match="GPT2LMHeadModel: has no hidden_size in its config"):
        load_heads(write_hydra(tmp_path / "gpt2", model), Target(toy_model("gpt2")))
