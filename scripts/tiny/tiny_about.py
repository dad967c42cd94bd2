"""The bundled model's knowledge about fastgen and its field: questions, and short true replies."""

import random

from tiny_task import Skills, Task, exchange, made_up_word, phrase, task
from tiny_words import pairs, read

_TEXTS = read("about")

ABOUT = pairs(_TEXTS["about"])

# Models by name: those that fastgen runs, and those that it does not.
SUPPORTED = _TEXTS["supported"]
UNSUPPORTED = _TEXTS["unsupported"]
FAMILIES = "the Llama, Mistral, Qwen2 and Qwen3 families"
# Features: their names, and whether and how fastgen has them.
FEATURES = pairs(_TEXTS["features"])
CONCEPTS = pairs(_TEXTS["concepts"])


def about_fastgen(rng: random.Random) -> Task:
    """Questions about fastgen and about the words of its field."""
    if rng.random() < 0.6:
        return exchange(rng, *rng.choice(ABOUT))
    names, replies = rng.choice(CONCEPTS)
    return exchange(rng, _TEXTS["concept"], replies, x=rng.choice(names))


def model_support(rng: random.Random) -> Task:
    """Does fastgen support Gemma? The split is by wording"""
    kind = rng.random()
    if kind < 0.42:
        model = rng.choice(SUPPORTED)
        reply = f"Yes, fastgen supports {model}: it runs {FAMILIES}."
    elif kind < 0.9:
        model = rng.choice(UNSUPPORTED)
        reply = f"No, fastgen does not support {model}. It runs {FAMILIES}."
    else:
        model = made_up_word(rng).capitalize() + rng.choice(("", " 2", "-7B", " 3.1"))
        reply = f"I do not know {model}. fastgen runs {FAMILIES}."
    shown = model.lower() if rng.random() < 0.35 else model
    question = phrase(rng, _TEXTS["model"], m=shown)
    reply = reply.replace(model, shown) if kind >= 0.9 else reply
    return task(question, reply, f"model:{question.lower()}", (reply,), "exact", short=reply.split(",")[0] + ".")


def features(rng: random.Random) -> Task:
    """What fastgen has and has not; the split is by wording"""
    names, replies = rng.choice(FEATURES)
    return exchange(rng, _TEXTS["feature"], replies, x=rng.choice(names))


SKILLS: Skills = {
    "about_fastgen": (8, about_fastgen),
    "model_support": (2.5, model_support),
    "features": (5, features),
}
