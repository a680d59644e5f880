"""How people ask: for a story, about the one just told, for its parts as JSON, for company, or for what is unknown."""

from __future__ import annotations

from tools.demo_model import story
from tools.demo_model.template import Chain, Choice, Closed, Node, Templates
from tools.demo_model.words import HEROES, OpenNames

_T = Templates({**story.DOMAINS, "hero": OpenNames(Closed(HEROES))})
_STORY_T = Templates(story.DOMAINS)

_LEAD = _T.any_of(
    "[T|t]ell me [a|a little|a short|a nice|a new] story",
    "[P|p]lease tell me [a|a little|a short|a sweet] [story|tale]",
    "[C|c]an you [|please ]tell me [a|a little|a bedtime] story",
    "[Could|Would] you [tell me|write|make up] [a|a short|a funny] story",
    "[Write|Make up|Invent|Give me] [a|a short|a little] story",
    "I [want|would like] [|to hear |to read ][a|a short|a good] [story|bedtime story]",
    "[A|a] [|short |little ]story",
    "[Do you know|Have you got] a [|nice ]story",
    "Hello! [Please tell|Tell] me a story",
    "[My child|My daughter|My son] wants [a|to hear a] story",
)

_ABOUT = _T.any_of(
    "",
    " about {kind.a}",
    " about [a|one] [little|brave|small|tiny] {kind}",
    " about {hero}",
    " about {kind.a} [called|named] {hero}",
    " about [a little|a brave|a young] {kind} [called|named] {hero}",
    " about {hero} the {kind}",
    " with {kind.a} [called {hero}|named {hero}|in it]",
)
_WHERE = _T.any_of("", " {place}", " who lives {place}")
_SECOND = _T.any_of(
    "[.|!|?||, please.|, please]",
    "[.|, please.] It [should happen|happens|takes place] {place}.",
    "[.|, please.] The hero wants to {wish}.",
)

_FULL_WHO = _T.any_of(
    " about [{kind.a}|a little {kind}|a brave {kind}]",
    " about [{kind.a}|a little {kind}|a young {kind}] [called|named] {hero}",
    " about {hero} the {kind}",
)
_FULL_REST = _T.any_of(
    " {place} who wants to {wish}[.|!|?|]",
    " who lives {place} and wants to {wish}[.|!|?|, please.|]",
    " who wants to {wish}. It [should happen|happens] {place}.",
    " {place}. The [hero|{kind}] wants to {wish}.",
)

_FULL_REST_OPEN = _T.any_of(" {place} who wants to {wish}", " who lives {place} and wants to {wish}")

_PARTLY: Node = Choice(
    [
        Chain([_LEAD, _ABOUT, _T.one("[.|!|?||, please.|, please]")]),
        Chain([_LEAD, _ABOUT, _WHERE, _T.one("[.|!|?||, please.]")]),
        Chain([_LEAD, _FULL_WHO, _T.one(" who wants to {wish}[.|!|?|]")]),
        Chain([_LEAD, _ABOUT, _SECOND]),
    ]
)
FULL_STORY_REQUEST: Node = Chain([_LEAD, _FULL_WHO, _FULL_REST])
"""Asks for a kind of hero, a place and a wish, and perhaps for a name."""
STORY_REQUEST: Node = Choice([_PARTLY, FULL_STORY_REQUEST])
"""Asks for a story; leaves open what it does not say."""

BARE_STORY_REQUEST = _T.any_of(
    "[T|t]ell me [a|a little|a short|one] story[.|!|, please.|]",
    "[A|One] story[, please|][.|!|]",
    "[A|a]nother one[, please|][.|!|]",
    "[Please tell me|Tell me|Can I have|I want] another [one|story][.|!|, please.|]",
    "[Again|More|One more][!|, please.|]",
)
"""What one says after a story to get another."""

ABOUT_STORY: dict[str, tuple[Node, Node]] = {
    name: (_STORY_T.any_of(*asks), _STORY_T.any_of(*answers))
    for name, (asks, answers) in {
        "helper": (
            ("[Who|And who] helped {hero}?", "[Who|Which friend] came to help [{hero}|{hero.them}|the {kind}]?"),
            ("{Friend} the {friend.kind} helped {hero}.", "It was {friend} the {friend.kind} who helped {hero.them}."),
        ),
        "wish": (
            ("What did {hero} [want|wish for|want to do]?", "What was [{hero.their} wish|the wish of {hero}]?"),
            ("Little {hero} wanted to {wish}.", "{Hero.they} wanted to {wish}."),
        ),
        "place": (
            ("Where did {hero} live?", "Where [does|did] the story [happen|take place]?", "Where was {hero}?"),
            ("Little {hero} lived {place}.", "It happened {place}, where {hero} lived."),
        ),
        "gift": (
            ("What did {friend} give {hero}?", "What [helped {hero}|was the gift|did {hero} get]?"),
            ("{Friend} gave {hero} the {tool}.", "It was the {tool} that {friend} gave {hero.them}."),
        ),
        "hero": (
            ("Who [was|is] {hero}?", "[Who|What] was the [hero|hero of the story]?"),
            ("It was {hero}, a little {kind}.", "The hero was {hero}, a little {kind}."),
        ),
        "friend": (
            ("Who [was|is] {friend}?", "[What is|What was] the name of the [friend|helper]?"),
            ("{Friend} was the {friend.kind} who helped {hero}.", "The friend was called {friend}."),
        ),
    }.items()
}
"""Questions about the story just told, with its bindings."""

_AS_JSON = _STORY_T.one('{"hero": "a little {kind} called {hero}", "place": "{place.the}", "wish": "to {wish}"}')

_BARE_JSON = _T.any_of(
    "[Give|Show|Write] me [the |a ]hero, [the |a |]place and [the |a |]wish as JSON[.|, please.|]",
    "[H|h]ero, place and wish as JSON[.|, please.|!|?|]",
    "[Can you give me|Please give me|I want] hero, place and wish as JSON[.|!|]",
)

TOLD_AS_JSON: tuple[Node, Node] = (
    Choice(
        [
            _BARE_JSON,
            _T.any_of(
                "[T|t]ell me [the |]hero, place and wish of [that|the|this] story as JSON[.|, please.|]",
                "[What are|What were] [hero|the hero], place and wish of [that|the] story, as JSON?",
                "[Can you give|Please give|Give] me [that|the] story's hero, place and wish as JSON[.|!|]",
                "[And now|Now|And] [|the ]hero, place and wish [of it |]as JSON[.|, please.|!|]",
                "[Its|What are its] hero, [its |]place and [its |]wish as JSON[.|, please.|!|?|]",
                "[That|The same|The] story as JSON[.|, please.|] [Only|With] hero, place and wish.",
            ),
        ]
    ),
    _AS_JSON,
)
"""Asks for the parts of the story just told."""

_NEW = _T.any_of(
    "[Tell|Give|Please give|Write] me hero, place and wish of a [|new |little |short ]story",
    "[Make up|Invent|Write down|Think of] hero, place and wish of a [|new |little ]story",
    "[Plan|Invent|Make up|Please plan] a [|new |little |short ]story",
    "I [want|need] [|the ]hero, place and wish of a [|new |little ]story",
)
_NEW_END = _T.any_of(
    " as JSON[.|, please.|!|]",
    " as JSON with hero, place and wish[.|]",
    "[.|, please.] [Answer|Write it|Answer me] [as|in] JSON[.|]",
)
BARE_AS_JSON: tuple[Node, Node] = (_BARE_JSON, _AS_JSON)
"""Where no story was told."""
NEW_AS_JSON: tuple[Node, Node] = (
    Choice([Chain([_NEW, _ABOUT, _WHERE, _NEW_END]), Chain([_NEW, _FULL_WHO, _FULL_REST_OPEN, _NEW_END])]),
    _AS_JSON,
)
"""Asks for the parts of a story that nobody has told; leaves open what it does not say."""

COMPANY: dict[str, tuple[Node, Node]] = {
    name: (_T.any_of(*asks), _STORY_T.any_of(*answers))
    for name, (asks, answers) in {
        "greeting": (
            (
                "[H|h]ello[!|.|]",
                "[H|h]i[!| there!| there|]",
                "Good [morning|evening|day|afternoon][!|.|]",
                "Hey[!|]",
                "[Hello|Hi], how are you[?|]",
                "[H|h]ow are you[?| today?]",
            ),
            (
                "Hello! [I am glad that you are here.|How nice to see you.] Shall I tell you a story about {kind.a}?",
                "Good day to you! Would you like [a story|to hear a story] about {kind.a}?",
            ),
        ),
        "self": (
            (
                "[W|w]ho are you[?|]",
                "[What|Who] are you?",
                "What is your name?",
                "What can you do[?|]",
                "Help[!|]",
                "[Are you|Is this] a [robot|computer|person|model]?",
                "What do you know?",
                "What should I ask you?",
            ),
            (
                "I am a very small model, and I know little stories. Shall I tell you one about {kind.a}?",
                "I am a little teller of stories. [Ask me for|Would you like] a story about {kind.a}?",
            ),
        ),
        "praise": (
            (
                "[T|t]hank you[!|.| very much.|]",
                "[T|t]hanks[!|.|]",
                "[That was|What] a [lovely|nice|good] story[!|.]",
                "I [like|liked] [it|that|the story][!|.]",
                "[Nice|Great|Wonderful|Lovely|Well done|Cool][!|.]",
            ),
            (
                "You are welcome! [I liked telling it.|Stories are what I am for.]",
                "[Thank you|How kind]! Shall I tell you one about {kind.a}?",
            ),
        ),
        "farewell": (
            ("[G|g]ood night[!|.|]", "[G|g]ood[ |]bye[!|.|]", "[B|b]ye[!|.|]", "See you [later|tomorrow|soon][!|.]"),
            (
                "Good night! May you dream of {kind.a} {place}.",
                "Goodbye! Come back when you want to hear about {kind.a}.",
            ),
        ),
    }.items()
}
"""Small talk; some answers offer a story about a kind."""

ACCEPT_OFFER = _T.any_of(
    "[Y|y]es[, please|][!|.|]", "[Sure|Of course|Please do|Yes, I would like that|Okay|Go on][!|.|]"
)
"""Says yes to the story about the kind that the last answer offered."""

FALLBACK = _STORY_T.any_of(
    "I am sorry, [I do not know that|that is too hard for me]. I only know little stories. "
    "Would you like one about {kind.a}?",
    "[That is a big question|I have never heard of that], and I am a small model. "
    "Shall I tell you a story about {kind.a}?",
    "I do not know much about that. But I could tell you a little story about {kind.a}.",
)
"""The answer to everything that the grammar does not know."""


ECHO_COUNTS = (1, 2, 3, 4, 6, 8)
"""How many words one may ask to have repeated."""


def _echo(count: int) -> tuple[Node, Node]:
    """Return a request to repeat some words, and the words."""
    everything = [
        entity for domain in story.DOMAINS.values() if isinstance(domain, Closed) for entity in domain.entities
    ]
    words = OpenNames(Closed(everything), pronouns=("she",), made_up_one_in=2)
    variables = [f"word{index}" for index in range(count)]
    templates = Templates(dict.fromkeys(variables, words))
    listed = ", ".join(f"{{{variable}}}" for variable in variables)
    ask = templates.one(f"[Repeat after me|Say|Please repeat|Say after me|Repeat]: {listed}[.|]")
    return ask, templates.one(f"Gladly: {listed}.")


ECHOES = {count: _echo(count) for count in ECHO_COUNTS}
"""Requests to repeat words. They also teach the model early to copy, on which every story depends."""
