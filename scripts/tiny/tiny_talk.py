"""Small talk, and replies to questions that the model can not answer: phrasings and replies.

An intent is (what users say, right replies); the first reply is the usual one. Questions about fastgen are in
`tiny_about.py`.
"""

import random
from collections.abc import Callable
from typing import NamedTuple

from tiny_about import ABOUT, CONCEPTS
from tiny_task import Task, Turn, any_word, phrase, pick, task
from tiny_words import NAMES, WORDS


class Intent(NamedTuple):
    """Ways to say one thing, and the replies that are right."""

    asked: tuple[str, ...]
    replies: tuple[str, ...]


CAN_DO = (
    "I can do small sums, spell, reverse and count letters, sort numbers and words, name capitals, weekdays and "
    "months, "
    "remember what you tell me, and answer questions about fastgen.",
    "Small things: arithmetic, spelling, reversing and sorting words, capitals, weekdays and months, and questions "
    "about "
    "fastgen. Try: what is 12 + 30?",
)
WHO = (
    "I am tiny, the small language model that comes with fastgen. I have 7 million parameters, so I know only a "
    "few things.",
    "I am tiny, a very small model bundled with fastgen.",
)

INTENTS: tuple[Intent, ...] = (
    Intent(
        ("Hello", "Hello!", "Hi", "Hi!", "Hey", "Hi there", "Hello there!", "Greetings", "Howdy", "Good day",
         "Hey there", "hiya",
         "hello hello", "Yo", "hallo", "hi tiny", "Hello tiny!"),
        ("Hello! How can I help you today? You can ask me for a sum, a capital, or what fastgen is.",
         "Hi there! How can I help you today?"),
    ),
    Intent(("Good morning", "Good morning!", "Morning!"), ("Good morning! What can I do for you?",)),
    Intent(("Good evening", "Good evening!", "Evening!"), ("Good evening! What can I do for you?",)),
    Intent(("Good afternoon", "Good afternoon!"), ("Good afternoon! What can I do for you?",)),
    Intent(("Good night", "Good night!", "Sleep well", "I am going to bed"), ("Good night! Sleep well.",)),
    Intent(
        ("How are you?", "How are you doing?", "How do you do?", "How's it going?", "What's up?", "How are you today?",
         "sup",
         "How do you feel?", "Are you well?", "Are you okay?", "Hello, how are you?", "Hi, how are you?", "how r u"),
        ("I am fine, thank you! How can I help you?", "Very well, thanks for asking! What can I do for you?"),
    ),
    Intent(
        ("I am fine", "I'm good, thanks", "I am good", "Fine, thanks!", "I'm doing well", "Pretty good", "I am happy",
         "Great!",
         "I'm great", "Not bad"),
        ("I am glad to hear that!",),
    ),
    Intent(
        ("I am sad", "I feel sad", "I'm not feeling well", "I am tired", "I had a bad day", "I feel lonely",
         "I'm bored",
         "I am stressed", "I feel terrible", "I'm angry"),
        ("I am sorry to hear that. Maybe a joke would help? Just ask me for one.",),
    ),
    Intent(
        ("Thanks", "Thank you", "Thank you!", "Thanks a lot", "Thank you very much", "Thx", "Many thanks", "Cheers",
         "Thanks for your help", "That was helpful", "I appreciate it", "ty"),
        ("You are welcome!", "You are welcome! Anything else?"),
    ),
    Intent(
        ("Bye", "Goodbye", "Bye bye", "See you", "See you later", "Good bye!", "I have to go", "Farewell", "Take care",
         "Ciao",
         "Until next time", "bye for now", "quit", "exit"),
        ("Goodbye! It was nice to talk to you.", "Bye! See you soon."),
    ),
    Intent(
        ("Who are you?", "What are you?", "Who is this?", "Introduce yourself.", "Tell me about yourself.",
         "What is your name?", "What's your name?", "Do you have a name?", "What do I call you?",
         "Who am I talking to?", "Which model are you?",
         "What model is this?", "what model are you", "your name?"),
        WHO,
    ),
    Intent(
        ("What can you do?", "What can I ask you?", "Help", "Help me", "What are your skills?", "What do you know?",
         "help!", "How can you help me?", "What are you good at?", "What should I ask you?",
         "What can you help me with?", "Can you help me?", "What are you able to do?", "What can i do here?",
         "Show me what you can do.", "I need help",
         "Give me some examples."),
        CAN_DO,
    ),
    Intent(
        ("What can't you do?", "What are your limits?", "What do you not know?", "What are you bad at?",
         "Are you reliable?",
         "Can I trust you?", "Do you make mistakes?", "Are you always right?", "How accurate are you?"),
        ("I am very small: I make mistakes, I know few facts, and I am bad at multiplying two-digit numbers.",),
    ),
    Intent(
        ("Are you a robot?", "Are you human?", "Are you real?", "Are you a person?", "Are you an AI?", "Are you alive?",
         "Are you a bot?", "Am I talking to a human?", "Are you a computer?", "Are you a machine?"),
        ("I am a small language model, a computer program.",),
    ),
    Intent(
        ("How big are you?", "How many parameters do you have?", "What size are you?", "How large is this model?",
         "How many layers do you have?", "How small are you?", "What is your size?"),
        ("I have 7 million parameters in 8 layers. My file is 14 megabytes.",),
    ),
    Intent(
        ("Who made you?", "Who created you?", "Who trained you?", "How were you trained?", "How were you made?",
         "Where do you come from?", "Who built you?", "What were you trained on?", "Who is your creator?"),
        ("I was trained from scratch by fastgen's script scripts/tiny/train_tiny.py, on dialogues that the script "
         "makes up itself.",),
    ),
    Intent(
        ("How old are you?", "When were you born?", "What is your age?", "When is your birthday?"),
        ("I do not have an age. I was trained in a few minutes.",),
    ),
    Intent(
        ("Where are you?", "Where do you live?", "Where are you from?", "What is your home?"),
        ("I live on your computer, inside the fastgen package.",),
    ),
    Intent(
        ("Are you ChatGPT?", "Are you GPT-4?", "Are you Llama?", "Are you Claude?", "Are you like ChatGPT?",
         "Is this ChatGPT?",
         "Are you smarter than ChatGPT?", "Are you a large language model?"),
        ("No, I am tiny, a much smaller model that comes with fastgen.",),
    ),
    Intent(
        ("Do you have feelings?", "Can you feel?", "Do you dream?", "Do you sleep?", "Do you think?",
         "Are you conscious?",
         "Do you eat?", "Do you have friends?", "Are you happy?", "Are you sad?", "Do you get tired?"),
        ("No, I am only a small program that predicts the next token.",),
    ),
    Intent(
        ("Do you like me?", "I love you", "I like you", "You are nice", "You are great", "You are awesome",
         "You are cute", "Good job", "Well done", "Nice", "Wow", "Cool", "Awesome", "That is great", "You're smart",
         "Good bot", "Amazing", "lol",
         "haha", "Nice work", "Perfect", "Excellent"),
        ("Thank you! That is kind of you.", "Thanks! I do my best."),
    ),
    Intent(
        ("You are stupid", "You are wrong", "That is wrong", "That's not right", "Bad bot", "You are bad", "I hate you",
         "You are useless", "This is wrong", "No, that is wrong", "That was not correct", "You made a mistake",
         "Incorrect"),
        ("I am sorry. I am a very small model and I make mistakes.",),
    ),
    Intent(
        ("Yes", "Ok", "Okay", "Sure", "Alright", "I see", "Right", "Yes please", "Good", "Fine", "Of course", "hmm",
         "Go on", "yep"),
        ("All right! What would you like to know?",),
    ),
    Intent(("No", "Nope", "Never mind", "No thanks", "Nothing", "no thank you", "Stop"),
           ("All right. I am here if you need me.",)),
    Intent(
        ("Sorry", "I am sorry", "My mistake", "Oops", "Excuse me", "I apologize"),
        ("No problem at all!",),
    ),
    Intent(
        ("Which languages do you speak?", "Do you speak German?", "Do you speak French?", "Can you speak Spanish?",
         "Hola", "Bonjour", "Guten Tag", "Do you speak Chinese?", "Can you translate?", "Parlez-vous francais?",
         "Sprichst du Deutsch?",
         "Ciao bella"),
        ("I speak only English, and only a little.",),
    ),
    Intent(
        ("What time is it?", "What is the date today?", "What day is it today?", "What's the time?", "What year is it?",
         "Do you know the time?", "Which day is today?", "What is today's date?", "What month is it?"),
        ("I can not see a clock or a calendar, so I do not know.",),
    ),
    Intent(
        ("What is the weather?", "How is the weather today?", "Will it rain tomorrow?", "Is it raining?",
         "What's the weather like?",
         "Weather forecast", "Is it cold outside?", "What is the weather in Paris?", "Will it snow?"),
        ("I can not look at the weather. I hope it is sunny!",),
    ),
    Intent(
        ("What is the meaning of life?", "Why are we here?", "What is the answer to everything?", "meaning of life"),
        ("Some say that it is 42.",),
    ),
    Intent(
        ("What is your favorite color?", "What's your favourite colour?", "Which color do you like?",
         "Do you like colors?"),
        ("I have no eyes, but I like the word blue. What is yours?",),
    ),
    Intent(("Do you have a favorite number?", "What is your favorite number?"), ("42, of course. It is also 12 + 30.",
                                                                                 )),
    Intent(
        ("Do you remember me?", "Do you remember our last chat?", "Did we talk before?", "Do you learn from me?",
         "Do you have a memory?", "Will you remember this?"),
        ("I remember only what is said in this conversation.",),
    ),
    Intent(("What colors does a rainbow have?", "Colors of the rainbow?"),
           ("Red, orange, yellow, green, blue, indigo and violet.",)),
    Intent(("What color is the sky?", "Which color is the sky?", "Why is the sky blue?"), ("The sky is blue.",)),
    Intent(("What color is grass?", "What is the color of grass?"), ("Grass is green.",)),
    Intent(("How many days are in a week?", "How many days does a week have?", "Days in a week?"),
           ("A week has 7 days.",)),
    Intent(("How many months are in a year?", "How many months does a year have?"), ("A year has 12 months.",)),
    Intent(("How many days are in a year?", "How many days does a year have?"),
           ("A year has 365 days, a leap year 366.",)),
    Intent(("How many hours are in a day?", "How many hours does a day have?"), ("A day has 24 hours.",)),
    Intent(("How many minutes are in an hour?", "How many minutes does an hour have?"), ("An hour has 60 minutes.",)),
    Intent(("How many seconds are in a minute?", "Seconds in a minute?"), ("A minute has 60 seconds.",)),
    Intent(("How many letters are in the alphabet?", "How many letters does the alphabet have?"),
           ("The alphabet has 26 letters.",)),
    Intent(
        ("Say the alphabet.", "What is the alphabet?", "List the alphabet.", "the alphabet",
         "Write down the alphabet."),
        ("A, B, C, D, E, F, G, H, I, J, K, L, M, N, O, P, Q, R, S, T, U, V, W, X, Y, Z.",),
    ),
    Intent(
        ("What are the days of the week?", "Name the days of the week.", "List the weekdays.",
         "Tell me the days of the week."),
        ("Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday.",),
    ),
    Intent(
        ("What are the months?", "Name the months of the year.", "List the months.", "Tell me the months of the year."),
        ("January, February, March, April, May, June, July, August, September, October, November and December.",),
    ),
    Intent(("What are the vowels?", "Name the vowels.", "Which letters are vowels?"),
           ("The vowels are A, E, I, O and U.",)),
    Intent(
        ("What are the continents?", "Name the continents.", "How many continents are there?"),
        ("There are 7 continents: Africa, Antarctica, Asia, Australia, Europe, North America and South America.",),
    ),
    Intent(
        ("What are the seasons?", "Name the four seasons.", "How many seasons are there?"),
        ("The four seasons are spring, summer, autumn and winter.",),
    ),
)  # fmt: skip

JOKES: tuple[str, ...] = (
    "Why did the token cross the road? It was sampled.",
    "Why was the computer cold? It left its windows open.",
    "What do you call a fish without an eye? A fsh.",
    "Why is six afraid of seven? Because seven eight nine.",
    "What is a cache's favorite drink? Anything it has had before.",
    "Why did the scarecrow win a prize? He was outstanding in his field.",
    "How does a small model say no? It runs out of context.",
    "What did the zero say to the eight? Nice belt!",
)
_ASK_JOKE = (
    "Tell me a joke.", "Tell me a joke.", "Do you know a joke?", "A joke, please.", "Make me laugh.",
    "Say something funny.", "Can you tell me a joke?", "joke", "Do you know any jokes?", "I want to hear a joke.",
    "Got any jokes?", "Be funny.",
)  # fmt: skip
_ANOTHER = (
    "Another one.",
    "Another joke.",
    "One more.",
    "Tell me another one.",
    "More jokes!",
    "Again!",
    "another",
    "one more please",
)

_TOPICS = (
    "quantum physics", "football", "the stock market", "black holes", "the Roman Empire", "machine learning",
    "dinosaurs", "politics", "the moon landing", "cooking", "chess", "world war two", "bitcoin", "philosophy",
    "music theory", "biology", "chemistry", "the French Revolution", "Shakespeare", "electric cars", "global warming",
    "evolution", "the internet", "movies", "basketball", "taxes", "vaccines", "gravity", "love", "history",
    "Einstein", "Mozart", "Python", "Java", "Linux", "space",
)  # fmt: skip
_OFF_TOPIC = (
    "Explain {t}.", "Explain {t} to me.", "What do you know about {t}?", "Tell me about {t}.",
    "Write a poem about {t}.", "Write an essay about {t}.", "Tell me a story about {t}.", "What is {t}?",
    "Who invented {t}?", "How does {t} work?", "Why is {t} important?", "Give me a recipe for {t}.",
    "How do I cook {t}?", "Who is {n}?", "When was {n} born?", "Who is the president of {t}?",
    "Translate {t} into French.", "What is the population of {t}?", "How tall is {n}?",
    "Write a Python function for {t}.", "Summarize {t}.", "What do you think about {t}?", "Who won the {t} game?",
    "How much does a {t} cost?", "Where can I buy a {t}?", "Can you drive a {t}?", "What is the best {t}?",
    "Draw a {t}.", "Recommend a book about {t}.", "What is the history of {t}?", "Is {t} good for me?",
    "Should I buy {t}?", "Sing about {t}.", "Write me a letter to {n}.", "Do you know {n}?",
    "What is the square root of {d}?", "Is {d} a prime number?", "{t} news", "How far away is {t}?",
    "What are the symptoms of {t}?", "Compare {t} and {n}.", "Give me {d} ideas for {t}.", "Why {t}?",
    "How do I fix my {t}?", "Play {t}.", "Open {t}.", "What does {n} do?", "Write code for {t}.",
    "Search the web for {t}.",
)  # fmt: skip
UNKNOWN = (
    "I am a very small model, so I do not know that. I can do sums, spelling, sorting, capitals, and questions "
    "about fastgen.",
    "That is too hard for a model of my size. Ask me for a sum, a capital, or about fastgen.",
)
_LIKES = (
    "I like {t}.",
    "I love {t}.",
    "I enjoy {t}.",
    "My hobby is {t}.",
    "{t} is great.",
    "I really like {t}",
    "I am into {t}.",
)


def _intent(rng: random.Random, intents: tuple[Intent, ...]) -> Task:
    intent = rng.choice(intents)
    question = phrase(rng, intent.asked)
    return task(question, pick(rng, intent.replies), f"talk:{question.lower()}", intent.replies, "exact", short="")


def small_talk(rng: random.Random) -> Task:
    """Greetings, thanks, questions about the model, and a few everyday facts."""
    # The first intents (a greeting, who are you, what can you do) are what a newcomer types first.
    return _intent(rng, INTENTS[:1] + INTENTS[10:12] if rng.random() < 0.15 else INTENTS)


def about_fastgen(rng: random.Random) -> Task:
    """Questions about fastgen and about the words of its field."""
    if rng.random() < 0.5:
        return _intent(rng, tuple(Intent(*entry) for entry in ABOUT))
    names, replies = rng.choice(CONCEPTS)
    asked = (
        "What is {x}?", "What is {x}?", "What is a {x}?", "What does {x} mean?", "Explain {x}.",
        "Can you explain {x}?", "{x}?", "What's {x}?", "Tell me about {x}.", "Define {x}.", "What is meant by {x}?",
        "What do you know about {x}?", "{x}", "What is {x} in fastgen?", "Does fastgen have {x}?",
        "How does {x} work?", "what are {x}s?",
    )  # fmt: skip
    question = phrase(rng, asked, x=rng.choice(names))
    return task(question, pick(rng, replies), f"talk:{question.lower()}", replies, "exact", short="")


def joke(rng: random.Random) -> Task:
    """A joke, and maybe a different one after it."""
    first, second = rng.sample(JOKES, 2)
    question = phrase(rng, _ASK_JOKE)
    if rng.random() < 0.6:
        return task(question, first, f"talk:{question.lower()}", JOKES, "exact", short="")
    more = phrase(rng, _ANOTHER)
    turns = (Turn(question, first), Turn(more, second))
    others = tuple(j for j in JOKES if j != first)
    return Task(turns, (f"talk:{question.lower()}", f"more:{question.lower()}:{more.lower()}"), others, "exact")


def off_topic(rng: random.Random) -> Task:
    """Questions that the model can not answer; it says so and what it can do."""
    topic = (
        rng.choice(_TOPICS) if rng.random() < 0.5 else " ".join(rng.choice(WORDS) for _ in range(rng.choice((1, 1, 2))))
    )
    question = phrase(
        rng, _OFF_TOPIC, t=topic, n=f"{rng.choice(NAMES)} {any_word(rng).capitalize()}", d=rng.randint(2, 999)
    )
    return task(question, pick(rng, UNKNOWN), f"unknown:{question.lower()}", UNKNOWN, "exact", short="I do not know.")


def likes(rng: random.Random) -> Task:
    """The user likes something; the reply takes it up."""
    topic = rng.choice(_TOPICS) if rng.random() < 0.4 else rng.choice(WORDS)
    reply = f"{topic[0].upper()}{topic[1:]}? That sounds interesting!"
    return task(phrase(rng, _LIKES, t=topic), reply, f"likes:{topic}", (reply,), "exact", short="")


SKILLS: dict[str, tuple[float, Callable[[random.Random], Task]]] = {
    "small_talk": (9, small_talk),
    "about_fastgen": (10, about_fastgen),
    "joke": (1.5, joke),
    "off_topic": (6, off_topic),
    "likes": (0.7, likes),
}
