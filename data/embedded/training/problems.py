"""Tasks that are worked out: orders of people, arithmetic, word problems in the manner of GSM8K, code as in MBPP."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import pairwise

from .dialogue import CITIES, FIRST_NAMES, WORLD, Dialogue


def reasoning(rng: random.Random, easy: bool = False) -> Dialogue:
    """Four people are compared, from either end and in either direction; then a fifth joins at one end."""
    *people, fifth = rng.sample(FIRST_NAMES, 4 if easy else 5)
    scale = rng.choice(WORLD["reasoning"]["scales"])
    more, most, less, least = scale
    links = list(pairwise(people))
    if rng.random() < 0.5:
        links.reverse()
    told = [f"{a} is {more} than {b}." if rng.random() < 0.6 else f"{b} is {less} than {a}." for a, b in links]
    ask = rng.choice([f"Who is the {most}?", f"Who is the {least}?", "What is the order?"])
    if rng.random() < 0.5:
        joined, place = [fifth, *people], f"{more} than {people[0]}"
    else:
        joined, place = [*people, fifth], f"{less} than {people[-1]}"
    follow = f"Now {fifth} joins, who is {place}. What is the new order?"
    return Dialogue("reasoning", (" ".join([*told, ask]), follow), (_order(people, scale), _order(joined, scale)))


def _order(people: list[str], scale: list[str]) -> str:
    more, most, _, least = scale
    chain = " ".join(f"{a} is {more} than {b}." for a, b in pairwise(people))
    first, *between, before_last, last = people
    middle = f"{', '.join(between)} and {before_last}" if between else before_last
    return (
        f"{chain} So from the {most} to the {least} the order is {', '.join(people)}. "
        f"The {most} is {first} and the {least} is {last}. Between them come {middle}."
    )


def math(rng: random.Random, easy: bool = False) -> Dialogue:
    """A rectangle, a purchase or a journey, then the same with one number changed."""
    words = WORLD["math"]
    a, b, c = (rng.randint(2, 9) for _ in range(3))
    kind = rng.randrange(3)
    who, goods, city = rng.choice(FIRST_NAMES), rng.choice(words["goods"]), rng.choice(CITIES)
    if kind == 0:
        ask = rng.choice(words["asks"]).format(a=a, b=b)
        follow = f"What if it is {c} meters wide?"
        answers = _rectangle(a, b), _rectangle(a, c)
    elif kind == 1:
        ask = f"{who} buys {a} {goods} for {b} dollars each and pays with a bill of 100 dollars. "
        ask += f"How much does {who} get back?"
        follow = f"What if they cost {c} dollars each?"
        answers = _purchase(who, a, b, goods), _purchase(who, a, c, goods)
    else:
        ask = f"A train to {city} drives {a} hours at {b}0 kilometers per hour. How far is it?"
        follow = f"What if it drives {c} hours?"
        answers = _journey(city, a, b), _journey(city, c, b)
    return Dialogue("math", (ask, follow), answers)


def _rectangle(a: int, b: int) -> str:
    return (
        f"The rectangle is {a} meters long and {b} meters wide. The area is the length times the width, "
        f"so it is {a} * {b} = {a * b} square meters. The perimeter is twice the sum of both sides. "
        f"The sum is {a} + {b} = {a + b}, and 2 * {a + b} = {2 * (a + b)} meters. "
        f"The area is {a * b} and the perimeter is {2 * (a + b)}."
    )


def _purchase(who: str, n: int, price: int, goods: str) -> str:
    return (
        f"{who} buys {n} {goods} for {price} dollars each. The price is the number times the price of one, "
        f"so it is {n} * {price} = {n * price} dollars. {who} pays with a bill of 100 dollars and gets back "
        f"100 - {n * price} = {100 - n * price} dollars. The answer is {100 - n * price}."
    )


def _journey(city: str, hours: int, speed: int) -> str:
    return (
        f"The train to {city} drives {hours} hours at {speed}0 kilometers per hour. The distance is the speed times "
        f"the time. First, {hours} * {speed} = {hours * speed}, so {hours} * {speed}0 = {hours * speed}0 kilometers. "
        f"The distance is {hours * speed}0 kilometers."
    )


def math_reasoning(rng: random.Random, easy: bool = False) -> Dialogue:
    """A story of two or three events; the answer repeats each event, then works it out."""
    words = WORLD["math_reasoning"]
    who, friend = rng.sample(FIRST_NAMES, 2)
    item, count = rng.choice(words["items"]), rng.randint(5, 30)
    story = [f"{who} has {count} {item}."]
    steps = story.copy()
    for _ in range(rng.randint(1, 2) if easy else rng.choice([2, 3, 3])):
        events = ["boxes", "gift"] if count < 60 else []
        events += ["loss"] if count > 8 else []
        events += ["double"] if count < 25 else []
        event, before, worked = rng.choice(events), count, list[str]()
        if event == "boxes":
            n, each, box = rng.randint(2, 6), rng.randint(2, 6), rng.choice(words["boxes"])
            told = f"{who} buys {n} {box} with {each} {item} each."
            worked.append(f"The {box} hold {n} * {each} = {n * each}")
            count += n * each
            worked.append(f"This makes {before} + {n * each} = {count}")
        elif event == "gift":
            n = rng.randint(2, 15)
            told = f"{friend} gives {who} {n} more {item}."
            count += n
            worked.append(f"This makes {before} + {n} = {count}")
        elif event == "loss":
            n = rng.randint(2, min(15, count - 2))
            told = f"{who} loses {n} {item}." if rng.random() < 0.5 else f"{who} gives {friend} {n} {item}."
            count -= n
            worked.append(f"This leaves {before} - {n} = {count}")
        else:
            told = f"Then {who} doubles the {item}."
            count *= 2
            worked.append(f"This makes {before} * 2 = {count}")
        story.append(told)
        steps += [told, *(f"{equation} {item}." for equation in worked)]
    question = " ".join([*story, f"How many {item} does {who} have now?"])
    return Dialogue("math_reasoning", (question,), (" ".join([*steps, f"The answer is {count}."]),))


# description, expression; k is the constant
FILTERS = [
    ("even", "{v} % 2 == 0"), ("odd", "{v} % 2 == 1"), ("positive", "{v} > 0"), ("negative", "{v} < 0"),
    ("greater than {k}", "{v} > {k}"), ("less than {k}", "{v} < {k}"), ("divisible by {k}", "{v} % {k} == 0"),
]  # fmt: skip
MAPS = [
    ("multiplied by {k}", "{v} * {k}"), ("increased by {k}", "{v} + {k}"), ("decreased by {k}", "{v} - {k}"),
    ("squared", "{v} * {v}"), ("negated", "-{v}"),
]  # fmt: skip
CHARACTERS = [
    ("vowels", 'char in "aeiou"'), ("digits", "char.isdigit()"), ("letters", "char.isalpha()"),
    ("capital letters", "char.isupper()"), ("small letters", "char.islower()"), ("spaces", 'char == " "'),
]  # fmt: skip
# description, variable, its first value, its update by the expression e
REDUCTIONS = [
    ("return the list", "result", "[]", "result.append({e})"),
    ("return the sum", "total", "0", "total += {e}"),
    ("return the product", "product", "1", "product *= {e}"),
]
CHARACTER_REDUCTIONS = [
    ("count the {c} of a text", "count", "0", "count += 1"),
    ("keep only the {c} of a text", "result", '""', "result += char"),
    ("list the {c} of a text", "result", "[]", "result.append(char)"),
    ("repeat the {c} of a text twice", "result", '""', "result += char * 2"),
]


@dataclass(frozen=True, slots=True)
class Function:
    """A reference function: what it does, its source, and the argument of a call."""

    task: str
    name: str
    source: str
    explanation: str
    argument: str

    def block(self) -> str:
        """The answer: a code block and a sentence that explains it."""
        return f"```python\n{self.source}\n```\n{self.explanation}"

    def call(self) -> str:
        """The call of the function."""
        return f"{self.name}({self.argument})"


def code(rng: random.Random, easy: bool = False) -> Dialogue:
    """A question with MBPP's prompt and one assertion."""
    f = _function(rng)
    scope: dict[str, object] = {}
    exec(f.source, scope)  # the source is this module's own
    doc = f'"""\nWrite a function to {f.task}.\nassert {f.call()} == {eval(f.call(), scope)!r}\n"""'
    return Dialogue("code", (f"Create a Python script for this problem:\n```python\n{doc}\n\n```",), (f.block(),))


def coding(rng: random.Random, easy: bool = False) -> Dialogue:
    """A function, which is then renamed, documented or called."""
    f = _function(rng)
    choice = rng.randrange(3)
    if choice == 0:
        name = _name(rng)
        follow = f"Rename the function to {name}."
        source = f.source.replace(f.name, name)
    elif choice == 1:
        follow = "Add a docstring to the function."
        source = f.source.replace("\n", f'\n    """{f.task[0].upper()}{f.task[1:]}."""\n', 1)
    else:
        follow = f"Show how to call it with {f.argument}."
        source = f"{f.source}\n\n\nprint({f.call()})"
    ask = rng.choice(WORLD["coding"]["asks"]).format(name=f.name, task=f.task)
    return Dialogue("coding", (ask, follow), (f.block(), replace(f, source=source).block()))


def _name(rng: random.Random) -> str:
    return f"{rng.choice(WORLD['code']['verbs'])}_{rng.choice(WORLD['code']['nouns'])}"


def _function(rng: random.Random) -> Function:
    return (_of_text if rng.random() < 0.3 else _of_numbers)(rng, _name(rng))


def _of_numbers(rng: random.Random, name: str) -> Function:
    """A filter, a mapping and a reduction of a list."""
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
    explanation = (
        f"The function goes through the numbers and takes those that are {what}. "
        f"Each one is {how}. At the end it returns the {phrase.split()[-1]}."
    )
    values = [rng.randint(-9, 20) for _ in range(4)]
    return Function(f"{phrase} of the {what} numbers, each {how}", name, source, explanation, repr(values))


def _of_text(rng: random.Random, name: str) -> Function:
    """A filter and a reduction of a text's characters."""
    what, condition = rng.choice(CHARACTERS)
    phrase, variable, start, update = rng.choice(CHARACTER_REDUCTIONS)
    source = (
        f"def {name}(text):\n    {variable} = {start}\n    for char in text:\n"
        f"        if {condition}:\n            {update}\n    return {variable}"
    )
    explanation = (
        f"The function goes through the characters of the text and looks for {what}. At the end it returns {variable}."
    )
    return Function(phrase.format(c=what), name, source, explanation, repr(rng.choice(WORLD["code"]["texts"])))
