"""RACER: its tree by hand and against a slow reference, hash order, what is carried, refusals."""

import random

import pytest
import torch

from model.engine import Target, generate
from model.errors import UserError
from model.methods.racer import Racer
from model.structures.ngram_trie import HASH_BUCKETS, NgramTrie, add_in_hash_order, hash_order
from tests.conftest import greedy, toy_model
from tests.model.methods import racer_reference
from tests.model.sessions import each_session

V = 61


def test_a_tree_by_hand():
    """Retrieved 5 6 and 7; rows of zeros below what was never seen fall together."""
    drafter = Racer(V, nodes=7, k=2)
    for token, row in {3: [5, 8], 5: [9, 6], 8: [1, 2]}.items():
        drafter.matrix.candidates[token] = torch.tensor(row)
    draft = drafter.tree(3, [[5, 6], [7]]).draft()
    # 5 is there and costs nothing; 5 and 8 have a breadth of 2 and 1; a 9 and a 1 come, and below the 9 a 0
    assert draft.tokens.tolist() == [3, 8, 7, 5, 1, 9, 6, 0]
    assert draft.tree.parent_of == [0, 0, 0, 0, 1, 3, 3, 5]
    assert draft.tree.rank_of == [0, 2, 1, 0, 0, 1, 0, 0], "retrieved ones first, then by candidate"


def test_retrieval_by_hand():
    trie = NgramTrie(3, 100, 2)
    trie.insert_text([1, 2, 3, 4, 1, 2, 3, 5])  # 123 234 341 412 123 235
    trie.build_fail_links()
    place, borders = trie.step(0, 1)
    assert borders == [], "one token is matched, two must be"
    place, borders = trie.step(place, 2)
    assert [trie.depth[b] for b in borders] == [2]
    assert trie.continuations(borders, 64) == [[3]]
    two = trie.children[0][2]
    place = trie.walk(place, [3])  # 1 2 3, whose link leads to 2 3
    place, borders = trie.step(place, 5)
    assert place == trie.children[trie.children[two][3]][5] and borders == [place]
    assert trie.step(place, 9) == (place, []), "nothing follows: the place stays where it was"


def test_the_most_frequent_continuations_are_selected():
    trie = NgramTrie(3, 100, 2)
    for gram in ([1, 2, 3], [1, 2, 4], [1, 2, 4], [1, 2, 5]):
        trie.insert(gram)
    (border,) = trie.step(trie.children[0][1], 2)[1]
    assert trie.continuations([border], 2) == [[4]]
    # of equals the lower number leaves, but a full heap takes nobody in who is not more frequent; 5, 4, 3 is hash order
    assert trie.continuations([border], 3) == [[5], [4]]
    assert trie.continuations([border], 4) == [[5], [4], [3]]
    assert trie.continuations([border], 1) == [[]]


def test_of_the_least_frequent_the_deepest_leaves():
    """Two borders, 9 1 2 seen once and 1 2 seen four times: for 1 2 4 there goes 9 1 2 3, and not 9 1 2."""
    trie = NgramTrie(4, 100, 2)
    for gram in ([9, 1, 2, 3], *[[1, 2, 4, 5]] * 4):
        trie.insert(gram)
    trie.build_fail_links()
    borders = trie.step(trie.children[trie.children[0][9]][1], 2)[1]
    assert [(trie.depth[border], trie.freq[border]) for border in borders] == [(3, 1), (2, 4)]
    assert trie.continuations(borders, 3) == [[4, 5]], "and for 1 2 4 5 then 9 1 2"
    assert trie.continuations(borders, 4) == [[4, 5], []]


def test_the_oldest_node_is_reused_with_its_children():
    """A prefix is older than its extension: 1 goes first, and 1 2 and 1 2 3 cannot be reached any more."""
    trie = NgramTrie(3, 5, 2)
    trie.insert([1, 2, 3])
    trie.insert([4, 5, 6])  # a node is left for 4; 5 takes that of 1, 6 that of 1 2
    assert len(trie) == 5 and list(trie.children[0]) == [4]
    assert trie.token == [0, 5, 6, 3, 4] and trie.parent[3] == 2, "what held 1 2 holds 4 5 6 now"
    assert trie.children[2] == {} and trie.depth[2] == 3


# As g++ 12 printed them of std::unordered_map<int, int>: +t inserts, -t erases
PRINTED = [
    ("+1 +2 +14 +15 +27 -14 +3 +40", [3, 15, 2, 40, 27, 1]),
    ("+5 +18 +6 -5 -18 +31", [31, 6]),
    (
        "+0 +7 +14 +21 +28 +35 +42 +49 +56 +63 +70 +77 +84 +91 +98 -0 +4 +33",  # 29 buckets from the fourteenth on
        [98, 33, 4, 91, 7, 14, 21, 28, 35, 42, 49, 56, 63, 70, 77, 84],
    ),
]


@pytest.mark.parametrize(("changes", "printed"), PRINTED)
def test_hash_order_is_what_the_compiler_does(changes, printed):
    order, buckets = [], 1
    for change in changes.split():
        token = int(change[1:])
        if change[0] == "+":
            buckets = add_in_hash_order(order, token, buckets)
        else:
            order.remove(token)
    assert order == printed


@pytest.mark.parametrize("seed", range(30))
def test_hash_order_of_a_new_map(seed):
    rng = random.Random(seed)
    tokens = rng.sample(range(500), rng.choice([0, 1, 2, 5, 13, 14, 29, 30, 100, 300]))
    node = racer_reference.Node(0, 0)
    order, buckets = [], 1
    for token in tokens:
        buckets = add_in_hash_order(order, token, buckets)
        node.add(token, None) if len(tokens) < 257 else None
    assert hash_order(tokens) == order and (buckets == 1 or buckets in HASH_BUCKETS)
    assert len(tokens) > 256 or [token for token, _ in node.order] == order


def mirrored(drafter, reference, eos):
    """Each session's drafts must be those of the reference, which reads what the session reads."""
    drafts = []

    def mirror(session):
        begin, draft, observe, observe_prompt, close = (
            getattr(session, name) for name in ("begin", "draft", "observe", "observe_prompt", "close")
        )
        seen = {"first": True, "next": None}

        def new_begin(prompt):
            reference.begin(prompt)
            return begin(prompt)

        def new_observe_prompt(prompt, logits):
            reference.learn(prompt, logits.topk(reference.k).indices.tolist())
            observe_prompt(prompt, logits)

        def new_draft(root):
            found = draft(root)
            drafts.append((found.tokens.tolist(), found.tree.parent_of))
            assert drafts[-1] == reference.draft(root)
            return found

        def new_observe(verification):
            tokens = verification.draft.tokens.tolist()
            reference.learn(tokens, verification.candidates.tolist())
            path = [tokens[node] for node in verification.path][: 1 + len(verification.tokens)]  # what is put out
            path = next((path[: i + 1] for i, token in enumerate(path) if token in eos), path)
            own = len(verification.tokens) == len(verification.path)  # the target's own next token, too
            if not seen["first"]:
                reference.commit(path)
                if path[1:]:
                    reference.walk(path[1:])
            seen["first"] = False
            seen["next"] = verification.tokens[-1] if own and path[-1] not in eos else None
            observe(verification)

        def new_close():
            if seen["next"] is not None:
                reference.follow(seen["next"])
                reference.commit([seen["next"]])
            close()

        session.begin, session.draft, session.observe = new_begin, new_draft, new_observe
        session.observe_prompt, session.close = new_observe_prompt, new_close

    each_session(drafter, mirror)
    return drafts


@pytest.mark.parametrize("seed", range(6))
def test_every_draft_is_the_slow_reference_s(seed):
    """Small tries, so that nodes are reused all the time; the text goes in circles, so that n-grams are found."""
    rng = random.Random(seed)
    ngram = rng.randrange(2, 7)
    settings = dict(
        nodes=rng.choice([1, 2, 7, 30, 63]),
        k=rng.choice([1, 3, 8]),
        ngram=ngram,
        trie_nodes=rng.choice([ngram + 2, 40, 150, 2000]),
        min_match=rng.randrange(1, min(ngram, 3) + 1),
    )
    eos = {rng.randrange(V)}
    drafter = Racer(V, eos=eos, **settings)
    drafts = mirrored(drafter, racer_reference.Racer(**settings), eos)
    model = toy_model("llama", seed=seed)
    target = Target(model)
    for i in range(6):
        prompt = [rng.randrange(3, V) for _ in range(rng.randrange(1, 15))] * rng.randrange(1, 4)
        ends = eos if i % 2 else set()  # where the engine goes on behind it, too, nothing behind it is inserted
        out = generate(target, drafter, prompt, max_new_tokens=40, eos=ends)
        assert out.tokens == greedy(model, prompt, 40, sorted(ends) or None)
    assert len(drafts) > 30 and len(drafter.trie) <= settings["trie_nodes"]


@pytest.mark.parametrize("seed", range(40))
def test_trees_and_tries_under_random_streams(seed):
    """Without a model: texts of few tokens, random rows, random accepted paths."""
    rng = random.Random(seed)
    vocabulary, ngram = rng.choice([2, 3, 6, 40]), rng.randrange(2, 6)
    settings = dict(
        nodes=rng.randrange(1, 40),
        k=rng.randrange(1, min(vocabulary, 8) + 1),
        ngram=ngram,
        trie_nodes=rng.choice([ngram + 2, 2 * ngram + 3, 60, 500]),
        min_match=rng.randrange(1, ngram + 1),
    )
    drafter, reference = Racer(vocabulary, **settings), racer_reference.Racer(**settings)
    for _ in range(3):
        prompt = [rng.randrange(vocabulary) for _ in range(rng.randrange(1, 30))]
        session = drafter.session()
        session.begin(prompt)
        reference.begin(prompt)
        for _ in range(12):
            tokens = rng.sample(range(vocabulary), min(vocabulary, 4))
            rows = [[rng.randrange(vocabulary) for _ in range(settings["k"])] for _ in tokens]
            drafter.matrix.update(torch.tensor(tokens), torch.tensor(rows))
            reference.learn(tokens, rows)
            root = rng.randrange(vocabulary)
            draft = session.draft(root)
            assert (draft.tokens.tolist(), draft.tree.parent_of) == reference.draft(root)
            accepted = [rng.randrange(vocabulary) for _ in range(rng.randrange(4))]
            session._read([root, *accepted])
            reference.commit([root, *accepted])
            if accepted:
                session._place = session._trie.walk(session._place, accepted)
                reference.walk(accepted)
        session.close()


def test_a_reset_forgets_what_an_open_sequence_says_too():
    drafter = Racer(V, ngram=2)
    session = drafter.session()
    session.begin([5, 6, 7])
    drafter.reset()
    session.draft(8)
    session.close()
    assert len(drafter.trie) == 1 and drafter.trie.place == 0


def test_what_is_accepted_behind_the_end_is_not_inserted_and_the_end_is():
    """The end as a draft that is accepted, and as the target's own next token, which no step has as its root."""
    model = toy_model("llama")
    target, prompt = Target(model), [5, 6, 7, 8]
    answer = greedy(model, prompt, 30)
    for end in {token for token in answer[2:] if answer.index(token) > 1}:
        said = answer[: answer.index(end) + 1]
        for times in (1, 2):  # the second time the answer is retrieved, and accepted to its end and beyond
            drafter = Racer(V, ngram=2, eos={end})
            for _ in range(times):
                out = generate(target, drafter, prompt, max_new_tokens=30, eos={end})
                assert out.tokens == said
            text, trie = prompt + said, drafter.trie
            pairs = {(trie.token[node], after) for node in trie.children[0].values() for after in trie.children[node]}
            assert pairs == set(zip(text, text[1:], strict=False))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"nodes": 0}, "nodes=0 must be from 1 to 4096"),
        ({"nodes": 4097}, "nodes=4097 must be"),
        ({"nodes": 2.5}, "nodes=2.5 must be"),
        ({"nodes": True}, "nodes=True must be"),
        ({"k": 0}, "k=0: must be from 1 to the vocabulary's size"),
        ({"k": V + 1}, "k=62: must be"),
        ({"ngram": 1}, "ngram=1 must be from 2"),
        ({"min_match": 0}, "min_match=0 must be from 1 to 10"),
        ({"min_match": 11}, "min_match=11 must be from 1 to 10"),
        ({"trie_nodes": 11}, "trie_nodes=11 must be from 12"),
        ({"trie_nodes": None}, "trie_nodes=None must be"),
    ],
)
def test_settings_out_of_range_are_refused(wrong, says):
    with pytest.raises(UserError, match=says):
        Racer(V, **wrong)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("candidates", lambda t: t[:-1]),
        ("trie_parent", lambda t: t[:-1]),
        ("trie_fail", lambda t: t + len(t)),
        ("trie_fail", lambda t: torch.arange(1, len(t) + 1) % len(t) * (torch.arange(len(t)) > 0) + 1),  # in a circle
        ("trie_token", lambda t: t + V),
        ("trie_depth", lambda t: t + 11),
        ("trie_buckets", lambda t: t * 0),
        ("trie_recency", lambda t: t * 0),
        ("trie_children", lambda t: t * 0),
        ("trie_counts", lambda t: t + 1),
        ("trie_place", lambda t: t - 1),
        ("trie_place", None),
    ],
)
def test_a_state_that_is_none_is_refused_and_changes_nothing(name, change):
    drafter = Racer(V)
    generate(Target(toy_model("llama")), drafter, [5, 6, 7], max_new_tokens=20)
    before = {key: tensor.clone() for key, tensor in drafter.state_dict().items()}
    wrong = {key: tensor for key, tensor in before.items() if key != name}
    if change is not None:
        wrong[name] = change(before[name])
    with pytest.raises(UserError, match="the saved trie is not one of at most 10000 nodes|start: the saved matrix"):
        drafter.load_state_dict(wrong)
    assert all(torch.equal(tensor, before[key]) for key, tensor in drafter.state_dict().items())
    with pytest.raises(UserError, match="at most 20 nodes for 10-grams"):
        Racer(V, trie_nodes=20).load_state_dict(before)
