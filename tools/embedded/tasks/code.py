"""Small Python functions in the manner of MBPP, composed of a filter, a mapping and a reduction."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tools.embedded.dialogue import Dialogue

VERBS = ["get", "find", "make", "compute", "collect", "build", "select", "process", "handle", "solve"]
NOUNS = ["values", "numbers", "result", "items", "output", "data", "list", "answer", "elements", "things"]

# description, expression; K is the constant
FILTERS = [
    ("even", "{v} % 2 == 0"), ("odd", "{v} % 2 == 1"), ("positive", "{v} > 0"), ("negative", "{v} < 0"),
    ("greater than {k}", "{v} > {k}"), ("less than {k}", "{v} < {k}"), ("divisible by {k}", "{v} % {k} == 0"),
]  # fmt: skip
MAPS = [
    ("multiplied by {k}", "{v} * {k}"), ("increased by {k}", "{v} + {k}"), ("decreased by {k}", "{v} - {k}"),
    ("squared", "{v} * {v}"), ("negated", "-{v}"),
]  # fmt: skip
REDUCTIONS = [
    ("return the list", "result", "[]", "result.append({e})"),
    ("return the sum", "total", "0", "total += {e}"),
    ("return the product", "product", "1", "product *= {e}"),
]
CHARACTERS = [
    ("vowels", 'char in "aeiou"'), ("digits", "char.isdigit()"), ("letters", "char.isalpha()"),
    ("capital letters", "char.isupper()"), ("small letters", "char.islower()"), ("spaces", 'char == " "'),
]  # fmt: skip
CHARACTER_REDUCTIONS = [
    ("count the {c} of a text", "count", "0", "count += 1"),
    ("keep only the {c} of a text", "result", '""', "result += char"),
    ("list the {c} of a text", "result", "[]", "result.append(char)"),
    ("repeat the {c} of a text twice", "result", '""', "result += char * 2"),
]
WORDS = ["Hello World 42", "Blue Sky 7", "Red Apple 15", "Big Tree 9", "Good Day 31", "My Old Cat 6"]


@dataclass(frozen=True, slots=True)
class Function:
    """A reference function: what it does, its source, and a call for the assertion."""

    task: str
    name: str
    source: str
    explanation: str
    argument: str

    def block(self) -> str:
        """The answer: a code block and a sentence that explains it."""
        return f"```python\n{self.source}\n```\n{self.explanation}"

    def expected(self) -> str:
        """The value of the call in the assertion."""
        scope: dict[str, object] = {}
        exec(self.source, scope)  # the source is this module's own
        return repr(eval(f"{self.name}({self.argument})", scope))


def _numbers(rng: random.Random, name: str) -> Function:
    what, condition = rng.choice(FILTERS)
    how, expression = rng.choice(MAPS)
    phrase, variable, start, update = rng.choice(REDUCTIONS)
    k, m = rng.randint(2, 9), rng.randint(2, 9)
    what, how = what.format(k=k), how.format(k=m)
    body = update.format(e=expression.format(v="number", k=m))
    source = (
        f"def {name}(numbers):\n    {variable} = {start}\n    for number in numbers:\n"
        f"        if {condition.format(v='number', k=k)}:\n            {body}\n    return {variable}"
    )
    task = f"{phrase} of the {what} numbers, each {how}"
    explanation = (
        f"The function goes through the numbers and takes those that are {what}. "
        f"Each one is {how}. At the end it returns the {phrase.split()[-1]}."
    )
    values = [rng.randint(-9, 20) for _ in range(4)]
    return Function(task, name, source, explanation, repr(values))


def _text(rng: random.Random, name: str) -> Function:
    what, condition = rng.choice(CHARACTERS)
    phrase, variable, start, update = rng.choice(CHARACTER_REDUCTIONS)
    source = (
        f"def {name}(text):\n    {variable} = {start}\n    for char in text:\n"
        f"        if {condition}:\n            {update}\n    return {variable}"
    )
    explanation = (
        f"The function goes through the characters of the text and looks for {what}. At the end it returns {variable}."
    )
    return Function(phrase.format(c=what), name, source, explanation, repr(rng.choice(WORDS)))


def name(rng: random.Random) -> str:
    """A function name."""
    return f"{rng.choice(VERBS)}_{rng.choice(NOUNS)}"


def function(rng: random.Random) -> Function:
    """A random reference function."""
    return (_text if rng.random() < 0.3 else _numbers)(rng, name(rng))


def make(rng: random.Random, easy: bool = False) -> Dialogue:
    """A question with MBPP's prompt and one assertion."""
    f = function(rng)
    doc = f'"""\nWrite a function to {f.task}.\nassert {f.name}({f.argument}) == {f.expected()}\n"""'
    return Dialogue("code", (f"Create a Python script for this problem:\n```python\n{doc}\n\n```",), (f.block(),))
