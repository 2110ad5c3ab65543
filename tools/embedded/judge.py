"""Decide whether an answer is right. The reference in the question file is all that is needed."""

from __future__ import annotations

import re
from difflib import SequenceMatcher

from tools.embedded.sandbox import same_behaviour

SIMILAR = 0.9
EQUATION = re.compile(r"(\d+) ([*+-]) (\d+) = (\d+)")


def words(text: str) -> list[str]:
    """Words, numbers and signs; line breaks count, since lists and tables are lines."""
    return re.findall(r"\w+|\n|[^\w\s]", text.strip())


def facts(text: str) -> list[str]:
    """Numbers and capitalised words, in their order: names, places, days, results."""
    return re.findall(r"\d+|\b[A-Z]\w*", text)


def equations_hold(text: str) -> bool:
    """Whether every equation of a text is true."""
    results = {"*": lambda a, b: a * b, "+": lambda a, b: a + b, "-": lambda a, b: a - b}
    return all(results[sign](int(a), int(b)) == int(c) for a, sign, b, c in EQUATION.findall(text))


def nearly_equal(reference: str, answer: str) -> bool:
    """All facts the same, in the same order, and at least nine words in ten."""
    if facts(reference) != facts(answer):
        return False
    return SequenceMatcher(None, words(reference), words(answer), autojunk=False).ratio() >= SIMILAR


def right(category: str, reference: str, answer: str) -> bool:
    """Judge one turn.

    Translation, summary, retrieval and extraction must be word for word; code must behave as the reference does;
    everything else may differ in a word or two, never in a number or a name.
    """
    if category in ("code", "coding"):
        return same_behaviour(reference, answer)
    if category in ("translation", "summarization", "rag", "extraction"):
        return words(reference) == words(answer)
    if category in ("math", "math_reasoning"):
        return nearly_equal(reference, answer) and equations_hold(answer)
    return nearly_equal(reference, answer)
