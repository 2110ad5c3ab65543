"""Rectangles, shopping and travel, then the same problem with a number changed."""

from __future__ import annotations

import random

from tools.embedded.dialogue import Dialogue
from tools.embedded.words import CITIES, FIRST_NAMES

GOODS = ["pens", "cups", "hats", "balls", "tickets"]


def _rectangle(a: int, b: int) -> str:
    return (
        f"The rectangle is {a} meters long and {b} meters wide. The area is the length times the width, "
        f"so it is {a} * {b} = {a * b} square meters. The perimeter is twice the sum of both sides. "
        f"The sum is {a} + {b} = {a + b}, and 2 * {a + b} = {2 * (a + b)} meters. "
        f"The area is {a * b} and the perimeter is {2 * (a + b)}."
    )


def _shopping(who: str, n: int, price: int, goods: str) -> str:
    return (
        f"{who} buys {n} {goods} for {price} dollars each. The price is the number times the price of one, "
        f"so it is {n} * {price} = {n * price} dollars. {who} pays with a bill of 100 dollars and gets back "
        f"100 - {n * price} = {100 - n * price} dollars. The answer is {100 - n * price}."
    )


def _travel(city: str, hours: int, speed: int) -> str:
    return (
        f"The train to {city} drives {hours} hours at {speed}0 kilometers per hour. The distance is the speed times "
        f"the time. First, {hours} * {speed} = {hours * speed}, so {hours} * {speed}0 = {hours * speed}0 kilometers. "
        f"The distance is {hours * speed}0 kilometers."
    )


def make(rng: random.Random, easy: bool = False) -> Dialogue:
    """A first problem and a change of one number."""
    a, b, c = rng.randint(2, 9), rng.randint(2, 9), rng.randint(2, 9)
    kind = rng.randrange(3)
    who, goods, city = rng.choice(FIRST_NAMES), rng.choice(GOODS), rng.choice(CITIES)
    if kind == 0:
        ask = rng.choice(
            [
                f"A rectangle is {a} meters long and {b} meters wide. What is its area and its perimeter?",
                f"Find the area and the perimeter of a rectangle that is {a} meters long and {b} meters wide.",
            ]
        )
        first, second = _rectangle(a, b), _rectangle(a, c)
        follow = f"What if it is {c} meters wide?"
    elif kind == 1:
        ask = (
            f"{who} buys {a} {goods} for {b} dollars each and pays with a bill of 100 dollars. "
            f"How much does {who} get back?"
        )
        first, second = _shopping(who, a, b, goods), _shopping(who, a, c, goods)
        follow = f"What if they cost {c} dollars each?"
    else:
        ask = f"A train to {city} drives {a} hours at {b}0 kilometers per hour. How far is it?"
        first, second = _travel(city, a, b), _travel(city, c, b)
        follow = f"What if it drives {c} hours?"
    return Dialogue("math", (ask, follow), (first, second))
