"""Text kept from prompt to prompt: matched against, bounded, saved, forgotten by a reset."""

import pytest

from model.engine import Target, generate
from model.methods.copying.history import History, TextSession
from model.methods.copying.suffix import Suffix
from model.methods.copying.suffix_automaton import SuffixAutomaton
from tests.conftest import greedy, toy_model
from tests.model.every_method import make

V = 61


def history_of(tokens):
    return History(tokens, SuffixAutomaton, V)


def read(history, prompt):
    method = Suffix(V)
    method.history = history
    session = TextSession(method)
    session.begin(prompt)
    return session


def test_by_hand():
    history = history_of(8)
    first = read(history, [1, 2, 3, 4])
    first.text.extend([5, 6])
    first.close()
    second = read(history, [9, 3, 4])
    assert second.text.tokens == [1, 2, 3, 4, 5, 6, 9, 3, 4]
    assert second.text.copy(second.text.end, 2) == [5, 6], "3 4 was followed by 5 6"
    second.close()
    third = read(history, [7, 3]).text  # nine tokens are more than eight: the newest four stay
    assert third.tokens == [6, 9, 3, 4, 7, 3]
    assert read(history_of(0), [1, 2]).text.tokens == [1, 2]


def test_two_at_once_do_not_read_each_other_and_both_are_kept():
    history = history_of(100)
    read(history, [1, 2]).close()
    one = read(history, [3])
    other = read(history, [4])
    one.text.extend([5])
    other.text.extend([6])
    assert one.text.tokens == [1, 2, 3, 5]
    assert other.text.tokens == [1, 2, 4, 6]
    other.close()
    one.close()
    assert history.state_dict()["text"].tolist() == [1, 2, 4, 6, 3, 5]
    sessions = [read(history, [8, i, i]) for i in range(50)]
    assert sessions[0].text.tokens == [1, 2, 4, 6, 3, 5, 8, 0, 0]
    one.close()  # once more: it has nothing to give back
    for session in sessions[:-1]:
        session.close()
    assert len(history.pending) == 100, "what is said next to a borrowed text is bounded"
    history.reset()
    sessions[-1].close()
    assert history.state_dict()["text"].tolist() == [], "a reset forgets what is being read, too"


def test_a_conversation_appends_what_is_new():
    history = history_of(1000)
    prompt = [1, 2, 3]
    read(history, [9, 9]).close()
    for turn in range(5):
        session = read(history, prompt)
        session.text.extend([10 + turn, 11])
        session.close()
        prompt = [*prompt, 10 + turn, 11, 20]
    assert history.text.tokens == [9, 9, *prompt[:-1]]
    other = read(history, [1, 2, 4])
    assert other.text.tokens == [9, 9, *prompt[:-1], 1, 2, 4], "another prompt is appended whole"


@pytest.mark.parametrize(("name", "way"), [("dynamic", "eager"), ("suffix with history", "static")])
def test_what_is_kept_ends_where_the_answer_ends(name, way):
    """Drafts of a known text run past an end of sequence, and past the limit."""
    model = toy_model("llama")
    prompt = [5, 9, 5, 9, 7]
    target = Target(model)
    free = greedy(model, prompt, 40)
    drafter = make(name, target, {})
    said: list[int] = []
    for end in (39, 10, 17, 24):
        for settings in (dict(max_new_tokens=end + 1), dict(max_new_tokens=40, eos={free[end]})):
            out = generate(target, drafter, prompt, **settings, execution=way)
            assert out.tokens == free[: len(out.tokens)]
            said += prompt + out.tokens
    assert drafter.history.text.tokens == said
