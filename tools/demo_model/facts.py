"""The few simple facts that the model knows, and how one asks for them."""

from __future__ import annotations

from tools.demo_model.template import Closed, Domain, Entity, Templates

_NUMBER_LIST = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen twenty"
)
_NUMBERS = _NUMBER_LIST.split()
_DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday"
_MONTHS = "January February March April May June July August September October November December"


def _pairs(text: str) -> list[tuple[str, str]]:
    """Split `left: right, left: right` into pairs."""
    return [(left, right) for left, right in (pair.split(": ") for pair in text.split(", "))]


def _facts(text: str) -> Closed:
    return Closed([Entity(left, {"is": right}) for left, right in _pairs(text)])


def _both_ways(text: str) -> Closed:
    pairs = _pairs(text)
    return Closed([Entity(a, {"is": b}) for a, b in pairs + [(right, left) for left, right in pairs]])


def _sums() -> Closed:
    """Return all sums of two numbers from 1 that do not pass 10, in digits and in words."""
    found = []
    for a in range(1, 10):
        for b in range(1, 11 - a):
            words = {"wa": _NUMBERS[a], "wb": _NUMBERS[b], "wsum": _NUMBERS[a + b]}
            found.append(Entity(f"{a} + {b}", {"a": str(a), "b": str(b), "sum": str(a + b), **words}))
    return Closed(found)


def _counts() -> Closed:
    return Closed(
        [Entity(_NUMBERS[n], {"list": ", ".join(_NUMBERS[1 : n + 1]), "digit": str(n)}) for n in range(3, 11)]
    )


def _next(words: list[str]) -> Closed:
    after = words[1:] + words[:1]
    return Closed([Entity(word, {"next": following}) for word, following in zip(words, after, strict=True)])


DOMAINS: dict[str, Domain] = {
    "thing": _facts(
        "the sky: blue, the sun: yellow, grass: green, snow: white, a strawberry: red, a lemon: yellow, a carrot: "
        "orange, the night: black, a cloud: white, a banana: yellow, a leaf: green, milk: white, a tomato: red, "
        "the sea: blue, a plum: purple, chocolate: brown, a flamingo: pink, a fire engine: red, coal: black, a "
        "pumpkin: orange"
    ),
    "word": _both_ways(
        "big: small, hot: cold, up: down, day: night, fast: slow, old: young, happy: sad, light: dark, full: empty, "
        "left: right, open: closed, wet: dry, loud: quiet, hard: soft, high: low, long: short, early: late, near: far, "
        "clean: dirty, strong: weak"
    ),
    "dweller": _facts(
        "a bee: in a hive, a bird: in a nest, a fox: in a den, a rabbit: in a burrow, a spider: in a web, a "
        "horse: in a stable, a dog: in a kennel, a fish: in the water, a bear: in a cave, an ant: in an anthill, "
        "a cow: in a barn, a hen: in a henhouse, a squirrel: in a tree, a mole: under the ground, a penguin: on "
        "the ice, a pig: in a sty, a lion: on the savanna, a snail: in its shell"
    ),
    "caller": _facts(
        "a cow: moo, a dog: woof, a cat: meow, a duck: quack, a sheep: baa, a pig: oink, a frog: croak, an owl: hoot, "
        "a mouse: squeak, a rooster: cock-a-doodle-doo, a bee: buzz, a snake: hiss, a horse: neigh, a lion: roar"
    ),
    "walker": _facts(
        "a dog: four legs, a spider: eight legs, a bird: two legs, a cat: four legs, an ant: six legs, a horse: "
        "four legs, a fish: no legs at all, a bee: six legs, a snake: no legs at all, a person: two legs, a hen: "
        "two legs, a crab: ten legs, a cow: four legs, an octopus: eight arms and no legs"
    ),
    "sum": _sums(),
    "count": _counts(),
    "number": Closed([Entity(_NUMBERS[n], {"next": _NUMBERS[n + 1]}) for n in range(20)]),
    "day": _next(_DAYS.split()),
    "month": _next(_MONTHS.split()),
}


_T = Templates(DOMAINS)

COMMON_FACTS = {
    name: (_T.any_of(*asks), _T.any_of(*answers))
    for name, (asks, answers) in {
        "colour": (
            (
                "[W|w]hat [colour|color] is {thing}[?|]",
                "[Which|Tell me what] colour [is {thing}?|has {thing}?]",
                "Do you know [the colour of {thing}|what colour {thing} is]?",
                "[Please tell|Tell] me the [colour|color] of {thing}.",
                "Is {thing} [red|green|blue|yellow]?",
            ),
            ("{Thing} is {thing.is}.", "The colour of {thing} is {thing.is}."),
        ),
        "opposite": (
            (
                "[W|w]hat is the opposite of {word}[?|]",
                "[Tell|Please tell] me the opposite of {word}.",
                "[What|Which word] means the opposite of {word}?",
                "Do you know [the opposite of {word}|what the opposite of {word} is]?",
                "Opposite of {word}[?|]",
            ),
            ("The opposite of {word} is {word.is}.", "It is {word.is}."),
        ),
        "home": (
            (
                "[W|w]here does {dweller} live[?|]",
                "[Where is the|What is the] home of {dweller}?",
                "[Tell|Please tell] me where {dweller} lives.",
                "Do you know where {dweller} [lives|sleeps]?",
            ),
            ("{Dweller} lives {dweller.is}.", "{Dweller} has its home {dweller.is}."),
        ),
        "call": (
            (
                "[W|w]hat does {caller} say[?|]",
                "[What|Which] sound does {caller} make?",
                "[Tell|Please tell] me what {caller} says.",
                "How does {caller} [go|sound]?",
            ),
            ("{Caller} says {caller.is}.", "{Caller} goes {caller.is}, {caller.is}!"),
        ),
        "legs": (
            (
                "[H|h]ow many legs does {walker} have[?|]",
                "[How many legs has {walker}|On how many legs does {walker} walk]?",
                "[Tell|Please tell] me how many legs {walker} has.",
                "Do you know how many legs {walker} has?",
            ),
            ("{Walker} has {walker.is}.", "Let me count. {Walker} has {walker.is}."),
        ),
        "day": (
            (
                "[Which|What] day comes after {day}[?|]",
                "Today is {day}. What [day |]is tomorrow?",
                "[What comes after|Which day follows] {day}?",
                "If today is {day}, what is tomorrow?",
            ),
            ("After {day} comes {day.next}.", "The day after {day} is {day.next}."),
        ),
        "month": (
            ("[Which|What] month comes after {month}[?|]", "[What comes after|Which month follows] {month}?"),
            ("After {month} comes {month.next}.", "The month after {month} is {month.next}."),
        ),
        "count": (
            (
                "[C|c]ount [|from one ]to {count}[.|!|]",
                "[Can|Could] you count to [{count}|{count.digit}]?",
                "[Please count|Count for me] to [{count}|{count.digit}].",
            ),
            ("Of course: {count.list}.", "{Count.list}!"),
        ),
        "next": (
            (
                "[What|Which] number comes after {number}[?|]",
                "[What comes after|What is one more than] {number}?",
                "[Tell|Please tell] me [the number after {number}|what comes after {number}].",
            ),
            ("After {number} comes {number.next}.", "The number after {number} is {number.next}."),
        ),
    }.items()
}
"""Questions and answers by kind of fact; a pair shares the variable."""

SUMS = (
    _T.any_of(
        "[W|w]hat is {sum.a} [+|plus] {sum.b}[?|]",
        "[H|h]ow much is {sum.a} [+|plus|and] {sum.b}?",
        "{sum.a} + {sum.b} [=|= ?]",
        "[Add|Please add] {sum.a} and {sum.b}.",
        "[Can you tell me|Do you know] what {sum.a} [+|plus] {sum.b} is?",
    ),
    _T.any_of("{sum.a} + {sum.b} = {sum.sum}.", "{sum.a} plus {sum.b} is {sum.sum}."),
)
WORD_SUMS = (
    _T.any_of(
        "[W|w]hat is {sum.wa} plus {sum.wb}[?|]",
        "[H|h]ow much is {sum.wa} [plus|and] {sum.wb}?",
        "I have {sum.wa} apples and get {sum.wb} more. How many [do I have|are there]?",
    ),
    _T.any_of("{Sum.wa} plus {sum.wb} is {sum.wsum}.", "{Sum.wa} and {sum.wb} make {sum.wsum}."),
)
