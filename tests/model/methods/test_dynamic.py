"""Dynamic recycling: every draft against a slow reference."""

import heapq
import math
import random
from bisect import bisect_right
from collections import Counter
from dataclasses import replace

import pytest
import torch

from model.engine import Target, generate
from model.methods.copying import suffix_automaton
from model.methods.dynamic import dynamic_loops as loops
from model.methods.dynamic.dynamic import DynamicRecycling, DynamicSession
from tests.conftest import greedy, toy_model

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
MATCHES = (1, 2, 3, 4, 5, 8, 16)  # the least length of each class but the first
ACCEPT_PROBS = (0.0, 0.0, 0.2, 0.45, 0.55, 0.7, 0.85, 0.85)
PRIOR = 4
LEAST_LEVEL = 15
UNLISTED = 8


class Slow:
    """The same drafts by dictionaries, whole searches of the text, and every path that might be
    among the n best.

    Written from the method's docstrings, and shares nothing with it; if a match was continued in
    several ways it is given the one that the method took. A kind of candidates is (source, sibling
    source, match, copied, level).
    """

    def __init__(self, nodes, k, eos, keeps_text):
        self.nodes = nodes
        self.k = k
        self.eos = eos
        self.keeps_text = keeps_text
        self.text = []
        self.by_token = {}
        self.by_pair = {}
        self.seen = Counter()  # candidates by kind
        self.accepted = Counter()  # those of them that were the next token

    def begin(self, prompt):
        self.text = [*self.text, *prompt] if self.keeps_text else [*prompt]
        self.sibling_children = []
        self.siblings = []
        self.child_kinds = {}  # of this step: kinds of candidates by path

    def levels(self, logits):
        probabilities = torch.softmax(logits.double(), -1).tolist()
        best = sorted(range(V), key=lambda i: -float(logits[i]))[: self.k]
        return [(i, min(int(-math.log2(probabilities[i])), LEAST_LEVEL)) for i in best]

    def match(self, path):
        """The longest end of text and path that was followed by something in the text, and what
        followed it.
        """
        text = self.text
        end = (text + path)[::-1]
        length = 0
        places = range(len(text))  # of what follows an occurrence
        while True:
            longer = [i for i in places if i > length and text[i - length - 1] == end[length]]
            if not longer:
                return length, {text[i] for i in places} if length else set()
            places = longer
            length += 1

    def kinds_below(self, path, copied, length):
        """Candidates and their kinds. `copied` says which of several continuations the method
        took.
        """
        before, token = (self.text + path)[-2:]
        if path and token in self.eos:
            return {}
        expected, following = self.match(path)
        assert length == expected
        assert copied in (following or {None})
        place = bisect_right(MATCHES, length)
        pair = self.by_pair.get((before, token))
        rows = {"pair": pair or [], "backoff" if pair else "token": self.by_token.get(token, [])}
        rows["copied"] = [] if copied is None else [(copied, 0)]
        kinds = {}
        for source, row in rows.items():
            for i, level in row:
                kinds.setdefault(i, (source, 0, place, i == copied, level))

        guesses = {"sibling_children": self.sibling_children, "siblings": self.siblings}
        for number, source in enumerate(guesses if not path else (), 1):
            for i, level in guesses[source]:
                if i not in kinds:
                    kinds[i] = (source, 0, 0, False, level)
                elif kinds[i][1] == 0:
                    kinds[i] = (kinds[i][0], number, *kinds[i][2:])
        return kinds

    def children(self, text, path):
        if path not in self.child_kinds:
            automaton = suffix_automaton.Text(*text.arrays)
            counts = automaton.counts[0]
            state = int(automaton.states["link"][counts["whole"]])
            length = int(counts["match"])
            for token in path:
                state, length = suffix_automaton.transfer(automaton, state, length, token)
            copied, length = suffix_automaton.following(automaton, state, length)
            kinds = self.kinds_below([*path], copied if length else None, length)
            self.child_kinds[path] = kinds
        return self.child_kinds[path]

    def rate(self, kind):
        """The share of this kind's candidates that were accepted, with PRIOR more at the guess."""
        source, _, place, copied, level = kind
        guess = (1 - ACCEPT_PROBS[place]) * TRUST[source] * 2.0 ** -(level + 0.5)
        if copied:
            guess = max(guess, ACCEPT_PROBS[place])
        return (PRIOR * guess + self.accepted[kind]) / (PRIOR + self.seen[kind])

    def best_first(self, text):
        """The n most likely paths and their likelihoods, by looking at every path that is as
        likely.
        """
        best = {}
        waiting = [(-1.0, ())]
        while waiting and len(best) <= self.nodes:
            likelihood, path = heapq.heappop(waiting)
            best[path] = -likelihood
            for token, kind in self.children(text, path).items():
                heapq.heappush(waiting, (likelihood * self.rate(kind), (*path, token)))
        del best[()]
        return best

    def likelihood(self, text, path):
        kinds = [self.children(text, path[:i])[token] for i, token in enumerate(path)]
        return math.prod(map(self.rate, kinds))

    def learn_prompt(self, prompt, start, logits):
        rows = [self.levels(row) for row in logits]
        for i, row in enumerate(rows, start):
            self.by_token[prompt[i]] = row
            self.by_pair[prompt[max(i - 1, 0)], prompt[i]] = row
        self.siblings = [(i, level) for i, level in rows[-1] if i != self.text[-1]]

    def learn(self, text, verification):
        tree = verification.draft.tree
        tokens = verification.draft.tokens.tolist()
        rows = [self.levels(row) for row in verification.logits]
        chosen = verification.logits.argmax(-1).tolist()
        paths = [tuple(tokens[i] for i in chain[1:]) for chain in tree.chain_of]
        for node, path in enumerate(paths):
            for token, kind in self.children(text, path).items():
                self.seen[kind] += 1
                self.accepted[kind] += token == chosen[node]
        self.child_kinds = {}

        accepted = verification.accepted.tolist()
        for node in sorted(range(len(tree)), key=accepted.__getitem__):  # accepted nodes are last
            before, token = [*self.text, *paths[node]][-2:]
            self.by_token[token] = rows[node]
            self.by_pair[before, token] = rows[node]

        node = verification.node
        self.siblings = [(i, level) for i, level in rows[node] if i != chosen[node]]
        mass = Counter()
        total = 0.0
        for child in range(1, len(tree)):
            if tree.parent_of[child] == node:
                weight = 0.5 ** dict(rows[node]).get(tokens[child], UNLISTED)
                total += weight
                for i, level in rows[child]:
                    mass[i] += weight * 0.5**level
        best = mass.most_common(self.k)
        self.sibling_children = [
            (i, min(int(math.log2(total / value)), LEAST_LEVEL)) for i, value in best
        ]
        self.text += verification.tokens


class Compared(DynamicSession):
    """A session whose drafts and rates are compared with the slow ones."""

    slow: Slow
    drafts: list[set[int]]  # their tokens

    def begin(self, prompt):
        self.slow.begin(prompt)
        return super().begin(prompt)

    def observe_prompt(self, prompt, start, logits):
        self.slow.learn_prompt(prompt, start, logits)
        super().observe_prompt(prompt, start, logits)

    def draft(self, root):
        expected = self.slow.best_first(self.text)
        made = super().draft(root)
        tokens = made.tokens.tolist()
        paths = [tuple(tokens[i] for i in chain[1:]) for chain in made.tree.chain_of[1:]]
        assert len(paths) == len(set(paths)) == len(expected)
        # of those that are as likely as the last one others may be taken
        for path in set(paths) - expected.keys():
            least = min(expected.values())
            assert self.slow.likelihood(self.text, path) == pytest.approx(least)
        self.drafts.append(set(tokens[1:]))
        return made

    def observe(self, verification):
        self.slow.learn(self.text, verification)
        super().observe(verification)
        for kind in self.slow.seen:
            source, *features = kind
            rate = self.drafter.rates.rates[[*TRUST].index(source), *map(int, features)]
            assert math.isclose(rate, self.slow.rate(kind)), kind


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
    eos = set(greedy(model, prompts()[0], 40)[::13])
    settings = dict(history_tokens=history_tokens, recycle_prompt=recycle_prompt)
    drafter = DynamicRecycling(V, nodes=nodes, k=k, eos=eos, **settings)
    drafter.needs = replace(drafter.needs, logits=True)  # the slow one reads them
    slow = Slow(nodes, k, eos, history_tokens > 0)
    drafts = []

    def session():
        made = Compared(drafter)
        made.slow = slow
        made.drafts = drafts
        return made

    drafter.session = session
    for prompt in prompts():
        out = generate(Target(model), drafter, prompt, max_new_tokens=40)
        assert out.tokens == greedy(model, prompt, 40)
    assert len(drafts) > 20
    assert any(eos & tokens for tokens in drafts)
    assert max(slow.accepted.values()) > 5, "there was something to learn"


def test_every_setting_changes_what_is_drafted(llama):
    target = Target(llama)
    lengths = []
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
