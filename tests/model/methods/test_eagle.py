"""EAGLE's head against plain arithmetic without a cache; its static tree, EAGLE-2's dynamic one, bad files."""

import math

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from model.engine import Target, generate
from model.methods.eagle import Eagle, Eagle2, load_head
from tests.conftest import greedy, toy_model
from tests.model.methods.heads import check_refused, write_eagle
from tests.model.sessions import each_session

QKV = tuple(f"layers.0.self_attn.{name}_proj" for name in "qkv")
HEADS, KV_HEADS, THETA, EPS = 4, 2, 500.0, 1e-5  # as tests.model.heads writes them


def reference(state, embedding, features, tokens):
    """The head over a whole sequence: no cache, no transformers, one position after the other. (n, H) -> (n, H)."""
    w = {name.removeprefix("layers.0."): tensor.double() for name, tensor in state.items()}
    x = torch.cat((embedding[tokens], features), dim=1).double() @ w["fc.weight"].T + w.get(
        "fc.bias", 0.0
    )
    n, hidden = x.shape
    dim = hidden // HEADS

    def rotate(vectors, t):  # (heads, dim): pairs (i, i + dim / 2) turn by t / theta^(2 i / dim)
        angle = t / THETA ** (torch.arange(0, dim, 2).double() / dim)
        a, b = vectors[:, : dim // 2], vectors[:, dim // 2 :]
        return torch.cat(
            (a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), dim=1
        )

    query, key, value = (
        (x @ w[f"self_attn.{name}_proj.weight"].T + w.get(f"self_attn.{name}_proj.bias", 0.0)).view(
            n, -1, dim
        )
        for name in "qkv"
    )
    query, key = ([rotate(vectors[t], t) for t in range(n)] for vectors in (query, key))
    out = []
    for t in range(n):
        heads = []
        for h in range(HEADS):
            group = h // (HEADS // KV_HEADS)
            scores = torch.stack(
                [query[t][h] @ key[s][group] / math.sqrt(dim) for s in range(t + 1)]
            ).softmax(0)
            heads.append(sum(scores[s] * value[s][group] for s in range(t + 1)))
        y = x[t] + w["self_attn.o_proj.weight"] @ torch.cat(heads)
        z = y / torch.sqrt((y * y).mean() + EPS) * w["post_attention_layernorm.weight"]
        gate, up = w["mlp.gate_proj.weight"] @ z, w["mlp.up_proj.weight"] @ z
        out.append(y + w["mlp.down_proj.weight"] @ (F.silu(gate) * up))
    return torch.stack(out).float()


class Reference:
    """A draft's candidates by the reference head: every path from scratch, over the whole text."""

    def __init__(self, model, folder):
        self.model, self.state = model, load_file(f"{folder}/model.safetensors")
        self.embedding = self.state.pop(
            "embed_tokens.weight", model.get_input_embeddings().weight.detach()
        )

    def start(self, text):
        """`text` ends with the root, whose feature is not known."""
        with torch.no_grad():
            self.features = self.model.get_decoder()(torch.tensor([text[:-1]]))[0][0]
        self.text = text

    def logits(self, path):
        """What the head says of the token behind the root and the tokens of `path`: (V,)."""
        features, tokens = self.features, torch.tensor(self.text[1:])
        for token in path:
            features = torch.cat(
                (features, reference(self.state, self.embedding, features, tokens)[-1:])
            )
            tokens = torch.cat((tokens, torch.tensor([token])))
        with torch.no_grad():
            return self.model.get_output_embeddings()(
                reference(self.state, self.embedding, features, tokens)[-1]
            )


def drafts_of(drafter, target, prompt, new):
    """Every draft with the text up to its root, and the answer."""
    seen = []

    def watch(session):
        inner = session.draft
        session.draft = lambda root: seen.append(inner(root)) or seen[-1]

    each_session(drafter, watch)
    out = generate(target, drafter, prompt, max_new_tokens=new)
    ends = [len(prompt) + 1]
    for step in out.steps[1:]:
        ends.append(ends[-1] + step.accepted)
    return [
        ((prompt + out.tokens)[:end], draft) for end, draft in zip(ends, seen, strict=False)
    ], out


def tokens_by_path(draft):
    tokens = draft.tokens.tolist()
    return {
        path: [tokens[i] for i in draft.tree.chain_of[node][1:]]
        for node, path in enumerate(draft.tree.rank_paths)
    }


# the second and third are Qwen2's; none has a bias of o_proj
LAYOUTS = [
    ("fc",),
    ("fc", *QKV),
    QKV,
    (),
]


@pytest.mark.parametrize(
    "name, biased", [*(("llama-grouped", biased) for biased in LAYOUTS), ("gpt2", ("fc",))]
)
def test_the_static_tree_is_the_heads_own_paths_computed_from_scratch(tmp_path, name, biased):
    model = toy_model(name)
    embedding = torch.randn(61, 32) if name == "gpt2" else None  # the head's own
    folder = write_eagle(tmp_path, model, biased=biased, embedding=embedding)
    target, slow = Target(model), Reference(model, folder)
    seen, _ = drafts_of(Eagle(target, head_path=folder), target, [5, 9, 33, 12], 8)
    assert len(seen) >= 3
    for text, draft in seen:
        slow.start(text)
        assert draft.tokens[0] == text[-1] and len(draft.tree) == 26
        # counted in the published list
        assert [b - a for a, b in draft.tree.levels] == [
            1,
            4,
            8,
            8,
            3,
            2,
        ]
        tokens, ranked = tokens_by_path(draft), {}
        for path, chain in tokens.items():
            if path:
                parent = path[:-1]
                if parent not in ranked:
                    ranked[parent] = slow.logits(chain[:-1]).sort(descending=True).indices
                assert chain[-1] == ranked[parent][path[-1]], (text, path)


def brute_force(slow, depth, top_k, nodes):
    """EAGLE-2's tree in plain Python: (path of tokens -> value), the best of all seen."""
    level, seen = [((), 0.0)], []
    for _ in range(depth):
        below = []
        for path, value in level:
            values, tokens = slow.logits(path).log_softmax(0).sort(descending=True)
            below += [
                ((*path, int(t)), value + float(v))
                for v, t in zip(values[:top_k], tokens[:top_k], strict=True)
            ]
        seen += below
        level = sorted(below, key=lambda item: -item[1])[:top_k]
    return dict(sorted(seen, key=lambda item: -item[1])[:nodes])


@pytest.mark.parametrize(
    "depth, top_k, nodes", [(4, 3, 12), (3, 2, 100), (1, 5, 3)]
)  # the second has every node
def test_the_dynamic_tree_is_the_best_by_cumulative_confidence(tmp_path, depth, top_k, nodes):
    model = toy_model("llama-grouped", seed=1)
    folder = write_eagle(tmp_path, model)
    target, slow = Target(model), Reference(model, folder)
    drafter = Eagle2(target, head_path=folder, depth=depth, top_k=top_k, nodes=nodes)
    # a sharpened toy head is certain of everything; a softer one has close values at several depths
    drafter.lm_head = slow_head = torch.nn.Linear(32, 61, bias=False)
    slow_head.weight.data = model.lm_head.weight.data * 0.05
    slow.model.get_output_embeddings = lambda: slow_head
    seen, _ = drafts_of(drafter, target, [5, 9, 33, 12], 4)
    shapes = set()
    for text, draft in seen[:3]:
        slow.start(text)
        best = brute_force(slow, depth, top_k, nodes)
        drafted = {tuple(chain) for path, chain in tokens_by_path(draft).items() if path}
        assert drafted == set(best) and draft.tokens[0] == text[-1]
        for path, chain in tokens_by_path(draft).items():
            if path:
                assert slow.logits(chain[:-1]).sort(descending=True).indices[path[-1]] == chain[-1]
        shapes.add(tuple(draft.tree.rank_paths))
    assert len(shapes) > 1 or depth == 1 or nodes == 100  # the tree does follow the confidence


def test_both_layouts_are_read_alike(tmp_path):
    model = toy_model("llama")
    target = Target(model)
    for biased in LAYOUTS:
        ours = load_head(
            write_eagle(tmp_path / f"ours {len(biased)}", model, biased=biased), target
        )
        folder = write_eagle(
            tmp_path / f"public {len(biased)}",
            model,
            biased=biased,
            pickled=True,
            embedding=model.get_input_embeddings().weight.detach().clone(),
        )
        public = load_head(folder, target)
        assert all(
            torch.equal(tensor, public.state_dict()[name])
            for name, tensor in ours.state_dict().items()
        )
        assert {name[:-5] for name in ours.state_dict() if name.endswith(".bias")} == set(biased)
        embeddings = (public.embedding, ours.embedding, model.get_input_embeddings().weight)
        assert len({tensor.data_ptr() for tensor in embeddings}) == 1, (
            "an equal one is not stored twice"
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_heads_of_16_bit_targets(tmp_path, dtype):
    """Angles are rounded only as they are used, log-probs never; logits that are no numbers end no answer."""
    model = toy_model("llama-grouped", dtype=dtype)
    target, folder = Target(model), write_eagle(tmp_path, model)
    drafter = Eagle2(target, head_path=folder, nodes=20)
    expected = load_head(folder, Target(toy_model("llama-grouped"))).angles(200)
    for angles, wide in zip(drafter.head.angles(200), expected, strict=True):
        assert torch.equal(angles, wide.to(dtype))
    shallow = Eagle2(target, head_path=folder, depth=1, top_k=2, nodes=2)
    logits = torch.zeros(61, dtype=dtype).scatter(
        0, torch.tensor([7, 50]), torch.tensor([8.0, 0.01], dtype=dtype)
    )
    shallow.lm_head = lambda features: logits.expand(len(features), 61)
    for _, draft in drafts_of(shallow, target, [5, 9], 4)[0]:
        assert draft.tokens[1:].tolist() == [7, 50], (
            "in 16 bits the log-probs of all but token 7 are equal"
        )
    lm_head, rows = drafter.lm_head, []

    def overflowing(features):
        rows.append(lm_head(features))
        return rows[-1] if len(rows) % 2 else rows[-1] * math.nan

    drafter.lm_head = overflowing
    assert generate(target, drafter, [5, 9, 33, 12], max_new_tokens=20).tokens == greedy(
        model, [5, 9, 33, 12], 20
    )


def test_a_heads_layers_multiply_as_the_targets_do(tmp_path):
    model = toy_model("llama")
    target, prepared = Target(model), []
    target.prepare = prepared.append
    assert Eagle(target, head_path=write_eagle(tmp_path, model)).head in prepared


BROKEN = [
    (dict(embedding=torch.zeros(60, 32)), r"embed_tokens.weight is \[60, 32\]"),
    (dict(num_hidden_layers=2), "num_hidden_layers=2"),
    (dict(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "rope_type=dynamic"),
    (dict(num_attention_heads="four"), "describes no LLaMA layer"),
]


def test_bad_heads_are_refused_in_one_line(tmp_path):
    """What all heads share is refused as in test_medusa."""
    model = toy_model("llama")
    target = Target(model)
    check_refused(
        BROKEN,
        tmp_path,
        lambda folder, how: Eagle2(target, head_path=write_eagle(folder, model, **how)),
    )
