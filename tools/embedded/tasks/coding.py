"""A small function, then a change to it."""

from __future__ import annotations

import random
from dataclasses import replace

from tools.embedded.dialogue import Dialogue
from tools.embedded.tasks import code

ASKS = ["Write a Python function {name} to {task}.", "Please write {name}, a Python function to {task}."]


def make(rng: random.Random, easy: bool = False) -> Dialogue:
    """The second turn renames the function, documents it, or asks for a test."""
    f = code.function(rng)
    choice = rng.randrange(3)
    if choice == 0:
        name = code.name(rng)
        changed = replace(f, source=f.source.replace(f.name, name), name=name)
        follow, second = f"Rename the function to {name}.", changed.block()
    elif choice == 1:
        head, body = f.source.split("\n", 1)
        changed = replace(f, source=f'{head}\n    """{f.task[0].upper() + f.task[1:]}."""\n{body}')
        follow, second = "Add a docstring to the function.", changed.block()
    else:
        changed = replace(f, source=f"{f.source}\n\n\nprint({f.name}({f.argument}))")
        follow = f"Show how to call it with {f.argument}."
        second = changed.block()
    ask = rng.choice(ASKS).format(name=f.name, task=f.task)
    return Dialogue("coding", (ask, follow), (f.block(), second))
