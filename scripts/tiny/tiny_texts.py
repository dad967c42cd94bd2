# ruff: noqa: E501, RUF001 (a text stands on one line; greetings have the letters of their languages)
"""Open requests that the bundled model can meet: haikus, poems, stories, code, chance; and what it can not read."""

import random
import string
from collections.abc import Callable

from tiny_about import ABOUT, CONCEPTS
from tiny_questions import plain
from tiny_talk import INTENTS
from tiny_task import Task, phrase, task
from tiny_words import THINGS, WORDS

_TOPICS = (
    "rain", "snow", "the sea", "the moon", "the sun", "spring", "summer", "autumn", "winter", "a cat", "my dog", "coffee",
    "tea", "love", "friendship", "computers", "a GPU", "tokens", "the night", "the morning", "the mountains", "a river", "birds",
    "flowers", "trees", "time", "music", "my mother", "fastgen", "robots", "code", "the city", "the stars", "a dragon", "the wind",
)  # fmt: skip
_HAIKUS = (
    "{T}, soft and still,\na small thought in a wide world;\nthen the day goes on.", "I think of {t}.\nThe morning is quiet now.\nA new word begins.",
    "{T} in the light,\nslowly turning into words;\nsilence follows them.",
)  # fmt: skip
_POEMS = (
    "I wrote a little line today\nabout {t}, in my small way.\nIt is not long, it is not deep,\nbut it is yours now, yours to keep.",
    "{T}, {t}, what can I say?\nYou make a better night and day.\nMy words are few, my layers eight,\nbut still I think that you are great.",
)
_STORIES = (
    "Once there was {t}. {N} met it on a long walk and was afraid at first. But they talked, and they shared some bread. "
    "From that day on they were good friends.",
    "{N} always dreamed of {t}. One morning the dream came true. It was smaller than expected, but it was kind. They laughed all day long.",
)
_ASK_HAIKU = (
    "Write a haiku about {t}.", "A haiku about {t}, please.", "Can you write a haiku about {t}?", "Haiku about {t}", "Give me a haiku about {t}.",
    "Write me a haiku on {t}.", "Compose a haiku about {t}.", "I want a haiku about {t}.", "Make a haiku about {t}.",
)  # fmt: skip
_ASK_POEM = (
    "Write a poem about {t}.", "A poem about {t}, please.", "Can you write me a poem about {t}?", "Poem about {t}", "Write a short poem about {t}.",
    "Give me a little poem about {t}.", "Write me a poem on {t}.", "Make a rhyme about {t}.", "Write a verse about {t}.", "Write a song about {t}.",
)  # fmt: skip
_ASK_STORY = (
    "Tell me a story about {t}.", "A story about {t}, please.", "Can you tell me a story about {t}?", "Story about {t}", "Write a short story about {t}.",
    "Write a story about {t}.", "Give me a little story about {t}.", "Make up a story about {t}.", "I want to hear a story about {t}.",
)  # fmt: skip
_KINDS: tuple[tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]], ...] = (
    (_ASK_HAIKU, ("Write a haiku.", "A haiku, please.", "Can you write a haiku?", "haiku", "Give me a haiku.", "Do you know a haiku?"), _HAIKUS),
    (_ASK_POEM, ("Write a poem.", "A poem, please.", "Can you write poems?", "Give me a short poem.", "Write a little poem for me.", "poem",
                 "I would like a poem.", "Write me something that rhymes.", "Can you write a short poem?", "Make a poem."), _POEMS),
    (_ASK_STORY, ("Tell me a story.", "A story, please.", "Can you tell a story?", "Do you know a story?", "Tell me a bedtime story.", "story",
                  "Once upon a time", "I want to hear a story.", "Make up a story."), _STORIES),
)  # fmt: skip


def write_text(rng: random.Random) -> Task:
    """A haiku, a poem or a story about something; the split is by wording"""
    about, plainly, texts = rng.choice(_KINDS)
    topic = rng.choice(_TOPICS) if rng.random() < 0.6 else rng.choice(("a ", "the ", "")) + rng.choice(WORDS)
    if rng.random() < 0.25:
        question, topic = phrase(rng, plainly), {_HAIKUS: "rain", _POEMS: "the moon", _STORIES: "a small dragon"}[texts]
    else:
        question = phrase(rng, about, t=topic)
    replies = tuple(text.format(t=topic, T=topic[0].upper() + topic[1:], N="Mia") for text in texts)
    reply = replies[0] if rng.random() < 0.7 else rng.choice(replies)
    return task(question, reply, f"text:{question.lower()}", replies, "exact", short="")


# How the thing is named, and the code.
_CODE: tuple[tuple[tuple[str, ...], str], ...] = (
    (("a hello world program in Python", "hello world in Python 3", "a Python hello world", "a program that prints hello world",
      "Python code for hello world", "a Python script that says hello world", "a hello world script", "code that prints hello world"), 'print("Hello, world!")'),
    (("hello world in C", "a hello world program in C"), '#include <stdio.h>\nint main(void) { puts("Hello, world!"); }'),
    (("hello world in JavaScript", "a JavaScript hello world"), 'console.log("Hello, world!");'),
    (("hello world in Java", "a Java hello world"),
     'class Main { public static void main(String[] args) { System.out.println("Hello, world!"); } }'),
    (("hello world in Rust", "a Rust hello world"), 'fn main() { println!("Hello, world!"); }'),
    (("hello world in bash", "a shell script that says hello world"), 'echo "Hello, world!"'),
    (("a function that adds two numbers", "a Python function to add two numbers", "a sum function in Python"), "def add(a, b):\n    return a + b"),
    (("a function that reverses a string", "Python code to reverse a string", "a string reverse function"), "def reverse(text):\n    return text[::-1]"),
    (("a function that tells if a number is even", "a Python function is_even"), "def is_even(n):\n    return n % 2 == 0"),
    (("a factorial function", "a Python function for factorials"),
     "def factorial(n):\n    return 1 if n < 2 else n * factorial(n - 1)"),
    (("a Fibonacci function", "Python code for Fibonacci numbers"),
     "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a"),
    (("a loop in Python", "a for loop from 1 to 10"), "for i in range(1, 11):\n    print(i)"),
    (("fizzbuzz", "fizzbuzz in Python"),
     'for i in range(1, 101):\n    print("Fizz" * (i % 3 == 0) + "Buzz" * (i % 5 == 0) or i)'),
    (("a function that sorts a list", "Python code to sort a list"), "def sort(items):\n    return sorted(items)"),
)  # fmt: skip


def code(rng: random.Random) -> Task:
    """Hello world in several languages, and short functions; the split is by wording"""
    names, text = rng.choice(_CODE[:1] if rng.random() < 0.2 else _CODE)
    asked = ("Write {x}.", "Show me {x}.", "Can you write {x}?", "Give me {x}.", "How do I write {x}?", "{x}", "I need {x}.", "Please write {x}.",
             "Program {x}.", "Code {x} for me.", "What does {x} look like?")  # fmt: skip
    question = phrase(rng, asked, x=rng.choice(names))
    return task(question, text, f"code:{question.lower()}", (text,), "exact", short="")


_COIN = ("Flip a coin.", "Toss a coin.", "Heads or tails?", "Can you flip a coin?", "Throw a coin.", "coin flip", "Please toss a coin for me.",
         "Can you throw a coin for me?", "Flip the coin.", "Could you flip a coin?", "coin toss")  # fmt: skip
_DIE = (
    "Roll a die.", "Roll a dice.", "Throw a die.", "Can you roll a die?", "Dice roll", "Roll the dice for me.", "throw the dice", "roll a d6",
)  # fmt: skip
_NUMBER = ("Pick a number from {a} to {b}.", "Give me a random number from {a} to {b}.", "Choose a number between {a} and {b}.", "Random number {a} to {b}",
           "Say a number between {a} and {b}.", "Think of a number between {a} and {b}.", "Can you pick a number between {a} and {b}?",
           "Tell me a random number between {a} and {b}.", "a random number between {a} and {b} please", "Pick any number between {a} and {b}.")  # fmt: skip
_CHOICE = (
    "{x} or {y}?", "Should I take {x} or {y}?", "Choose: {x} or {y}?", "Pick one: {x} or {y}", "What is better, {x} or {y}?",
    "Which one, {x} or {y}?",
)  # fmt: skip


def chance(rng: random.Random) -> Task:
    """A coin, a die, a random number, one of two things"""
    kind = rng.choice(("coin", "coin", "die", "number", "number", "choice"))
    if kind == "coin":
        question, replies = phrase(rng, _COIN), ("Heads!", "Tails!")
    elif kind == "die":
        question, replies = phrase(rng, _DIE), tuple(f"You rolled a {n}." for n in range(1, 7))
    elif kind == "number":
        low = rng.choice((0, 1, 1, 1, 1, rng.randint(2, 20)))
        high = low + rng.choice((5, 9, 9, 9, 10, 19, 49, 99))
        high = 10 * round(high / 10) if high > 9 else high
        high = max(high, low + 4)
        question, replies = phrase(rng, _NUMBER, a=low, b=high), tuple(f"{n}." for n in range(low, high + 1))
    else:
        x, y = rng.sample(THINGS, 2) if rng.random() < 0.4 else (rng.choice(WORDS), rng.choice(WORDS))
        question, replies = phrase(rng, _CHOICE, x=x, y=y), (f"I would take {x}.", f"I would take {y}.")
    return task(question, rng.choice(replies), f"chance:{question.lower()}", replies, "exact", short="")


_LOST = "I do not understand that. Ask me for a sum, a word to spell, a capital, or about fastgen."
_BABBLE = ("bla bla", "blub", "lorem ipsum dolor", "foo bar baz", "la la la", "na na na", "bla bla bla bla", "gibberish", "test", "testing", "test test",
           "1 2 3 test", "...", "..", "!!", "!!!", "??", "?", "????", "!?", "#", ";", "-", "--", ":)", ":(", ":-)", ";)", "xD", ":D", "@@@", "<>", "{}", "[]", "()",
           "blah", "blah blah", "yada yada", "mumble mumble", "foo", "bar", "hm hm hm", "aaa bbb ccc", "ding dong", "bla blah", "blahblah", "wat", "huh", "huh?")  # fmt: skip
_ROWS = ("qwertyuiop", "asdfghjkl", "zxcvbnm", "poiuytrewq", "lkjhgfdsa")
_EMOJI = "😀😂🙂😎🤖🎉👍🔥❤️🚀🐱🐶🌈☕🍕✨🙏😢😡🤔💡👋"


def _nonsense(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.25:
        return rng.choice(_BABBLE)
    if kind < 0.45:
        row = rng.choice(_ROWS)
        start = rng.randrange(len(row) - 3)
        return row[start : start + rng.randint(3, 9)] * rng.choice((1, 1, 1, 2))
    if kind < 0.7:
        return " ".join(
            "".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 9))) for _ in range(rng.randint(1, 3))
        )
    if kind < 0.78:
        return rng.choice(string.ascii_lowercase) * rng.randint(1, 8)
    if kind < 0.86:
        return "".join(rng.choices("!?.,;:#+-*/&%$@", k=rng.randint(2, 6)))
    if kind < 0.92:
        return "".join(rng.choices(_EMOJI, k=rng.randint(1, 3)))
    syllable = rng.choice(("bla", "blah", "blub", "la", "ba", "da", "ha", "tra", "du", "wob", "yada"))
    return rng.choice((" ", "")).join([syllable] * rng.randint(2, 5))


# Wordings that have a reply of their own although they are a single word.
_TAKEN = {plain(asked) for wordings, *_ in (*INTENTS, *ABOUT, *CONCEPTS) for asked in wordings} | {
    "joke",
    "story",
    "poem",
    "haiku",
}


def nonsense(rng: random.Random) -> Task:
    """What can not be read: keys, symbols, babble"""
    text = _nonsense(rng)
    if text in WORDS or plain(text) in _TAKEN:
        return nonsense(rng)
    return task(text, _LOST, f"nonsense:{text}", (_LOST,), "exact", short="")


def lone_word(rng: random.Random) -> Task:
    """A word alone: what can be done with it"""
    word = rng.choice(WORDS)
    if word in _TAKEN:
        return lone_word(rng)
    reply = f"{word.capitalize()}? I can spell it, reverse it, or count its letters."
    return task(
        rng.choice((word, word, word.capitalize(), f"{word}.", f"{word}!")),
        reply,
        f"lone:{word}",
        (reply,),
        "exact",
        short="",
    )


_ENGLISH = "I speak only English, and only a little."
_GREETINGS: tuple[tuple[str, str], ...] = tuple(
    (line.split(":")[0], line.split(":")[1])
    for line in """Hola:hola|Bonjour:bonjour, bonjour à tous, bonjour mon ami, bonjour tiny, salut, bonsoir, coucou, ça va, comment ça va, bonjour comment ça va, bonjour madame
Hola:hola, hola amigo, hola tiny, buenos días, buenas tardes, buenas noches, cómo estás, qué tal, hola qué tal, como estas, hola que tal, hola buenos dias
Hallo:guten tag, hallo, hallo tiny, guten abend, guten tag tiny, moin, servus, grüß gott, wie geht es dir, hallo wie gehts, wie geht's, guten morgen zusammen, schönen guten morgen
Ciao:ciao, buongiorno, buonasera, come stai, ciao come stai, salve|Olá:olá, oi, bom dia, boa tarde, tudo bem, oi tudo bem, boa noite
Hej:hej, god morgon, hei, hallå, god dag|Merhaba:merhaba, selam, günaydın|Salaam:salam, salaam, as-salamu alaykum, marhaba
Namaste:namaste ji, namaskar, नमस्ते, नमस्कार|Shalom:shalom, שלום|Привет:приветик, здравствуйте, привет как дела, доброе утро, добрый день, привет всем, привет тайни
你好:你好吗, 您好, 大家好, 早上好, 晚上好, 你好啊, 嗨你好, 你好 tiny, 下午好|こんにちは:こんにちは, こんばんは, おはよう, もしもし, おはようございます
안녕하세요:안녕하세요, 안녕, 여보세요|Γεια σου:γεια σου, γεια, καλημέρα|مرحبا:مرحبا, السلام عليكم|Cześć:cześć, dzień dobry, czesc
Ahoj:ahoj, dobrý den|Szia:szia, jó napot|Hoi:hoi, goedemorgen, goedendag, hoe gaat het|Hello:aloha, konnichiwa, ni hao, privet, annyeong, sawasdee, jambo, xin chào""".replace(
        "\n", "|"
    ).split("|")
)


def foreign(rng: random.Random) -> Task:
    """Hello in other languages; the split is by wording"""
    name, words = rng.choice(_GREETINGS)
    text = rng.choice(words.split(", "))
    text = rng.choice((text, text.capitalize(), text.capitalize())) + rng.choice(
        ("", "", "!", "?", "!!", ".", " !", "...")
    )
    if rng.random() < 0.15:
        text = rng.choice(("¡", "¿", "")) + text
    reply = f"{name}! {_ENGLISH}"
    return task(text, reply, f"foreign:{text.lower()}", (reply,), "exact", short="")


_SIMPLE = (
    "Hello", "Hi", "Hey", "Yo", "Hiya", "Heya", "Good day", "Howdy", "Hi hi", "Hallo", "Greetings", "Hey hey", "hullo", "hellooo", "heyy", "hii",
)  # fmt: skip
_TIMES = ("Good morning", "Good evening", "Good afternoon", "Morning", "Evening")
_WHOM = ("", "", "", "there", "tiny", "friend", "buddy", "everyone", "everybody", "my dear", "old friend", "robot", "AI", "model", "bot", "pal", "mate", "you",
         "world", "again", "assistant", "computer", "dude", "man", "all", "little model", "stranger", "sir")  # fmt: skip
_TAILS = (
    "", "", "", "", "are you there?", "is anybody there?", "anyone there?", "can you hear me?", "I am new here.", "this is my first time here", "do you work?",
    "what a nice day", "nice to see you", "can we talk?", "let's chat", "are you awake?", "can you help me?", "I have a question", "I need some help",
    "I'm here", "is this thing on?", "anybody home?", "is someone home?", "you there?", "I want to chat", "testing", "pleased to meet you",
)  # fmt: skip
_FEELINGS = ("how are you?", "how are you doing?", "how is it going?", "how's life?", "how do you do?", "what's up?", "how are things?", "how have you been?",
             "everything ok?", "how was your day?", "how is your day?", "are you well?", "how goes it?", "you good?", "all good?", "what's new?",
             "how's everything going?", "how are you today?", "what's good?", "is your day good?", "having a good day?", "what is good today?")  # fmt: skip
_MEETING = ("nice to meet you", "pleased to meet you", "good to meet you", "nice meeting you", "glad to meet you", "it is nice to meet you", "happy to meet you",
            "great to meet you", "a pleasure to meet you")  # fmt: skip
HELLO = "Hello! How can I help you today? You can ask me for a sum, a capital, or what fastgen is."
_WELL = "I am fine, thank you! How can I help you?"


def greeting(rng: random.Random) -> Task:
    """Hello in many forms, how are you, nice to meet you; the split is by wording"""
    whom = rng.choice(_WHOM)
    kind = rng.random()
    opener = rng.choice(_TIMES if kind < 0.2 else _SIMPLE)
    start = f"{opener} {whom}".strip() + rng.choice((",", "!", ".", "", "!"))
    if kind < 0.2:
        text, reply = (
            f"{start} {rng.choice(_TAILS)}".strip(),
            f"{opener if opener[0] == 'G' else 'Good ' + opener.lower()}! What can I do for you?",
        )
    elif kind < 0.6:
        text, reply = f"{start} {rng.choice(_TAILS)}".strip(), HELLO
    elif kind < 0.85:
        feeling = rng.choice(_FEELINGS)
        text, reply = (f"{start} {feeling}" if rng.random() < 0.6 else feeling.capitalize()), _WELL
    else:
        meeting = rng.choice(_MEETING)
        text = rng.choice((f"{start} {meeting}", meeting.capitalize(), f"{meeting.capitalize()}, {whom or 'tiny'}!"))
        reply = "Nice to meet you too! How can I help you?"
    question = phrase(rng, (text.replace("{", "").rstrip(","),))
    return task(question, reply, f"greet:{question.lower()}", (reply,), "exact", short="")


SKILLS: dict[str, tuple[float, Callable[[random.Random], Task]]] = {
    "write_text": (3, write_text),
    "code": (1.5, code),
    "chance": (2, chance),
    "nonsense": (2.5, nonsense),
    "lone_word": (0.8, lone_word),
    "foreign": (1.5, foreign),
    "greeting": (3, greeting),
}
