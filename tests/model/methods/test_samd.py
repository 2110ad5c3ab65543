"""SAM-Decoding with EAGLE-2 against the public code's own trace, its copies by hand, what the head reads later.

samd_trace.jsonl: one line a turn of the sample bench (prompts and texts are those of official_trace.jsonl), recorded
from github.com/hemingkx/Spec-Bench (commit fd2c1cd, SamdModel.generate, transformers 4.37.1, torch 2.13, float32, one
thread) with the shipped EAGLE head. `sources`: a letter a step, c for a copy and t for a tree. `drafts`: step and
tokens of some drafts, of trees without their parents. In the mode `public` the turns follow each other as the code does
it, which leaves what the head has not read to the next request; in `fresh` that is thrown away.
"""

import pytest
import torch

from model.engine import Target, generate
from model.files import ROOT
from model.methods.samd import Samd
from model.structures.suffix_automaton import SuffixAutomaton
from tests.conftest import toy_model
from tests.model.methods.heads import write_eagle
from tests.model.methods.public_traces import SOME_OR_ALL, embedded, lines, retaken, watched
from tests.model.sessions import each_session

TRACE = lines("samd_trace.jsonl")


def leak_pairs(drafter):
    """Do as the public code: what no draft has read comes before the next prompt, whose first token follows it."""
    left = []

    def watch(session):
        close, begin = session.close, session.begin

        def closing():
            left[:] = [
                tuple(torch.cat(parts) for parts in zip(*session.partner._pairs, strict=True))
            ]
            close()

        def beginning(prompt):
            for hidden, tokens in left:
                session.partner._pairs.append(
                    (hidden, torch.cat((tokens[:-1], torch.tensor(prompt[:1]))))
                )
            return begin(prompt)

        session.close, session.begin = closing, beginning

    each_session(drafter, watch)


def check(turns, execution="eager", leaks=False):
    """Take the turns; returns the drafts that were compared, and the steps."""
    target, compared = Target(embedded()), 0
    drafter = Samd(target, head_path=str(ROOT / "data/embedded/eagle"))
    drafts = watched(drafter)
    if leaks:
        leak_pairs(drafter)
    for turn in turns:
        drafts.clear()
        out = retaken(drafter, target, turn, execution)
        assert (
            "".join("t" if draft.source == "eagle2" else "c" for draft in drafts) == turn["sources"]
        ), turn["turn"]
        sizes = {"c": 40, "t": 63}
        assert [step.nodes for step in out.steps] == [1] + [
            sizes[source] for source in turn["sources"]
        ]
        for step, tokens in turn.get("drafts", ()):
            made = drafts[step].tokens.tolist()
            assert (
                made == tokens if turn["sources"][step] == "c" else sorted(made) == sorted(tokens)
            ), step
            compared += 1
    return compared, sum(len(turn["accept_lengths"]) for turn in turns)


@SOME_OR_ALL
def test_every_step_and_draft_is_the_public_codes(execution, every):
    turns = [turn for turn in TRACE if turn["mode"] == "fresh"]
    compared, steps = check(turns[::every], execution)
    assert compared >= 10 and (every > 1 or (compared, steps, len(turns)) == (54, 300, 23))


@pytest.mark.slow
def test_what_the_public_code_leaves_to_the_next_request_is_all_that_differs():
    turns = [turn for turn in TRACE if turn["mode"] == "public"]
    assert check(turns, leaks=True) == (0, 281) and len(turns) == 20


COPIES = [  # text, root, nodes; the match; root and what is copied
    ("1 2 3 4 1 2", 3, 6, 3, "3 4 1 2 0 0"),
    ("1 2 3 1 2 4 1 2", 3, 6, 3, "3 1 2 4 1 2"),
    ("1 2 3 1 2 4 1 2", 4, 6, 3, "4 1 2 0 0 0"),
    ("5 6 7 8 9 1 5 6 7 8", 9, 8, 5, "9 1 5 6 7 8 0 0"),
    ("5 6 7 8 9 1 2 3 4 5 6 7 8", 9, 4, 5, "9 1 2 3"),
    # two tokens behind the first 7 8 9 7 8 9, five behind 7 8 9
    (
        "7 8 9 7 8 9 7 8",
        9,
        6,
        6,
        "9 7 8 9 7 8",
    ),
    ("7 7 7 7 7 7 7", 7, 5, 7, "7 7 7 7 7"),
    ("1 2 3", 9, 4, 0, "9 1 2 3"),
]


def test_copies_of_first_occurrences_are_the_public_automatons():
    for text, root, nodes, match, copied in COPIES:
        automaton = SuffixAutomaton([*map(int, text.split()), root])
        assert automaton.length == match, text
        assert [root, *automaton.copy_first(nodes - 1)] == [*map(int, copied.split())], text


def test_the_head_reads_later_what_copied_steps_added(tmp_path):
    """A copy is not drafted by the head; its next tree is that of a head that read all of the text."""
    model = toy_model("llama")
    target, prompt = Target(model), [5, 6, 7, 8] * 3
    drafter = Samd(
        target, head_path=write_eagle(tmp_path, model), min_match=2, max_draft=40, nodes=12
    )
    drafts, read = watched(drafter), []

    def watch(session):
        catch_up = session.partner.catch_up

        def catching_up():
            read.append(sum(len(tokens) for _, tokens in session.partner._pairs))
            return catch_up()

        session.partner.catch_up = catching_up

    each_session(drafter, watch)
    out = generate(target, drafter, prompt, max_new_tokens=40)
    sources = [draft.source for draft in drafts]
    assert {"suffix", "eagle2"} == set(sources)
    last, alone = len(sources) - 1 - sources[::-1].index("eagle2"), drafter.partner
    known = prompt + [token for step in out.steps[: last + 1] for token in step.tokens]
    assert max(read[1:]) > drafter.partner.depth and sum(read) == len(known) - 1
    again = watched(alone)
    generate(target, alone, known[:-1], max_new_tokens=2)
    assert again[0].tokens.tolist() == drafts[last].tokens.tolist()
