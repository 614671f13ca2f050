"""This module makes the questions of selector_study.py: eight topics, each with short and with long
questions."""

from itertools import product

# topic: (patterns with one place, words for the place)
_TOPICS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "code": (
        ("Write a Python function that {}.", "How do I write a script that {}?", "Show me SQL that {}."),
        ("finds duplicate rows", "counts words in a text", "sorts records by date", "joins two tables",
         "removes empty lines"),
    ),
    "sums": (
        ("What is {}?", "Work out {} and show the steps.", "Is {} more than fifty?"),
        ("17 times 6", "a third of 213", "12.5 percent of 640", "the square of 19", "96 minus 7 times 8"),
    ),
    "languages": (
        ("Translate '{}' into French.", "How do you say '{}' in German?", "Is '{}' polite in Spanish?"),
        ("where is the station", "I would like the bill", "see you tomorrow", "the shop is closed",
         "thank you for your help"),
    ),
    "history": (
        ("Who was {}?", "When did {} live?", "Name one thing for which {} is known."),
        ("Cleopatra", "Marco Polo", "Ada Lovelace", "Genghis Khan", "Florence Nightingale"),
    ),
    "cooking": (
        ("How do I cook {}?", "What goes well with {}?", "Give me a quick dinner with {}."),
        ("lentils", "salmon", "red cabbage", "chickpeas", "leftover rice"),
    ),
    "stories": (
        ("Write a short poem about {}.", "Tell me a bedtime story about {}.", "Begin a mystery with {}."),
        ("a lighthouse", "an old tram", "a lost glove", "a fox in the snow", "two rival bakers"),
    ),
    "advice": (
        ("What can I do about {}?", "My friend has trouble with {}. What should I say?",
         "Give me three tips against {}."),
        ("a noisy neighbour", "stage fright", "a boring job", "sleepless nights", "too much screen time"),
    ),
    "nature": (
        ("Why do {}?", "Explain to a child why {}.", "Since when is it known that {}?"),
        ("birds sing at dawn", "leaves turn red", "tides rise and fall", "cats purr", "glaciers move"),
    ),
}  # fmt: skip
_LONG = (
    " I have tried a few things already and none of them satisfied me, so please go through the matter"
    " slowly, name what people usually get wrong, give an example for each point, and end with a short"
    " summary.",
    " I am writing this down for a group of twelve people who meet on Thursday evenings. Some of them know"
    " the subject well and others hear of it for the first time. Please write something that serves both,"
    " with a beginning, a middle and an end, and mention where one can read more.",
)


def questions() -> list[tuple[str, bool, str]]:
    """Return (topic, is long, question) of 240 questions: 15 short and 15 long ones of each topic."""
    found: list[tuple[str, bool, str]] = []
    for topic, (patterns, words) in _TOPICS.items():
        short = [pattern.format(word) for pattern, word in product(patterns, words)]
        found += [(topic, False, text) for text in short]
        found += [(topic, True, text + _LONG[n % 2]) for n, text in enumerate(short)]
    return found
