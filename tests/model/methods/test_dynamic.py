"""Dynamic recycling: every draft against a slow reference."""

import heapq
import math
import random
from dataclasses import replace

import pytest
import torch

from model.engine import Target, generate
from model.methods.dynamic import DynamicRecycling
from model.structures import dynamic_loops as loops
from model.structures import suffix_automaton
from tests.conftest import greedy, toy_model
from tests.model.sessions import each_session

V = 61


def prompts(count=3, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(3, V) for _ in range(8 + 5 * i)] * 2 for i in range(count)]


# What a candidate is worth before anything is learnt, by source, and by match.
TRUST = {
    "pair": 0.9,
    "token": 0.6,
    "backoff": 0.1,
    "sibling_children": 0.3,
    "siblings": 0.1,
    "copied": 0.0,
}
ACCEPT_PROBS = (0.0, 0.0, 0.2, 0.45, 0.55, 0.7, 0.85, 0.85)
PRIOR, LEAST_LEVEL, UNLISTED = 4, 15, 8


class Slow:
    """The same drafts by dictionaries, whole searches of the text, and every path that might be among the n best.

    Written from the method's docstrings, and shares nothing with it; if a match was continued in several ways it
    is given the one that the method took. A kind of candidates is (source, sibling source, match, copied, level).
    """

    def __init__(self, nodes, k, eos):
        self.nodes, self.k, self.eos, self.text = nodes, k, eos, []
        self.by_token, self.by_pair, self.sibling_children, self.siblings = {}, {}, [], []
        self.seen, self.accepted = {}, {}  # by kind: candidates, and those that were the next token
        self.child_kinds = {}  # of this step: kinds of candidates by path

    def levels(self, logits):
        probabilities = torch.softmax(logits.double(), -1)
        best = sorted(range(V), key=lambda i: -float(logits[i]))[: self.k]
        return [(i, min(int(-math.log2(float(probabilities[i]))), LEAST_LEVEL)) for i in best]

    def match(self, path):
        """The longest end of text and path that was followed by something in the text, and what followed it."""
        text, end = self.text, (self.text + path)[::-1]
        length, places = 0, [*range(len(text))]  # of what follows an occurrence
        while longer := [
            i for i in places if length < min(i, len(end)) and text[i - length - 1] == end[length]
        ]:
            length, places = length + 1, longer
        return length, {text[i] for i in places} if length else set()

    def below(self, path, copied):
        """Candidates and their kinds. `copied` says which of several continuations the method took; checked here."""
        before, token = (self.text + path)[-2:]
        if path and token in self.eos:
            return {}
        length, following = self.match(path)
        assert copied[1] == length and copied[0] in (following or {None})
        copied = copied[0]
        place = (
            0
            if copied is None
            else length
            if length < 5
            else 5
            if length < 8
            else 6
            if length < 16
            else 7
        )
        pair, single = self.by_pair.get((before, token)), self.by_token.get(token)
        kinds_of = {i: ("pair", 0, place, i == copied, level) for i, level in pair or []}
        for i, level in single or []:
            kinds_of.setdefault(i, ("backoff" if pair else "token", 0, place, i == copied, level))
        if copied is not None:
            kinds_of.setdefault(copied, ("copied", 0, place, True, 0))
        if not path:
            marked = set()
            for number, source, listed in (
                (1, "sibling_children", self.sibling_children),
                (2, "siblings", self.siblings),
            ):
                for i, level in listed:
                    if i not in kinds_of:
                        kinds_of[i] = (source, 0, 0, False, level)
                    elif i not in marked:
                        kinds_of[i] = (kinds_of[i][0], number, *kinds_of[i][2:])
                        marked.add(i)
        return kinds_of

    def children(self, text, path):
        if tuple(path) not in self.child_kinds:
            automaton = suffix_automaton.Text(*text.arrays)
            counts = automaton.counts[0]
            state, length = int(automaton.states["link"][counts["whole"]]), int(counts["match"])
            for token in path:
                state, length = suffix_automaton.transfer(automaton, state, length, token)
            copied, length = suffix_automaton.following(automaton, state, length)
            self.child_kinds[tuple(path)] = self.below(path, (copied if length else None, length))
        return self.child_kinds[tuple(path)]

    def weight(self, kind):
        """The share of this kind's candidates that were accepted, with PRIOR more at the guess."""
        source, _, place, copied, level = kind
        guess = (1 - ACCEPT_PROBS[place]) * TRUST[source] * 2.0 ** -(level + 0.5)
        guess = max(guess, ACCEPT_PROBS[place]) if copied else guess
        return (PRIOR * guess + self.accepted.get(kind, 0)) / (PRIOR + self.seen.get(kind, 0))

    def best_first(self, text):
        """The n most likely paths and their likelihoods, by looking at every path that is as likely."""
        best, open_ = [], [(-1.0, [])]
        while open_ and len(best) <= self.nodes:
            likelihood, path = heapq.heappop(open_)
            best.append((-likelihood, tuple(path)))
            for token, kind in self.children(text, path).items():
                heapq.heappush(open_, (likelihood * self.weight(kind), [*path, token]))
        return best[1:]

    def likelihood(self, text, path):
        return math.prod(
            self.weight(self.children(text, list(path[:i]))[token]) for i, token in enumerate(path)
        )

    def learn_prompt(self, prompt, start, logits):
        rows = [self.levels(row) for row in logits]
        for i, row in enumerate(rows, start):
            self.by_token[prompt[i]] = self.by_pair[prompt[max(i - 1, 0)], prompt[i]] = row
        self.siblings = [(i, level) for i, level in rows[-1] if i != self.text[-1]]

    def learn(self, text, verification):
        draft, tree, logits = verification.draft, verification.draft.tree, verification.logits
        tokens, rows = draft.tokens.tolist(), [self.levels(row) for row in logits]
        paths = [[tokens[i] for i in tree.chain_of[node]][1:] for node in range(len(tree))]
        for node, path in enumerate(paths):
            chosen = int(logits[node].argmax())
            for token, kind in self.children(text, path).items():
                self.seen[kind] = self.seen.get(kind, 0) + 1
                self.accepted[kind] = self.accepted.get(kind, 0) + (token == chosen)
        self.child_kinds = {}
        for accepted in (False, True):  # accepted nodes are written last
            for node, path in enumerate(paths):
                if bool(verification.accepted[node]) == accepted:
                    before, token = (self.text + path)[-2:]
                    self.by_token[token] = self.by_pair[before, token] = rows[node]
        node, siblings = verification.node, dict(rows[verification.node])
        root = int(logits[node].argmax())
        self.siblings = [(i, level) for i, level in rows[node] if i != root]
        mass, whole = {}, 0.0
        for child in range(1, len(tree)):
            if tree.parent_of[child] == node:
                weight = 0.5 ** siblings.get(tokens[child], UNLISTED)
                whole += weight
                for i, level in rows[child]:
                    mass[i] = mass.get(i, 0.0) + weight * 0.5**level
        first = sorted(mass, key=lambda i: -mass[i])[: self.k]
        self.sibling_children = [
            (i, min(int(math.log2(whole / mass[i])), LEAST_LEVEL)) for i in first
        ]
        self.text += verification.tokens


@pytest.mark.parametrize(
    ("nodes", "k", "seed", "recycle_prompt", "history_tokens"),
    [
        (1, 8, 0, True, 0),
        (7, 2, 1, True, 1000),
        (12, 4, 2, False, 0),
        (24, 8, 3, True, 1000),
        (60, 8, 4, True, 0),
    ],
)
def test_every_draft_is_that_of_a_slow_reference(nodes, k, seed, recycle_prompt, history_tokens):
    """Nothing is drafted below an end, although this text goes on behind it."""
    model = toy_model("llama", seed=seed)
    settings, eos = (
        dict(history_tokens=history_tokens, recycle_prompt=recycle_prompt),
        set(greedy(model, prompts()[0], 40)[::13]),
    )
    drafter = DynamicRecycling(V, nodes=nodes, k=k, eos=eos, **settings)
    compared, ends_drafted = [], 0

    def watch(session):
        slow, draft, observe, begin = (
            Slow(nodes, k, eos),
            session.draft,
            session.observe,
            session.begin,
        )
        slow.by_token, slow.by_pair, slow.seen, slow.accepted = (
            tables  # what is kept between prompts
        )
        observe_prompt = session.observe_prompt

        def began(prompt):
            text = history if history_tokens else []
            text += prompt
            slow.text = text
            return begin(prompt)

        def observed_prompt(prompt, start, logits):
            slow.learn_prompt(prompt, start, logits)
            observe_prompt(prompt, start, logits)

        def drafted(root):
            text = session.text
            expected = slow.best_first(text)
            made = draft(root)
            tokens = made.tokens.tolist()
            paths = [tuple(tokens[i] for i in chain[1:]) for chain in made.tree.chain_of][1:]
            assert len(paths) == len(set(paths)) == len(expected)
            # the same paths, but that of some which are as likely as the last one others may be taken
            others = set(paths) - {path for _, path in expected}
            assert all(
                slow.likelihood(text, path) == pytest.approx(expected[-1][0]) for path in others
            )
            compared.append(len(paths))
            nonlocal ends_drafted
            ends_drafted += bool(eos & set(tokens[1:]))
            return made

        def observed(verification):
            slow.learn(session.text, verification)
            observe(verification)
            for kind in slow.seen:
                source, *features = kind
                prob = drafter.rates.rates[sources.index(source), *map(int, features)]
                assert math.isclose(prob, slow.weight(kind)), kind

        session.begin, session.draft, session.observe = began, drafted, observed
        session.observe_prompt = observed_prompt

    tables, history, sources = ({}, {}, {}, {}), list[int](), [*TRUST]
    drafter.needs = replace(drafter.needs, logits=True)  # the slow one reads them
    each_session(drafter, watch)
    for prompt in prompts():
        assert generate(Target(model), drafter, prompt, max_new_tokens=40).tokens == greedy(
            model, prompt, 40
        )
    assert len(compared) > 20 and max(compared) == nodes and ends_drafted, (
        "there was something to compare"
    )
    assert max(tables[3].values()) > 5, "there was something to learn"


def test_every_setting_changes_what_is_drafted(llama):
    target, lengths = Target(llama), []
    off = {
        "pairs": 0,
        "copy": False,
        "siblings": False,
        "calibrate": False,
        "recycle_prompt": False,
    }
    for setting in ({}, *({name: value} for name, value in off.items())):
        drafter = DynamicRecycling(V, nodes=12, **setting)
        answers = [generate(target, drafter, prompt, max_new_tokens=60) for prompt in prompts()]
        lengths.append([out.accept_lengths for out in answers])
    assert len({str(each) for each in lengths}) == 6


def test_nothing_is_compiled_while_it_decodes():
    model = toy_model("llama")
    for execution in ("eager", "static"):
        for settings in ({}, {"pairs": 0, "copy": False}, {"nodes": "auto", "calibrate": False}):
            target = Target(model)
            generate(
                target,
                DynamicRecycling(V, **settings),
                [5, 6, 7, 5, 6],
                max_new_tokens=40,
                execution=execution,
            )
    called = loops.grow, loops.arrange, loops.learn, loops.learn_prompt
    for loop in (suffix_automaton.extend, suffix_automaton.rehash, *called):
        assert len(loop.signatures) == 1, loop


def test_rows_of_a_prompts_end_know_the_token_before_them():
    """Where the size is tuned while decoding, only the prompt's last rows are learnt from."""
    drafter = DynamicRecycling(V, nodes=8)
    session = drafter.session()
    session.begin([3, 5, 6, 9, 1, 2])
    session.skip([7])  # the first step went with the prompt: 7 is the root
    session.observe_prompt([3, 5, 6, 9, 1, 2], 4, torch.randn(2, V))
    keys = drafter.rows.rows.keys
    assert sorted(keys[keys >= 0].tolist()) == [1, 2, 1 << 32 | 2, 9 << 32 | 1]
