"""How people type: lower case, slips of the keys, a greeting before and a wish behind."""

import random
import re

GREETINGS = (
    "hey, ", "Hi! ", "hello, ", "Hi there, ", "ok so ", "Quick question: ", "Please help. ", "hey chat ",
    "Good morning. ", "So, ", "Hello! ", "yo ", "One more thing: ", "Not sure if you can do this but ",
    "I'm stuck. ", "Hey, hope you're well. ", "Question for you. ", "Random thought: ", "for work: ",
)
WISHES = (
    " Keep it short.", " Please be brief.", " Thanks!", " thanks in advance", " Explain step by step.",
    " No bullet points please.", " Use simple words.", " I'm in a hurry.", " A few sentences are enough.",
    " Answer in plain English.", " Be specific.", " Please use a list.", " Don't make anything up.",
    " Start with the most important part.", " Two paragraphs at most.", " Give an example.",
    " Just the answer.", " Be honest.", " Format it with headings.", " Explain your thinking.",
    " Pretend I know nothing about this.", " Cheers", " English is not my first language.",
)
SHORT_FORMS = (
    ("please", "pls"), ("because", "bc"), ("you", "u"), ("are", "r"), ("about", "abt"),
    ("going to", "gonna"), ("want to", "wanna"), ("do not", "dont"), ("I am", "im"), ("with", "w/"),
    ("thanks", "thx"), ("something", "smth"), ("people", "ppl"), ("I'm", "im"), ("what's", "whats"),
)
LOWER_SHARE, SLIP_SHARE, GREETING_SHARE, WISH_SHARE = 0.18, 0.1, 0.06, 0.1


def roughened(text: str, rng: random.Random) -> str:
    """Return the text as a hurried or a polite person might have typed it; often unchanged."""
    lower, slip, greeting, wish = (rng.random() for _ in range(4))
    short = "\n" not in text and len(text) < 400
    if wish < WISH_SHARE and text[-1] in ".?!":
        text += rng.choice(WISHES)
    if greeting < GREETING_SHARE and short:
        text = rng.choice(GREETINGS) + _first_lowered(text)
    if lower < LOWER_SHARE and short:
        text = _hurried(text, rng)
    if slip < SLIP_SHARE:
        for _ in range(rng.randint(1, 3)):
            text = _slipped(text, rng)
    return text


def _first_lowered(text: str) -> str:
    """Lower the first letter of an ordinary word, but neither "I" nor an abbreviation."""
    return text if re.match(r"I\b|[A-Z][A-Z0-9]", text) else text[:1].lower() + text[1:]


def _hurried(text: str, rng: random.Random) -> str:
    text = text.lower().rstrip(".?") if rng.random() < 0.7 else text.lower()
    if rng.random() < 0.4:
        text = text.replace("'", "")
    for full, short in rng.sample(SHORT_FORMS, 4):
        if rng.random() < 0.6:
            text = re.sub(rf"\b{full.lower()}\b", short, text)
    return text


def _slipped(text: str, rng: random.Random) -> str:
    """Swap, drop or double one letter inside one longer word."""
    long_words = list(re.finditer(r"[A-Za-z]{4,}", text))
    if not long_words:
        return text
    word = rng.choice(long_words)
    at = rng.randrange(word.start() + 1, word.end() - 1)
    replacement = rng.choice((text[at + 1] + text[at], text[at + 1], text[at] * 2 + text[at + 1]))
    return text[:at] + replacement + text[at + 2 :]
