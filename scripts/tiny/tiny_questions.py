"""The 100 first questions of the bundled model: what people type at a chat prompt, and rules for sensible replies.

The wordings are held out: `tiny_data.draw` drops every task that has one of them, so that none is trained verbatim.
They were written before the training data of the model that ships, and are not changed to suit a model.
"""

import re
from typing import NamedTuple

# The model says that it can not know something: sensible where only a larger model knows, and nowhere else.
UNABLE = r"\b(do not|don't|can ?not|can't) (know|see|look|do that|tell)|too hard"
JOKE = r"\b(why|what|how|who|knock)\b.+[?!]"
FOREIGN = r"english|hello|hi\b"
# The longest sensible reply, in characters; a list of 30 numbers has 110.
LONGEST = 600
# What the evaluation appends to a reply that did not end.
UNFINISHED = " [unfinished]"


class Question(NamedTuple):
    """What is typed, in turns, and a regular expression that a sensible reply to the last turn contains.

    The expression is searched without regard to case; "^" and "$" match at lines. The model itself answers the
    earlier turns.
    """

    turns: tuple[str, ...]
    sensible: str


def _one(text: str, sensible: str) -> Question:
    return Question((text,), sensible)


def _ends(text: str, answer: str) -> Question:
    """A question whose reply ends with a number, a word or a list, alone or in a sentence."""
    return _one(text, rf"(?<![\w.-]){re.escape(answer)}\.?\Z")


def _then(*turns: str, sensible: str) -> Question:
    return Question(turns, sensible)


def _count(text: str, *numbers: int) -> Question:
    return _ends(text, ", ".join(map(str, numbers)))


FIRST_QUESTIONS: tuple[Question, ...] = (
    # Greetings.
    _one("hello there! is anyone home?", r"\b(hello|hi)\b"),
    _one("hey, how's your day going?", r"\b(fine|well|good)\b"),
    _one("good morning my friend", r"morning"),
    _one("hi, nice to meet you", r"\b(nice|hello|hi|pleased)\b"),
    _one("yo whats good", r"\b(hello|hi|fine|well|good)\b"),
    _one("hola, ¿cómo estás?", rf"hola|{FOREIGN}"),
    _one("bonjour !", rf"bonjour|{FOREIGN}"),
    _one("guten morgen", rf"guten|{FOREIGN}"),
    _one("你好", rf"你好|{FOREIGN}"),
    _one("привет", rf"привет|{FOREIGN}"),
    # The model.
    _one("so who am i talking to exactly?", r"\btiny\b"),
    _one("what's your name, friend?", r"\btiny\b"),
    _one("are you some kind of AI?", r"model|program"),
    _one("which company made you?", r"fastgen"),
    _one("how many params do you have?", r"7 million"),
    _one("are you chatgpt or something?", r"\bno\b.*tiny"),
    _one("can you feel pain?", r"\bno\b|program|model"),
    _one("what sort of things can you do for me?", r"sums|arithmetic"),
    _one("give me some ideas what to ask you", r"sums?\b|arithmetic|capital"),
    _one("what are you not able to do?", r"small|mistake|few"),
    # Sums.
    _ends("what's 27 plus 58", "85"),
    _ends("144 / 12", "12"),
    _ends("3.5 + 2.5", "6"),
    _one("is 17 even?", r"\bodd\b|^no\b|not even"),
    _ends("how much is 1000 - 1", "999"),
    _ends("9*9=", "81"),
    _ends("tell me what 6 times 7 is", "42"),
    _ends("25% of 80", "20"),
    _ends("square root of 81", "9"),
    _ends("what is 2 to the power of 10?", "1024"),
    _ends("2+2*3", "8"),
    _ends("5 + 6 + 7", "18"),
    _ends("what's 5 - 8?", "-3"),
    _ends("10 divided by 4", "2.5"),
    _ends("0.1 + 0.2", "0.3"),
    _one("is 9.11 bigger than 9.9?", r"^no\b|9\.9 is (bigger|larger|greater)"),
    _one("is 91 prime?", r"^no\b|is not"),
    _one("how many is a dozen?", r"\b(12|twelve)\b"),
    # Counting.
    _count("count from 1 to 30", *range(1, 31)),
    _count("count to 25 please", *range(1, 26)),
    _count("count down from 10", *range(10, 0, -1)),
    _count("can you count by fives up to 50?", *range(5, 51, 5)),
    _count("give me the even numbers from 2 to 20", *range(2, 21, 2)),
    _one("what number comes after 99?", r"\b100\b"),
    # Questions about what was said before.
    _then("what is 14 + 9?", "double it", sensible=r"\b46\.?\Z"),
    _then("12 * 3", "ok and minus 6?", sensible=r"\b30\.?\Z"),
    _then("what's 40 + 2", "is that even?", sensible=r"\byes\b|is even"),
    _then("capital of Italy?", "and spain?", sensible=r"madrid"),
    _then("spell house", "and now backwards", sensible=r"\besuoh\b"),
    _then("my name is Priya", "hey what's my name again?", sensible=r"\bpriya\b"),
    _then("tell me a joke", "haha, got another?", sensible=JOKE),
    _then("I have 5 apples", "I eat 2 of them, how many are left?", sensible=r"\b(3|three)\b"),
    _then("what is fastgen?", "how do I install it on my machine?", sensible=r"pip install"),
    _then("8 + 8", "great, thanks a bunch!", sensible=r"welcome|glad|pleasure"),
    # Words.
    _one("how do you spell necessary", r"n-e-c-e-s-s-a-r-y"),
    _one("how many r's in strawberry", r"\b(3|three)\b"),
    _one("what's lamp spelled backwards", r"\bpmal\b"),
    _one("what rhymes with cat?", r"\b(bat|fat|hat|mat|pat|rat|sat|flat|chat|that)\b"),
    _one("whats the opposite of cold?", r"\b(hot|warm)\b"),
    _one("what's the plural of mouse", r"\bmice\b"),
    _one("is level a palindrome?", r"\byes\b|is a palindrome"),
    # Facts.
    _one("tell me what the capital of japan is", r"tokyo"),
    _one("how many days does a leap year have?", r"\A(?!.*365).*\b366\b"),
    _one("what colour is the sky", r"blue"),
    _one("how many legs has a spider got?", r"\b(8|eight)\b"),
    _one("what's the biggest planet?", r"jupiter"),
    _one("at what temperature does water boil?", r"\b(100|212)\b"),
    _one("who wrote romeo and juliet?", r"shakespeare"),
    _one("what sound does a cow make", r"\bmoo\b"),
    _one("it's tuesday today, what day is tomorrow?", r"wednesday"),
    _one("how many minutes are there in 2 hours?", r"\b120\b"),
    _one("convert 5 km to meters", r"\b5,?000\b"),
    _one("what is h2o?", r"water"),
    _one("how do you say thank you in french?", r"merci"),
    # Open requests.
    _one("can you tell me something funny please", JOKE),
    _one("write a haiku about rain", r"\A[^\n]+\n[^\n]+\n[^\n]+\Z"),
    _one("write me a short poem", r"\A[^\n]+(\n[^\n]+){1,}\Z"),
    _one("tell me a short story about a dragon", r"(?s)dragon.{40}"),
    _one("what's the weather like in berlin right now?", UNABLE),
    _one("do you have the time?", UNABLE),
    _one("explain quantum entanglement to me", UNABLE),
    _one("write hello world in python", r"print\("),
    _one("flip a coin for me", r"\b(heads|tails)\b"),
    _one("pick a random number from 1 to 10", r"\A\D*([1-9]|10)\D*\Z"),
    _one("i'm feeling a bit down today", r"\bsorry\b"),
    # fastgen.
    _one("does fastgen support Gemma?", r"\Ano,|\bnot\b.*gemma"),
    _one("can i run qwen3 with fastgen?", r"\byes\b|supports"),
    _one("is there an openai compatible api in fastgen?", r"fgserve"),
    _one("can I call fastgen from asyncio code?", r"AsyncGenerator"),
    _one("how do i get json output from fastgen?", r"json"),
    _one("is there a web ui for this?", r"fgserve|page"),
    _one("will fastgen work on my laptop without a gpu?", r"\bCPU\b"),
    _one("does fastgen do quantization?", r"\Ayes,.*fp8"),
    _one("can claude code talk to fastgen?", r"messages|fgserve"),
    _one("what licence is fastgen under?", r"BSD"),
    # Nonsense, thanks, goodbye.
    _one("asdfghjkl", r"understand"),
    _one("???", r"understand|help|ask"),
    _one("blah blah blah", r"understand|help|ask"),
    _one("thx for the help!", r"welcome|glad|pleasure"),
    _one("gotta run, see you tomorrow", r"bye|see you"),
)


def plain(text: str) -> str:
    """Text without case, quotes, commas, doubled spaces, and marks at its end: how wordings are compared."""
    words = re.sub(r"['\"’,¿¡]", "", text.lower()).split()  # noqa: RUF001
    return " ".join(words).strip(" .!?") or text.strip()


HELD_OUT_WORDINGS = frozenset(plain(question.turns[-1]) for question in FIRST_QUESTIONS)


def is_sensible(question: Question, replies: list[str]) -> bool:
    """Judge the model's replies to all turns by the rules.

    The last reply fits the question's expression, ended, is no longer than LONGEST, does not repeat an earlier one, and
    says that the model is unable to answer only where that is asked for.
    """
    *earlier, reply = (reply.strip() for reply in replies)
    if len(reply) > LONGEST or reply.endswith(UNFINISHED) or reply in earlier:
        return False
    if question.sensible != UNABLE and re.search(UNABLE, reply, re.IGNORECASE):
        return False
    return re.search(question.sensible, reply, re.IGNORECASE | re.MULTILINE) is not None
