"""Compiled drafts against those in Python, to the last node and bit: random streams, ties, turns, saved states."""

import random
import zlib
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch

from model.copying.suffix_automaton import SuffixAutomaton
from model.decoding import Draft, Target, generate
from model.decoding.sampling import candidates_of
from model.decoding.verification import Verification, verify
from model.dynamic.dynamic_recycling import DynamicRecycling, DynamicSession
from tests.conftest import toy_model

pytest.importorskip("numba", reason="optional: numba, which compiles drafting")


def two(take: Callable[[bool], None], vocab: int, **settings) -> list[DynamicRecycling]:
    """The same method in Python and compiled."""
    made = []
    for compiled in (False, True):
        take(compiled)
        made.append(DynamicRecycling(vocab, **settings))
    assert [drafter.compiled for drafter in made] == [False, True]
    return made


def logits_of(context: list[int], vocab: int, seed: int, steps: int) -> torch.Tensor:
    """(V,): of the last tokens; of few values, so that many tie. Repeats where the text does, and not for ever."""
    drawn = np.random.default_rng([seed, zlib.crc32(bytes(str((context[-2:], len(context) // 40)), "ascii"))])
    return torch.from_numpy(drawn.integers(0, steps, vocab) * (6.0 / steps)).float()


def verified(draft: Draft, before: list[int], k: int, logits: Callable[[list[int]], torch.Tensor]) -> Verification:
    tokens = draft.tokens.tolist()
    rows = torch.stack([logits(before + [tokens[i] for i in chain]) for chain in draft.tree.chain_of])
    verification = verify(draft, rows.argmax(-1))
    verification.candidates, verification.bits = candidates_of(rows, k, True)
    return verification


def siblings(session: DynamicSession) -> tuple[list, list]:
    return session._growth.siblings if session.method.compiled else (session._sibling_children, session._siblings)


def same_step(sessions: list[DynamicSession], text: list[int], logits: Callable[[list[int]], torch.Tensor]) -> int:
    """One step of both, compared; the text goes on. Nodes drafted."""
    drafts = [session.draft(text[-1]) for session in sessions]
    assert drafts[0].tokens.tolist() == drafts[1].tokens.tolist()
    assert drafts[0].tree.parent_of == drafts[1].tree.parent_of and drafts[1].tokens.dtype == torch.long
    verification = verified(drafts[0], text[:-1], sessions[0].method.k, logits)
    for session, draft in zip(sessions, drafts, strict=True):
        verification.draft = draft
        session.observe(verification)
    assert not sessions[0].method.siblings or siblings(sessions[0]) == siblings(sessions[1])
    text += verification.tokens
    return len(drafts[0].tree)


def begun(drafters: list[DynamicRecycling], prompt: list[int], logits) -> list[DynamicSession]:
    sessions = [drafter.session() for drafter in drafters]
    for session in sessions:
        assert session.begin(prompt) is None
        if session.method.needs.prompt_logits and len(prompt) > 1:
            rows = torch.stack([logits(prompt[: i + 1]) for i in range(len(prompt) - 1)])
            session.observe_prompt(prompt[:-1], rows)
    return sessions


def same_state(drafters: list[DynamicRecycling]) -> None:
    one, other = (drafter.state_dict() for drafter in drafters)
    assert list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("seed", range(40))
def test_drafts_and_state_are_those_of_python(take, seed):
    rng = random.Random(seed)
    vocab, nodes = rng.choice([5, 30, 200, 3000]), rng.choice([0, 1, 5, 24, 80])
    settings = dict(
        k=rng.randint(1, min(vocab, 12)),
        pairs=rng.choice([0, 2, 64, 65536]),
        copy=rng.random() < 0.8,
        siblings=rng.random() < 0.8,
        calibrate=rng.random() < 0.8,
        history_tokens=rng.choice([0, 50, 1000]),
        recycle_prompt=rng.random() < 0.7,
    )
    drafters, steps, drafted = two(take, vocab, nodes=nodes, **settings), rng.choice([3, 12, 1000]), 0

    def logits(context: list[int]) -> torch.Tensor:
        return logits_of(context, vocab, seed, steps)

    for _ in range(4):
        text = [rng.randrange(vocab) for _ in range(rng.randint(1, 30))] * rng.randint(1, 2)
        sessions = begun(drafters, list(text), logits)
        for _ in range(25):
            drafted += same_step(sessions, text, logits) - 1
        assert sessions[0].text.tokens == sessions[1].text.tokens
        texts = [session.text for session in sessions]
        assert all(getattr(texts[0], name) == getattr(texts[1], name) for name in ("length", "end", "match"))
        for session in sessions:
            session.close()
        same_state(drafters)
    assert drafted > 0 or drafters[0].max_nodes == 1
    for drafter in drafters:
        drafter.reset()
    same_state(drafters)


@pytest.mark.parametrize("seed", range(6))
def test_sessions_that_take_turns_draft_as_in_python(take, seed):
    rng, vocab = random.Random(seed), 60
    drafters = two(take, vocab, nodes=16, k=6, pairs=128, history_tokens=300)

    def logits(context: list[int]) -> torch.Tensor:
        return logits_of(context, vocab, seed, 20)

    texts = [[rng.randrange(vocab) for _ in range(12)] for _ in range(3)]
    open_ = [begun(drafters, list(text), logits) for text in texts]
    for _ in range(60):
        which = rng.randrange(3)
        same_step(open_[which], texts[which], logits)
        if rng.random() < 0.1:
            for session in open_[which]:
                session.close()
            texts[which] = [rng.randrange(vocab) for _ in range(9)]
            open_[which] = begun(drafters, list(texts[which]), logits)
    same_state(drafters)


@pytest.mark.parametrize("back", [False, True])
def test_a_state_saved_one_way_goes_on_the_other_way(take, back):
    vocab, rng = 80, random.Random(0)

    def logits(context: list[int]) -> torch.Tensor:
        return logits_of(context, vocab, 1, 30)

    first, second = two(take, vocab, nodes=12), two(take, vocab, nodes=12)
    text = [rng.randrange(vocab) for _ in range(20)]
    sessions = begun(first, list(text), logits)
    for _ in range(30):
        same_step(sessions, text, logits)
    for session in sessions:
        session.close()
    saved = first[not back].state_dict()
    for drafter in second:
        drafter.load_state_dict({name: tensor.clone() for name, tensor in saved.items()})
    text = text[-9:]
    sessions = begun([first[back], second[not back]], list(text), logits)
    for _ in range(30):
        same_step(sessions, text, logits)


def test_rows_that_name_a_token_twice_are_read_alike(take):
    """No top-k writes them, but a saved state may hold them."""
    drafters = two(take, 20, nodes=9, k=4, pairs=8)
    rng = np.random.default_rng(0)
    state = {name: tensor.clone() for name, tensor in drafters[0].state_dict().items()}
    for table in ("token", "pair"):
        state[f"{table}_ids"][:] = torch.from_numpy(rng.integers(0, 6, state[f"{table}_ids"].shape))
        state[f"{table}_levels"][:] = torch.from_numpy(rng.integers(0, 16, state[f"{table}_levels"].shape))
        state[f"{table}_seen"][:] = True
    for drafter in drafters:
        drafter.load_state_dict(state)
    for root in range(20):
        drafts = []
        for drafter in drafters:
            session = drafter.session()
            session.begin([1, 2, root])
            drafts.append(session.draft(root))
            session.close()
        assert drafts[0].tokens.tolist() == drafts[1].tokens.tolist()
        assert drafts[0].tree.parent_of == drafts[1].tree.parent_of


def test_nothing_is_compiled_while_it_decodes(take):
    from model import host_loops as loops

    take(True)
    model = toy_model("llama")
    for execution in ("eager", "static"):
        for settings in ({}, {"pairs": 0, "copy": False}, {"nodes": "auto", "calibrate": False}):
            generate(
                Target(model, execution=execution), DynamicRecycling(61, **settings), [5, 6, 7, 5, 6], max_new_tokens=40
            )
    for loop in (loops.extend, loops.rehash, loops.grow, loops.arrange, loops.learn):
        assert len(loop.signatures) == 1, loop


def test_equal_candidates_are_taken_in_the_order_they_are_listed_in(take):
    """A heap of its own orders them: the greatest worth first, of equals the least number."""
    from model import host_loops as loops

    rng, worth, listed = random.Random(0), np.empty(300), np.empty(300, dtype=np.int64)
    for _ in range(50):
        values = [rng.choice([0.0, 0.25, 0.5, rng.random()]) for _ in range(rng.randint(1, 300))]
        size, taken = 0, []
        for number, value in enumerate(values):
            size = loops._push(worth, listed, size, value, number)
            if rng.random() < 0.2:
                taken.append((worth[0], listed[0]))
                size = loops._pop(worth, listed, size)
        rest = []
        while size:
            rest.append((worth[0], listed[0]))
            size = loops._pop(worth, listed, size)
        assert sorted(number for _, number in taken + rest) == list(range(len(values)))
        assert all(a > b or (a == b and i < j) for (a, i), (b, j) in pairwise(rest))


def test_texts_are_compiled_where_drafts_are(take):
    for drafter in two(take, 10):
        assert (type(drafter.history.text) is SuffixAutomaton) == (not drafter.compiled)
        session = drafter.session()
        assert (type(session) is DynamicSession) == (not drafter.compiled)
