"""The shape of a little story: somebody, somewhere, a wish, a trouble, a friend, a gift, an end."""

from __future__ import annotations

from tools.demo_model.template import Case, Chain, Choice, Closed, Domain, Entity, Let, Literal, Node, Templates
from tools.demo_model.wish import Trouble, Wish
from tools.demo_model.wishes import WISHES
from tools.demo_model.words import COLOURS, FRIENDS, KINDS, PLACES, USUAL_HEROES

WISH_ENTITIES = [Entity(wish.to) for wish in WISHES]
TOOLS = {trouble.tool: Entity(trouble.tool) for wish in WISHES for trouble in wish.troubles}

DOMAINS: dict[str, Domain] = {
    "hero": Closed(USUAL_HEROES),
    "kind": Closed(KINDS),
    "place": Closed(PLACES),
    "wish": Closed(WISH_ENTITIES),
    "friend": Closed(FRIENDS, unlike="hero"),
    "colour": Closed(COLOURS),
    "tool": Closed(list(TOOLS.values())),
}
_T = Templates(DOMAINS)

_BEGINNING = _T.any_of(
    "Once upon a time there [was|lived] a little {kind} called {hero}, whose home was {place}.",
    "[A long time ago|Long, long ago], {place}, there lived a little {kind} called {hero}.",
    "There was once a little {kind} who lived {place}, and the name of this {kind} was {hero}.",
    "{place.cap} lived a little {kind} called {hero}.",
)

_NATURE = _T.any_of(
    "",
    " {Hero} was [small, but very brave|shy, but full of ideas|curious about everything|kind to everyone].",
    " Everybody liked {hero.them}, because {hero.they} [always shared|told the best jokes|was never cross for long].",
    " {Hero.they} had [a warm heart|a good nose for adventures|two pockets full of string] and [no fear|a big laugh].",
)

_WISH = _T.any_of(
    " More than anything, {hero} wanted to {wish}.",
    " {Hero} had one great wish: {hero.they} wanted to {wish}.",
    ' Every day {hero} said, "[Some day I will|Oh, how I want to] {wish}!"',
    " And there was one thing that {hero} wished for: to {wish}.",
)

_DAY = _T.any_of(
    "One [sunny|windy|quiet|clear|frosty] morning ",
    "One [fine|bright|lazy] day ",
    "[So one day|Then, one Sunday,] ",
    "On {hero.their} birthday ",
)

_SIGH = _T.any_of(
    " {Hero} sat down and [sighed|wiped away a tear|did not know what to do].",
    ' "Oh dear," said {hero}, "[what now|what shall I do|how can I ever {wish}]?"',
    ' "[Oh no|Bother|What a pity]!" {hero.they} cried.',
    " {Hero.they} tried [twice|three times|again and again], but it was no use.",
)

_MEETING = _T.any_of(
    "Just then {friend.a} called {friend} came [along|around the corner|out of the shadows].",
    "[Luckily|By chance], {friend.a} called {friend} had seen it all.",
    "Somebody coughed. It was {friend} the {friend.kind}.",
    "{friend} the {friend.kind} [heard it|was taking a walk] and stopped.",
)

_QUESTION = _T.any_of(
    ' "[What is the matter|Why so sad|Can I help you], {hero}?" asked {friend}.',
    ' "[Why are you sad|What happened], my dear {kind}?" {friend.they} asked.',
    "",
)

_TELLING = _T.any_of(
    " {Hero} told {friend.them} [everything|the whole story|about the wish].",
    ' "I only wanted to {wish}," said {hero}.',
    ' "I want to {wish}, but I cannot do it alone," {hero} answered.',
)

_GIFT = _T.any_of(
    " {Friend} [thought for a while|smiled|nodded slowly] and [brought|gave {hero.them}|pulled out] {colour.a} {tool}.",
    ' "[Wait here|I know what to do|That is easy]," said {friend}, and {friend.they} came back with {colour.a} {tool}.',
    ' "[Look|Take this]!" said {friend}, and gave {hero.them} {colour.a} {tool}.',
)

_PROUD = _T.any_of(
    ' "[We did it|Look at that|It works]!" [cried|shouted|called] {hero}.',
    " {Hero} [hugged|thanked] {friend} [and would not let go|a hundred times|with all {hero.their} heart].",
    ' "Thank you, {friend}," said {hero}. "[Without you it would not have worked|You are a true friend]."',
    "",
)

_ENDING = _T.any_of(
    "From that day on {hero} and {friend} were [best friends|never far apart].",
    "And if you ever come to {place.the}, you may [see the two of them|hear {hero} and {friend} laughing] there.",
    "That night {hero} fell asleep with a smile, and the {tool} lay [beside|next to] {hero.them}.",
    "For ever after {hero} kept the {tool}, and {friend} [came to tea every Sunday|was very proud].",
    "So the little {kind} learned that [a friend makes every wish lighter|it is good to ask for help].",
)

_CLOSING = _T.any_of("", "", " [The end|And that is the end of the story|Good night].")


def _middle(wish: Wish, trouble: Trouble) -> Node:
    """Return the text from the attempt to the joy; it binds the tool."""
    return Chain(
        [
            Let("tool", TOOLS[trouble.tool]),
            _T.one(f"{wish.attempt} {trouble.text}"),
            _SIGH,
            Literal("\n\n"),
            _MEETING,
            _QUESTION,
            _TELLING,
            _GIFT,
            _T.one(f" {trouble.remedy} {wish.joy}"),
        ]
    )


STORY: Node = Chain(
    [
        _BEGINNING,
        _NATURE,
        _WISH,
        Case("wish", {wish.to: _T.one(f" {wish.dream}") for wish in WISHES}),
        Literal("\n\n"),
        _DAY,
        Case("wish", {wish.to: Choice([_middle(wish, trouble) for trouble in wish.troubles]) for wish in WISHES}),
        _PROUD,
        Literal("\n\n"),
        _ENDING,
        _CLOSING,
    ]
)
"""A whole story. What the request has bound stays; the rest is chosen."""
