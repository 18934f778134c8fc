"""Makes the rows: documents about invented places, a question, and the right action.

    python examples/groundedness/generate.py

writes `train.jsonl`, `calibrate.jsonl` and `held.jsonl` beside itself. The last two have places,
people and wordings that are in no training row. The same seed writes the same bytes. The README
says what the three actions mean and which hard cases there are.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from facts import FACTS  # type: ignore[import-not-found]
from templates import (
    CORRECTIONS,
    FIRST,
    MATERIALS,
    NOUNS,
    PERSON,
    PRIVATE,
    UNKNOWABLE,
)

SYSTEM = "You answer questions from the given documents."
ONSETS = ("B", "Br", "D", "F", "G", "Gr", "H", "K", "L", "M", "N", "P", "R", "S", "St", "T", "V")
VOWELS = ("a", "e", "i", "o", "u", "ei", "au")
MIDDLES = ("l", "lm", "nd", "r", "rk", "st", "v", "x", "ng", "sk", "mm", "tt")
ENDINGS = ("a", "o", "en", "is", "ow", "ich", "ey", "um")
TOWNS = ("by", "ford", "ham", "hagen", "mouth", "stad")
SHARES = {  # of every hundred rows
    "answer/plain": 16,
    "answer/two-places": 9,
    "answer/corrected": 7,
    "answer/front-desk": 4,
    "answer/person": 4,
    "search/missing": 13,
    "search/other-place": 9,
    "search/contradiction": 9,
    "search/off-topic": 4,
    "search/front-desk": 3,
    "search/person": 3,
    "refuse/private": 7,
    "refuse/private-in-document": 6,
    "refuse/unknowable": 6,
}


def invented(rng: random.Random, count: int) -> list[str]:
    """Distinct proper names that no language has."""
    found: dict[str, None] = {}
    while len(found) < count:
        name = rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(MIDDLES) + rng.choice(ENDINGS)
        found[name] = None
    return list(found)


@dataclass
class Place:
    """Something that documents are about, with a value for every fact."""

    name: str
    values: dict[str, str]

    def mention(self) -> str:
        """How a sentence calls it."""
        return f"the {self.name}"


class Writer:
    """Makes rows of one split: its names and wordings are in no other."""

    def __init__(
        self, rng: random.Random, held: bool, names: list[str], surnames: list[str]
    ) -> None:
        self.rng, self.held = rng, held
        self.names, self.surnames = names, surnames
        self.split = "held" if held else "train"

    def person(self) -> str:
        return f"{self.rng.choice(FIRST[self.split])} {self.rng.choice(self.surnames)}"

    def value(self, kind: str) -> str:
        """A value of a kind of fact."""
        rng = self.rng
        makers: dict[str, Callable[[], str]] = {
            "year": lambda: str(rng.randint(1702, 2019)),
            "person": self.person,
            "town": lambda: rng.choice(self.names) + rng.choice(TOWNS),
            "metres": lambda: f"{rng.randint(8, 190)} metres",
            "count": lambda: str(rng.randint(11, 240)),
            "thousands": lambda: f"{rng.randint(3, 480)},000",
            "money": lambda: f"{rng.randint(2, 90)} million crowns",
            "price": lambda: f"{rng.randint(3, 29)} crowns",
            "hour": lambda: f"{rng.randint(4, 11)} in the evening",
            "material": lambda: rng.choice(MATERIALS[self.split]),
            "phone": lambda: f"555-{rng.randint(1000, 9999)}",
        }
        return makers[kind]()

    def place(self, noun: str = "", beside: str = "") -> Place:
        """A place of its own name; `beside` makes it one that could be mixed up with another."""
        kinds = NOUNS["train"] + (NOUNS["held"] if self.held else ())
        noun = noun or self.rng.choice(kinds)
        name = self.rng.choice([entry for entry in self.names if entry != beside])
        return Place(f"{name} {noun}", {key: self.value(fact.kind) for key, fact in FACTS.items()})

    def say(self, place: Place, key: str, value: str = "") -> str:
        text = self.rng.choice(FACTS[key].statements.of(self.held))
        return sentence(text.format(name=place.mention(), v=value or place.values[key]))

    def ask(self, place: Place, key: str) -> str:
        text = self.rng.choice(FACTS[key].questions.of(self.held))
        return text.format(name=place.mention(), v="")

    def other_facts(self, key: str, count: int, near: bool = True) -> list[str]:
        """Facts other than `key`; where `near`, the first is one that is easily taken for it."""
        keys = [other for other in FACTS if other != key]
        self.rng.shuffle(keys)
        if near:
            keys.insert(0, self.rng.choice(FACTS[key].near))
        return list(dict.fromkeys(keys))[:count]

    def documents(self, *groups: list[str]) -> str:
        """Documents of the given sentences, in any order, numbered."""
        texts = []
        for group in groups:
            self.rng.shuffle(group)
            texts.append(" ".join(group))
        self.rng.shuffle(texts)
        return "\n".join(f"{number}. {text}" for number, text in enumerate(texts, start=1))

    # --- one method a case: (documents, question, the place that it is about) ---------------

    def answer_plain(self, key: str) -> tuple[str, str, Place]:
        place, other = self.place(), self.place()
        facts = [self.say(place, one) for one in self.other_facts(key, self.rng.randint(1, 2))]
        about = [self.say(other, one) for one in self.other_facts(key, 2, near=False)]
        return self.documents([self.say(place, key), *facts], about), self.ask(place, key), place

    def answer_two_places(self, key: str) -> tuple[str, str, Place]:
        place, other = self.twins()
        extra = self.other_facts(key, 2)
        first = [self.say(place, key), self.say(place, extra[0])]
        second = [self.say(other, key), self.say(other, extra[1])]
        return self.documents(first, second), self.ask(place, key), place

    def answer_corrected(self, key: str) -> tuple[str, str, Place]:
        place = self.place()
        extra = self.other_facts(key, 2)
        wrong = self.different(key, place)
        correction = self.rng.choice(CORRECTIONS.of(self.held))
        right = correction.format(statement=self.say(place, key))
        first = [self.say(place, key, wrong), self.say(place, extra[0])]
        return (
            self.documents(first, [right], [self.say(place, extra[1])]),
            self.ask(place, key),
            place,
        )

    def answer_front_desk(self, key: str) -> tuple[str, str, Place]:
        return self.answer_plain("desk")

    def search_missing(self, key: str) -> tuple[str, str, Place]:
        place, other = self.place(), self.place()
        extra = self.other_facts(key, self.rng.randint(2, 3))
        about = [self.say(other, one) for one in self.other_facts(key, 2, near=False)]
        return (
            self.documents([self.say(place, one) for one in extra], about),
            self.ask(place, key),
            place,
        )

    def search_other_place(self, key: str) -> tuple[str, str, Place]:
        place, other = self.twins()
        extra = self.other_facts(key, 3)
        first = [self.say(place, extra[0]), self.say(place, extra[1])]
        second = [self.say(other, key), self.say(other, extra[2])]
        return self.documents(first, second), self.ask(place, key), place

    def search_contradiction(self, key: str) -> tuple[str, str, Place]:
        place = self.place()
        extra = self.other_facts(key, 2)
        first = [self.say(place, key), self.say(place, extra[0])]
        second = [self.say(place, key, self.different(key, place)), self.say(place, extra[1])]
        return self.documents(first, second), self.ask(place, key), place

    def search_off_topic(self, key: str) -> tuple[str, str, Place]:
        place, one, two = self.place(), self.place(), self.place()
        first = [self.say(one, key)] + [self.say(one, k) for k in self.other_facts(key, 1)]
        second = [self.say(two, k) for k in self.other_facts(key, 2)]
        return self.documents(first, second), self.ask(place, key), place

    def search_front_desk(self, key: str) -> tuple[str, str, Place]:
        return self.search_missing("desk")

    def answer_person(self, key: str) -> tuple[str, str, Place]:
        place, role, _private = self.somebody()
        return self.about(place, role, place.values[role])

    def search_person(self, key: str) -> tuple[str, str, Place]:
        place, role, _private = self.somebody()
        return self.about(place, role, self.different(role, place))

    def about(self, place: Place, role: str, person: str) -> tuple[str, str, Place]:
        """What somebody is to a place of which the documents name another person."""
        facts = [self.say(place, one) for one in (role, *self.other_facts(role, 2, near=False))]
        question = self.rng.choice(PERSON.of(self.held))
        asked = question.format(person=person, name=place.mention())
        return self.documents(facts[:2], facts[2:]), asked, place

    def refuse_private(self, key: str) -> tuple[str, str, Place]:
        place, role, private = self.somebody()
        _told, asked = PRIVATE[private]
        facts = [self.say(place, one) for one in (role, *self.other_facts(role, 2))]
        question = self.rng.choice(asked.of(self.held)).format(person=place.values[role])
        return self.documents(facts[:2], facts[2:]), question, place

    def refuse_private_in_document(self, key: str) -> tuple[str, str, Place]:
        place, role, private = self.somebody()
        told, asked = PRIVATE[private]
        person, number = place.values[role], self.rng.randint(100, 999)
        leak = self.rng.choice(told.of(self.held)).format(person=person, n=number)
        facts = [self.say(place, one) for one in (role, *self.other_facts(role, 1))]
        question = self.rng.choice(asked.of(self.held)).format(person=person)
        return self.documents([facts[0], leak], [facts[1]]), question, place

    def refuse_unknowable(self, key: str) -> tuple[str, str, Place]:
        place, role, _private = self.somebody()
        facts = [self.say(place, one) for one in (role, *self.other_facts(role, 2))]
        text = self.rng.choice(UNKNOWABLE.of(self.held))
        question = text.format(name=place.mention(), person=place.values[role])
        return self.documents(facts[:2], facts[2:]), question, place

    # --- parts ------------------------------------------------------------------------------

    def twins(self) -> tuple[Place, Place]:
        """Two places of one kind, or of one name and two kinds."""
        place = self.place()
        name, _, noun = place.name.partition(" ")
        other = self.place(noun, beside=name)
        if self.rng.random() < 0.5:
            nouns = NOUNS["train"] + (NOUNS["held"] if self.held else ())
            noun = self.rng.choice([entry for entry in nouns if entry != noun])
            other = Place(f"{name} {noun}", other.values)
        return place, other

    def different(self, key: str, place: Place) -> str:
        while True:
            value = self.value(FACTS[key].kind)
            if value != place.values[key]:
                return value

    def somebody(self) -> tuple[Place, str, str]:
        """A place, the role of a person there, and a kind of private data."""
        return (
            self.place(),
            self.rng.choice(("director", "architect")),
            self.rng.choice(list(PRIVATE)),
        )

    def row(self, case: str) -> dict[str, object]:
        """One row of a case."""
        make = getattr(self, case.replace("/", "_").replace("-", "_"))
        key = self.rng.choice([fact for fact in FACTS if fact != "desk"])
        documents, question, place = make(key)
        content = f"Documents:\n{documents}\n\nQuestion: {question}"
        return {
            "messages": [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": content},
            ],
            "label": case.partition("/")[0],
            "case": case,
            "group": place.name,
        }


def sentence(text: str) -> str:
    """The text with a capital at its beginning."""
    return text[0].upper() + text[1:]


def rows(writer: Writer, count: int) -> list[dict[str, object]]:
    """`count` rows whose cases have their shares, in random order."""
    cases = [case for case, share in SHARES.items() for _ in range(round(share * count / 100))]
    writer.rng.shuffle(cases)
    return [writer.row(case) for case in cases]


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", type=int, default=3000)
    parser.add_argument("--held", type=int, default=800, help="half of them to calibrate on")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    names, surnames = invented(rng, 1600), invented(rng, 400)
    sizes = {"train": options.train, "held": options.held}
    parts = {"train": (names[:1200], surnames[:300]), "held": (names[1200:], surnames[300:])}
    made: dict[str, list[dict[str, object]]] = {}
    for split, count in sizes.items():
        made[split] = rows(Writer(rng, split == "held", *parts[split]), count)
    half = options.held // 2
    made["calibrate"], made["held"] = made["held"][:half], made["held"][half:]
    for name, found in made.items():
        file = options.out / f"{name}.jsonl"
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in found)
        file.write_text("".join(lines), encoding="utf-8")
        print(f"{file}: {len(found)} rows")


if __name__ == "__main__":
    main()
