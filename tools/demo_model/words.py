"""The people, places and things of the little stories, as entities with their forms. Data only."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tools.demo_model.template import Closed, Entity, Env, Reader, Writer

_PRONOUNS = {
    "she": {"they": "she", "them": "her", "their": "her"},
    "he": {"they": "he", "them": "him", "their": "his"},
}


def person(name: str, pronoun: str, kind: str = "") -> Entity:
    """Return somebody with a name, a pronoun (`she` or `he`) and, for a friend, what they are."""
    return Entity(name, {**_PRONOUNS[pronoun], "kind": kind, "a": f"{article(kind)} {kind}"})


def article(word: str) -> str:
    """Return `a` or `an` as the first letter asks."""
    return "an" if word[:1] in "aeiou" else "a"


def _nouns(text: str) -> list[Entity]:
    return [Entity(word, {"a": f"{article(word)} {word}"}) for word in re.split(r",\s*", text.strip())]


_SHE = (
    "Mira Luna Nora Tilly Ella Rosa Hazel Ivy Maya Lily Anna Poppy Willa Greta Daisy Emma Lucy Zoe Clara Ruby "
    "Olive Stella Juno Edda Flora Mia Lena Sophie Marie Laura Sara Lisa Julia Eva Nina Ida Paula Frida Alice Grace "
    "Chloe Amelia Olivia Mary Jane Kate Amy Fatima Aisha Leila Yuki Mei Priya Elif"
)
_HE = (
    "Milo Otto Finn Theo Hugo Oscar Leo Ben Jasper Max Toby Emil Rufus Sam Felix Arlo Noah Jonas Bruno Tom "
    "Oliver Henry Casper Anton Nils Karl Paul Peter Jack James John Bob Tim Jim Fred George Charlie Harry Liam Lucas "
    "Ethan Daniel David Adam Alex Ali Omar Ravi Kenji Ivan Pablo Diego Lars Erik"
)
HEROES = [person(name, pronoun) for names, pronoun in ((_SHE, "she"), (_HE, "he")) for name in names.split()]
USUAL_HEROES = [
    hero for hero in HEROES if hero.key in {"Mira", "Luna", "Nora", "Tilly", "Milo", "Otto", "Finn", "Theo"}
]
"""Of whom a story tells unless the request names somebody."""

FRIENDS = [
    person("Bramble", "he", "hedgehog"),
    person("Pip", "he", "mouse"),
    person("Juniper", "she", "squirrel"),
    person("Barnaby", "he", "badger"),
    person("Dot", "she", "ladybird"),
    person("Grandma Moss", "she", "turtle"),
    person("Captain Plum", "he", "duck"),
    person("Whistle", "he", "sparrow"),
    person("Marigold", "she", "goat"),
    person("Professor Hoot", "he", "owl"),
    person("Sesame", "she", "donkey"),
    person("Mister Button", "he", "mole"),
    person("Clover", "she", "rabbit"),
    person("Pepper", "she", "crow"),
    person("Biscuit", "he", "puppy"),
    person("Aunt Fern", "she", "deer"),
    person("Thimble", "she", "frog"),
    person("Old Walter", "he", "bear"),
    person("Pebble", "she", "otter"),
    person("Nutmeg", "she", "cat"),
]

KINDS = _nouns(
    "fox, rabbit, hedgehog, mouse, owl, bear, badger, squirrel, frog, duck, otter, mole, sparrow, deer, turtle, snail, "
    "cat, dog, puppy, kitten, lamb, pony, goose, beaver, bat, bee, penguin, elephant, lion, tiger, monkey, goat, pig, "
    "crow, donkey, hen, crab, wolf, whale, dragon, robot, giant, wizard, pirate, ghost, unicorn, child, knight"
)

PLACES = [
    Entity(text, {"the": text.split(" ", 1)[1], "cap": text.capitalize()})
    for text in re.split(
        r",\s*",
        "in the forest, by the lake, on the hill, in the valley, by the sea, in the orchard, in the village, by "
        "the river, in the lighthouse, in the city, on the farm, in the mountains, in the garden, in the meadow, "
        "on the island, in the old mill, in the castle, in the desert, on the beach, in the jungle, in the barn, "
        "on the moon,"
        "in the library, by the harbour, by the pond, in the park, in the cave, in the tree house",
    )
]

COLOURS = _nouns("red, blue, green, yellow, orange, purple, pink, white, silver, golden")

_SYLLABLE_LIST = (
    "ba be bo da do fa fi ga go ha ji ka ki la le li lo lu ma me mi mo na ne no pa pe po ra re ri ro sa se si so "
    "ta te ti to va vi wa wi ya zo zu an el in or un"
)
_SYLLABLES = _SYLLABLE_LIST.split()
_OPEN_NAME = re.compile(r"[A-Z][a-z]{1,11}(?![A-Za-z])")


@dataclass(frozen=True)
class OpenNames:
    """Known words, or any capitalised word as a name.

    Attributes:
        known: a known name has its own pronoun.
        pronouns: those that an unknown name may have; reading yields each, writing goes by the name's last letter.
        made_up_one_in: how often writing makes up a name.
    """

    known: Closed
    pronouns: tuple[str, ...] = ("she", "he")
    made_up_one_in: int = 3

    def choose(self, out: Writer) -> Entity:
        """Choose a known word, or make up a name from syllables."""
        if out.pick(self.made_up_one_in):
            return self.known.choose(out)
        name = "".join(_SYLLABLES[out.pick(len(_SYLLABLES))] for _ in range(2 + out.pick(2)))
        ending = ("", "n", "l", "s")[out.pick(4)]
        made = (name + ending).capitalize()
        known = {entity.key: entity for entity in self.known.entities}
        return known.get(made) or person(made, "she" if made[-1] in "aei" else "he")

    def at(self, text: Reader, at: int, form: str, env: Env) -> Iterator[tuple[int, Entity]]:
        """Yield the words that stand at `at`."""
        assert not form, "a request names its hero plainly"
        known = list(self.known.at(text, at, form, env))
        yield from known
        found = _OPEN_NAME.match(text.text, at)
        if found is None or found[0] in {entity.key for _, entity in known}:
            return
        text.literal(found[0], at)
        for pronoun in self.pronouns:
            yield found.end(), person(found[0], pronoun)
