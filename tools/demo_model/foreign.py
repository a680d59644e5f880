"""Requests outside the model's world, written only to teach it to say so. Nothing here is ever answered."""

from __future__ import annotations

from tools.demo_model.template import Closed, Domain, Entity, Templates


def _list(text: str) -> Closed:
    return Closed([Entity(word.strip()) for word in text.split(",")])


TOPICS = _list(
    "quantum physics, the stock market, the French Revolution, photosynthesis, black holes, income tax, football, "
    "chess, democracy, electricity, the Roman Empire, vaccines, climate change, inflation, gravity, the brain, "
    "dinosaurs, poetry, philosophy, computers, the internet, machine learning, neural networks, databases, "
    "operating systems, compilers, volcanoes, earthquakes, the weather, politics, elections, religion, medicine, "
    "headaches, diabetes, vitamins, jogging, yoga, tennis, basketball, the Olympic Games, opera, jazz, guitars, "
    "pianos, photography, films, novels, Shakespeare, Mozart, Einstein, Newton, Napoleon, Cleopatra, trains, "
    "aeroplanes, rockets, satellites, engines, batteries, bicycles, oil, steel, concrete, glass, diamonds, banks, "
    "mortgages, insurance, contracts, laws, patents, passports, visas, hotels, airports, restaurants, pasta, "
    "sushi, coffee, wine, cheese, vegetarian food, gardening, roses, bees in winter, genetics, evolution, atoms, "
    "chemistry, algebra, geometry, statistics, prime numbers, infinity, the speed of light, time travel, dreams, "
    "memory, sleep, stress, friendship, marketing, management, interviews, salaries, fashion, architecture, "
    "bridges, painting, sculpture, grammar, Latin, Chinese, German, Spanish, sign language, emoji, large language "
    "models, Kubernetes, Linux, Python, JavaScript, Rust, regular expressions, sorting algorithms, encryption"
)
LANDS = _list(
    "France, Germany, Italy, Spain, Japan, China, India, Brazil, Canada, Mexico, Egypt, Kenya, Norway, Sweden, "
    "Poland, Greece, Turkey, Australia, Peru, Chile, Iceland, Ireland, Portugal, Austria, Vietnam, Korea, "
    "Morocco, Cuba, Texas, Bavaria"
)
BIG = Closed(
    [Entity(f"{a} {sign} {b}") for a in (37, 58, 112, 640, 999, 1024) for sign in "*-/" for b in (7, 13, 48, 250)]
)

DOMAINS: dict[str, Domain] = {"topic": TOPICS, "land": LANDS, "big": BIG}
_T = Templates(DOMAINS)

FOREIGN_REQUEST = _T.any_of(
    "[W|w]hat is {topic}?",
    "[What are|Tell me about|Explain|What about] {topic}[.|]",
    "[E|e]xplain {topic} [to me|in simple words|in one paragraph|like I am five].",
    "[How|Why] [does|do] {topic} [work|matter|happen]?",
    "[Write|Give me] [an essay|a report|a poem|a joke|three facts|a summary|an email] about {topic}.",
    "[What do you think of|Do you like|Are you good at] {topic}?",
    "[I have a question about|I want to learn|Teach me|Help me with] {topic}.",
    "[Who|When was] [invented|was the first to study|discovered] {topic}?",
    "[Can|Could] you [explain|help me with|teach me] {topic}?",
    "What is the difference between {topic} and physics?",
    "[W|w]hat is the [capital|population|president|currency|history|area|flag] of {land}[?|]",
    "[Who|When] [rules|is the king of|was the president of|won the war in] {land}?",
    "[How far is it|How do I get|What does a flight cost] to {land}?",
    "[Plan|Describe] a [trip|holiday|week] [in|to] {land}.",
    "Translate [this|the next sentence|good morning] into the language of {land}.",
    "[What is|Calculate|How much is] {big}[?|]",
    "[What time is it|What is the date|What is the news|How is the weather|Will it rain]?",
    "[Write|Fix|Run] [a program|some code|a function|my code] [|in Python|in C|for {topic}].",
    "[What|Who] is the [best|tallest|richest|oldest|fastest] [person|building|car|team|river] in [{land}|the world]?",
    "How [much|old|tall|far|deep] is [the ocean|the moon|the president|the tower|a car] in {land}?",
    "[Give me a recipe for|How do I cook|How do I fix|Where can I buy] [pizza|bread|my bike|a phone|a car|rice]?",
    "[Sing|Draw|Play|Order|Buy|Send|Open|Search] [something|a picture|some music|a pizza|a file|a website] for me.",
    "[What is the meaning of life|Is there a god|Are you alive|Do you have feelings|Can you think|How do you work]?",
    "[asdf|test|foo bar|hmm|ok so|lorem ipsum|xyz|123|blah blah|qwerty][?|.|!|]",
)
"""What people also type."""
