"""Medusa: candidates by hand, losslessness in every form of step, both layouts, bad files."""

import pytest
import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import load_file

from model.engine import Target, generate
from model.errors import UserError
from model.methods import hydra
from model.methods.eagle import load_eagle3_head, load_head
from model.methods.medusa import Medusa, load_heads
from tests.conftest import toy_model
from tests.model.methods.heads import write_eagle, write_eagle3, write_hydra, write_medusa
from tests.model.sessions import each_session


def test_the_published_tree_is_as_published(tmp_path):
    tree = Medusa(Target(toy_model("llama")), heads_path=write_medusa(tmp_path)).tree
    assert len(tree) == 64 and tree.max_depth == 4 and tree.max_rank == 9
    assert [b - a for a, b in tree.levels] == [1, 10, 28, 23, 2]  # counted in the published list
    assert (
        (0, 0, 0, 1) in tree.rank_paths
        and (2, 0, 0) in tree.rank_paths
        and (1, 1, 0) not in tree.rank_paths
    )


@pytest.mark.parametrize("shared, layers", [(False, 2), (True, 1)])
def test_candidates_are_each_heads_best_tokens(tmp_path, shared, layers):
    """Every node's token worked out from the file, in the model's hidden state that a plain forward gives."""
    model = toy_model("llama-grouped")
    folder = write_medusa(tmp_path, layers=layers, shared=shared)
    state = load_file(f"{folder}/medusa_lm_head.safetensors")
    target = Target(model)
    drafter = Medusa(target, heads_path=folder)
    prompt, drafts = [5, 9, 33, 12, 7], []

    def watch(session):
        inner = session.draft

        def watched(root):
            drafts.append(inner(root))
            drafts[-1].tokens = drafts[-1].tokens.clone()
            return drafts[-1]

        session.draft = watched

    each_session(drafter, watch)
    out = generate(target, drafter, prompt, max_new_tokens=12)
    position = len(prompt) - 1  # of the token whose hidden state chose the root
    # the first step has no hidden state to draft from
    for draft, step in zip(drafts, out.steps[1:], strict=True):
        text = prompt + out.tokens
        assert draft.tokens[0] == text[position + 1]
        with torch.no_grad():
            hidden = model.model(torch.tensor([text[: position + 1]])).last_hidden_state[0, -1]
        for node, path in enumerate(draft.tree.rank_paths[1:], 1):
            x, i = hidden, len(path) - 1
            for j in range(layers):
                x = x + F.silu(state[f"{i}.{j}.linear.weight"] @ x + state[f"{i}.{j}.linear.bias"])
            logits = (model.lm_head.weight if shared else state[f"{i}.{layers}.weight"]) @ x
            assert draft.tokens[node] == logits.sort(descending=True).indices[path[-1]]
        position += step.accepted


def test_both_layouts_are_read_alike(tmp_path):
    target = Target(toy_model("llama"))
    ours = load_heads(write_medusa(tmp_path / "ours"), target).state_dict()
    # the public configuration says 2 heads where the file holds 5
    public = load_heads(write_medusa(tmp_path / "public", pickled=True, medusa_num_heads=2), target)
    assert len(public) == 4 and set(ours) == set(public.state_dict())
    assert all(torch.equal(tensor, ours[name]) for name, tensor in public.state_dict().items())


def test_a_tree_of_ones_own_and_fewer_heads(tmp_path):
    target = Target(toy_model("llama"))
    two = write_medusa(tmp_path, heads=2)
    # the published tree, as deep as there are heads
    assert Medusa(target, heads_path=two).tree.max_depth == 2
    own = tmp_path / "tree.yaml"
    own.write_text(yaml.safe_dump([[0], [1], [0, 1], [0, 1, 0]]))
    with pytest.raises(UserError, match=r"3 deep.*there are 2 heads"):
        Medusa(target, heads_path=two, tree_path=str(own))
    own.write_text("[[0], [60], [61]]")
    with pytest.raises(UserError, match="rank 61 is beyond the 61 tokens"):
        Medusa(target, heads_path=two, tree_path=str(own))


class Malicious:
    def __reduce__(self):
        return (print, ("this code must never run",))


def broken(folder, how):
    file = folder / "medusa_lm_head.pt"
    if how == "code":
        torch.save({"0.0.linear.weight": Malicious()}, file)
    elif how == "empty":
        file.write_bytes(b"")
    elif how == "truncated safetensors":
        safe = folder / "medusa_lm_head.safetensors"
        write_medusa(folder)
        safe.write_bytes(safe.read_bytes()[:-8])
    elif how == "no weights":
        file.unlink()
    elif how.startswith("config"):
        (folder / "config.json").write_text("{" if how == "config" else "[1]")
    elif how == "hidden size":
        write_medusa(folder, hidden=16, pickled=True)
    elif how == "vocabulary":
        write_medusa(folder, vocab_size=32000, pickled=True)
    elif how == "missing tensor":
        state = torch.load(file, weights_only=True)
        del state["1.0.linear.bias"]
        torch.save(state | {"0.0.linear.other": torch.zeros(1)}, file)


BROKEN = {
    "code": "a pickle of more than weights",
    "empty": "corrupt or cut short",
    "truncated safetensors": "corrupt or cut short",
    "no weights": "has no weights",
    "config": "not a readable JSON object",
    "config is a list": "not a readable JSON object",
    "no folder": r"python -m tools.heads medusa .*--output .*folder/nowhere",
    "hidden size": r"0.0.linear.weight is \[16, 16\] and should be \[32, 32\]; 12 of 12 tensors differ",
    "vocabulary": "vocab_size of 32000.*has 61",
    "missing tensor": "1.0.linear.bias is missing and should be .*; 2 of 12 tensors differ",
}


def test_bad_files_are_refused_in_one_line(tmp_path, capsys):
    target = Target(toy_model("llama"))
    for how, says in BROKEN.items():
        write_medusa(folder := tmp_path / how, pickled=True)
        broken(folder, how)
        with pytest.raises(UserError, match=says) as caught:
            load_heads(str(folder / "nowhere" if how == "no folder" else folder), target)
        assert "\n" not in str(caught.value) and "must never run" not in capsys.readouterr().out


HEADS = {
    "medusa": (lambda folder, model, **config: write_medusa(folder, **config), load_heads),
    "hydra": (write_hydra, hydra.load_heads),
    "eagle": (write_eagle, load_head),
    "eagle3": (write_eagle3, load_eagle3_head),
}
CHANGES = dict(  # sums, in a public loader or model, with no tensor that shows it
    sliding_window=8,
    layer_types=["sliding_attention"],
    is_causal=False,
    logit_scale=0.5,
    residual_multiplier=0.2,
    attn_logit_softcapping=30.0,
    query_pre_attn_scalar=9,
    use_qk_norm=True,
    partial_rotary_factor=0.5,
    hidden_activation="gelu",
    quant_method="fp8",
    parallel_drafting=True,
    speculators_model_type="dflash",
)
OF_EAGLE3 = ("norm_before_residual", "norm_output", "norm_before_fc", "fc_norm")
OF_LAYER = {
    "rope_scaling": {"rope_type": "yarn", "factor": 2.0},
    "hidden_act": "tanh",
    "model_type": "gemma3_text",
}


@pytest.mark.parametrize("kind", HEADS)
def test_keys_that_change_sums_are_refused_by_name(tmp_path, kind):
    """Wherever they are nested; keys without effect are not."""
    write, load = HEADS[kind]
    model = toy_model("llama")
    target, wrong = (
        Target(model),
        dict(CHANGES) | {key: True for key in OF_EAGLE3 if kind != "eagle3"},
    )
    if kind == "medusa":  # has no layer; public configurations state the model's
        load(
            write(
                tmp_path / "window",
                model,
                sliding_window=wrong.pop("sliding_window"),
                rope_theta=1.0,
            ),
            target,
        )
    wrong |= {
        "medusa": {"hidden_act": "gelu"},
        "hydra": {"hidden_act": "gelu", "rms_norm_eps": 0.5},
    }.get(kind, {})
    for number, (key, value) in enumerate(wrong.items()):
        for inside in (None, "eagle_config", "transformer_layer_config", "unknown"):
            config = {key: value} if inside is None else {inside: {key: value}}
            with pytest.raises(
                UserError, match=f"{key}=.* changes a head's sums; those of .* are supported"
            ):
                load(write(tmp_path / f"{number} {inside}", model, **config), target)
    for key, value in (OF_LAYER if kind.startswith("eagle") else {}).items():
        with pytest.raises(
            UserError, match=r"rope_type=yarn|no LLaMA layer|model_type=gemma3_text"
        ):
            load(
                write(
                    tmp_path / key,
                    model,
                    **{key: value} | ({"hidden_act": "no"} if key == "hidden_act" else {}),
                ),
                target,
            )
    harmless = dict(
        training_steps=3,
        sliding_window=None,
        use_cache=True,
        attention_dropout=0.1,
        auto_map={"a": "norm"},
    )
    load(write(tmp_path / "harmless", model, **harmless), target)
