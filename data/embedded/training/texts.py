"""Tasks of text: written from a few words, extracted, translated, summed up, and quoted from the right passage."""

from __future__ import annotations

import json
import random

from .dialogue import CITIES, DAYS, FIRST_NAMES, LAST_NAMES, WORLD, Dialogue

# kind of word: (German, English) pairs
DICTIONARY: dict[str, list[tuple[str, str]]] = {kind: [*words.items()] for kind, words in WORLD["translation"].items()}
ACCUSATIVE = {"der": "den", "die": "die", "das": "das"}


def writing(rng: random.Random, easy: bool = False) -> Dialogue:
    """A letter, a story or a review on request, then an edit of it."""
    words = WORLD["writing"]
    by, to = rng.sample(FIRST_NAMES, 2)
    kind = rng.choice(sorted(words["kinds"]))
    slots = {
        "by": by,
        "to": to,
        "kind": kind,
        "city": rng.choice(CITIES),
        "day": rng.choice(DAYS),
        "mood": rng.choice(words["moods"]),
        "thing": rng.choice(words["things"]),
    }
    sentences = [sentence.format(**slots) for sentence in words["kinds"][kind]]
    follow, edited = _edit(rng, sentences, by)
    return Dialogue("writing", (rng.choice(words["asks"]).format(**slots), follow), (" ".join(sentences), edited))


def _edit(rng: random.Random, sentences: list[str], by: str) -> tuple[str, str]:
    """A request to edit a text of several sentences, and the edited text."""
    text = " ".join(sentences)
    choice = rng.randrange(5)
    if choice == 0:
        ask = rng.choice(["Make it shorter.", "Shorten your previous answer."])
        return ask, f"{sentences[0]} {sentences[2]} {sentences[-1]}"
    if choice == 1:
        ask = rng.choice(["Rewrite your previous response as a bullet list.", "Turn it into bullet points."])
        return ask, "\n".join(f"- {s}" for s in sentences)
    if choice == 2:
        new = rng.choice([name for name in FIRST_NAMES if name not in text])
        return f"Change the name {by} to {new}.", text.replace(by, new)
    if choice == 3:
        ask = rng.choice(["Number the sentences.", "Rewrite it as a numbered list."])
        return ask, "\n".join(f"{i}. {s}" for i, s in enumerate(sentences, 1))
    title = rng.choice(WORLD["writing"]["titles"])
    return f'Add the title "{title}" and keep the text.', f"{title}\n{text}"


def extraction(rng: random.Random, easy: bool = False) -> Dialogue:
    """Facts about four people as lines; then as JSON, a table, one column, or sentences."""
    words = WORLD["extraction"]
    count = rng.randint(1, 2) if easy else 4
    names, cities, jobs = (rng.sample(items, count) for items in (FIRST_NAMES, CITIES, words["jobs"]))
    people = [
        {"name": n, "age": rng.randint(18, 79), "job": j, "city": c}
        for n, j, c in zip(names, jobs, cities, strict=True)
    ]

    def each(form: str) -> list[str]:
        return [form.format(**person) for person in people]

    told = zip(rng.sample(words["sentences"], count), people, strict=True)
    text = " ".join(sentence.format(**person) for sentence, person in told)
    first = "\n".join(each("Name: {name}, Age: {age}, Job: {job}, City: {city}"))
    choice = rng.randrange(4)
    if choice == 0:
        follow = "Write it as JSON, one object a line."
        second = "\n".join(json.dumps(person) for person in people)
    elif choice == 1:
        follow = "Turn this into a table."
        second = "\n".join(["| Name | Age | Job | City |", *each("| {name} | {age} | {job} | {city} |")])
    elif choice == 2:
        follow = "Now only the names and the cities."
        second = "\n".join(each("Name: {name}, City: {city}"))
    else:
        people.insert(0, people.pop(rng.randrange(count)))
        follow = f"Write one sentence about each person, and begin with {people[0]['name']}."
        second = " ".join(each("{name} is a {job} from {city} and is {age} years old."))
    return Dialogue("extraction", (rng.choice(words["asks"]).format(text=text), follow), (first, second))


def translation(rng: random.Random, easy: bool = False) -> Dialogue:
    """German to English, four to six numbered sentences."""
    pairs = [_sentence(rng) for _ in range(rng.randint(1, 3) if easy else rng.randint(4, 6))]
    german, english = (
        " ".join(f"{i}. {side[0].upper()}{side[1:]}." for i, side in enumerate(sides, 1))
        for sides in zip(*pairs, strict=True)
    )
    return Dialogue("translation", (f"Translate German to English: {german}",), (english,))


def _draw(rng: random.Random, kind: str) -> tuple[str, str]:
    return rng.choice(DICTIONARY[kind])


def _subject(rng: random.Random) -> tuple[str, str]:
    german, english = _draw(rng, "people")
    return german, f"the {english}"


def _object(rng: random.Random) -> tuple[str, str]:
    german, english = _draw(rng, "things")
    article, noun = german.split()
    if rng.random() < 0.4:
        return f"{ACCUSATIVE[article]} {noun}", f"the {english}"
    adjective, translated = _draw(rng, "adjectives")
    ending = "en" if article == "der" else "e"
    return f"{ACCUSATIVE[article]} {adjective}{ending} {noun}", f"the {translated} {english}"


def _sentence(rng: random.Random) -> tuple[str, str]:
    """A sentence in German and in English; the order of the words changes with the pattern."""
    s, o, v = _subject(rng), _object(rng), _draw(rng, "verbs")
    t, p = _draw(rng, "times"), _draw(rng, "places")
    pattern = rng.randrange(6)
    if pattern == 0:
        return f"{s[0]} {v[0]} {o[0]} {p[0]}", f"{s[1]} {v[1]} {o[1]} {p[1]}"
    if pattern == 1:  # the German verb stays second, the English one does not
        return f"{t[0]} {v[0]} {s[0]} {o[0]} {p[0]}", f"{t[1]}, {s[1]} {v[1]} {o[1]} {p[1]}"
    if pattern == 2:
        return f"{s[0]} {v[0]} {t[0]} {o[0]}", f"{s[1]} {v[1]} {o[1]} {t[1]}"
    if pattern == 3:
        a, b, other = _draw(rng, "adjectives"), _draw(rng, "adjectives"), _subject(rng)
        return f"{s[0]} ist {a[0]}, aber {other[0]} ist {b[0]}", f"{s[1]} is {a[1]}, but {other[1]} is {b[1]}"
    other = _subject(rng)
    if pattern == 4:
        w, q = _draw(rng, "verbs"), _object(rng)
        german = f"{s[0]} {v[0]} {o[0]} und {other[0]} {w[0]} {q[0]}"
        return german, f"{s[1]} {v[1]} {o[1]} and {other[1]} {w[1]} {q[1]}"
    # a subordinate clause: the German verb goes last
    return f"{s[0]} sagt, dass {other[0]} {o[0]} {v[0]}", f"{s[1]} says that {other[1]} {v[1]} {o[1]}"


def summarization(rng: random.Random, easy: bool = False) -> Dialogue:
    """News in four or five numbered paragraphs, of which the summary keeps the first sentences."""
    words = WORLD["summarization"]
    count = rng.randint(1, 3) if easy else rng.choice([4, 4, 5])
    leads = [f"{i}. {_news(rng, lead)}" for i, lead in enumerate(rng.sample(words["leads"], count), 1)]
    paragraphs = []
    for lead in leads:
        details = rng.sample(words["details"], rng.choice([1, 1, 2]))
        paragraphs.append(" ".join([lead, *(_news(rng, detail) for detail in details)]))
    summary = " ".join(["Here is the news in short.", *leads])
    return Dialogue("summarization", ("Summarize: " + "\n".join(paragraphs),), (summary,))


def _news(rng: random.Random, template: str) -> str:
    """A sentence with every slot drawn, used or not."""
    drawn = {slot: rng.choice(words) for slot, words in WORLD["summarization"]["slots"].items()}
    return template.format(
        **drawn,
        city=rng.choice(CITIES),
        day=rng.choice(DAYS),
        first=rng.choice(FIRST_NAMES),
        person=_person(rng),
        number=rng.randint(2, 99),
    )


def _person(rng: random.Random) -> str:
    return f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}"


def rag(rng: random.Random, easy: bool = False) -> Dialogue:
    """Four passages and a question; the answer quotes the right passage."""
    count = rng.randint(1, 2) if easy else 4
    lasts, firsts = rng.sample(LAST_NAMES, count), rng.sample(FIRST_NAMES, count)
    passages = [_passage(rng, last, first) for last, first in zip(lasts, firsts, strict=True)]
    name, facts = rng.choice(passages)
    asked = rng.randrange(3)
    quote, question, answer = facts[asked]
    context = "\n".join(f"{title}: " + " ".join(sentence for sentence, _, _ in rows) for title, rows in passages)
    others = " ".join(sentence for i, (sentence, _, _) in enumerate(facts) if i != asked)
    reply = (
        f'The passage about {name} says: "{quote}" So the answer is {answer}. '
        f"The same passage adds: {others} No other passage is about {name}."
    )
    return Dialogue("rag", (f"{context}\n{question}",), (reply,))


def _passage(rng: random.Random, last: str, first: str) -> tuple[str, list[tuple[str, str, str]]]:
    """The name of a person, a company or a tower, and its (sentence, question, answer) triples."""
    kind = rng.randrange(3)
    name = (f"{first} {last}", f"{last} Company", f"{last} Tower")[kind]
    slots = {"name": name, "city": rng.choice(CITIES)}
    slots |= {slot: rng.choice(words) for slot, words in WORLD["rag"]["slots"].items()}
    slots |= {"person": _person(rng), "count": str(rng.randint(20, 99))}
    return name, [(s.format(**slots), q.format(**slots), slots[key]) for s, q, key in WORLD["rag"]["facts"][kind]]
