# ruff: noqa: E501, SIM905 (a fact stands on one line)
"""Small facts, words of other languages, rhymes and plurals for the bundled model.

The facts are few, so the split is by wording, as in `tiny_facts.py`.
"""

import random
from collections.abc import Callable

from tiny_task import Task, any_word, exchange, made_up_word, phrase, pick, task
from tiny_words import CAPITALS, COLORS, NAMES, THINGS, WORDS

# One fact a line: ways to ask for it, separated by ";", then the reply.
_FACTS = """
What is the largest planet?; Which planet is the biggest?; Biggest planet of the solar system?; What's the largest planet in our solar system?; Name the biggest planet. -> The biggest planet is Jupiter.
What is the smallest planet?; Which planet is the smallest?; Smallest planet in the solar system? -> The smallest planet is Mercury.
Which planet is closest to the sun?; What is the closest planet to the sun?; What planet is nearest to the sun? -> Mercury is closest to the sun.
How many planets are there?; How many planets are in the solar system?; Number of planets?; How many planets does the solar system have? -> There are 8 planets: Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus and Neptune.
Which planet is red?; What is the red planet?; Which planet is called the red planet? -> Mars is the red planet.
Which planet has rings?; What planet has rings?; Which planet is famous for its rings? -> Saturn is famous for its rings.
What is the sun?; Is the sun a star?; What kind of thing is the sun? -> The sun is a star.
What is the moon?; What goes around the earth?; Does the earth have a moon? -> The moon goes around the Earth.
How far is the moon?; How far away is the moon?; What is the distance to the moon? -> The moon is about 384,000 km away.
How long does the earth take around the sun?; How long does it take the earth to go around the sun? -> The Earth takes one year to go around the sun.
At what temperature does water freeze?; When does water freeze?; What is the freezing point of water?; freezing point of water -> Water freezes at 0 degrees Celsius.
When does water boil?; What is the boiling point of water?; At how many degrees does water boil?; boiling point of water?; How hot is boiling water?; What temperature does water boil at? -> Water boils at 100 degrees Celsius.
What is the formula of water?; Chemical formula of water?; What is water made of?; What does H2O mean?; What is water's formula?; H2O?; What does h2o stand for? -> Water is H2O: two atoms of hydrogen and one of oxygen.
What is ice?; What is ice made of?; What is frozen water called? -> Ice is frozen water.
What is the formula of salt?; What is salt?; Chemical formula of salt?; What is table salt made of? -> Table salt is sodium chloride, NaCl.
What is CO2?; What does CO2 mean?; What is the formula of carbon dioxide? -> CO2 is carbon dioxide.
What is the chemical symbol of gold?; Chemical symbol for gold?; What is Au? -> The symbol of gold is Au.
What is the chemical symbol of iron?; Chemical symbol for iron?; What is Fe? -> The symbol of iron is Fe.
What do we breathe?; What gas do we need to breathe?; What is in the air? -> We breathe oxygen; air is mostly nitrogen.
What is the speed of light?; How fast is light?; speed of light; How fast does light travel? -> Light travels about 300,000 km a second.
What is pi?; What is the value of pi?; How much is pi?; pi?; Digits of pi? -> Pi is about 3.14159.
How many sides does a triangle have?; How many sides has a triangle?; Sides of a triangle?; How many corners does a triangle have? -> A triangle has 3 sides.
How many sides does a square have?; Sides of a square?; How many corners does a square have? -> A square has 4 sides.
How many sides does a hexagon have?; Sides of a hexagon?; How many sides has a hexagon? -> A hexagon has 6 sides.
How many sides does a pentagon have?; Sides of a pentagon?; How many sides has a pentagon? -> A pentagon has 5 sides.
How many sides does an octagon have?; Sides of an octagon? -> An octagon has 8 sides.
How many degrees are in a circle?; How many degrees does a circle have?; Degrees of a circle? -> A circle has 360 degrees.
How many degrees does a right angle have?; What is a right angle? -> A right angle has 90 degrees.
How many legs does a spider have?; How many legs has a spider?; Legs of a spider?; Number of legs of a spider?; How many legs do spiders have? -> A spider has 8 legs.
How many legs does a dog have?; How many legs has a dog?; How many legs do dogs have?; How many legs does a cat have?; How many legs has a cat? -> It has 4 legs.
How many legs does an insect have?; How many legs does an ant have?; How many legs has an insect?; How many legs do bees have?; How many legs has an ant got? -> Insects have 6 legs.
How many legs does a bird have?; How many legs has a chicken?; How many legs has a bird got?; How many legs do birds have? -> Birds have 2 legs.
How many arms does an octopus have?; How many arms has an octopus got?; How many legs does an octopus have? -> An octopus has 8 arms.
What is the largest animal?; What's the biggest animal?; Which animal is the largest?; biggest animal in the world? -> The largest animal is the blue whale.
What is the fastest animal?; Which animal is the fastest?; What's the fastest land animal? -> The fastest animal on land is the cheetah.
What is the tallest animal?; Which animal is the tallest?; Which animal has a long neck? -> The tallest animal is the giraffe.
What is the smallest bird?; Which bird is the smallest? -> The smallest bird is the hummingbird.
What sound does a dog make?; What does a dog say?; What noise does a dog make?; What noise do dogs make?; What sounds do dogs make? -> A dog says woof.
What sound does a cat make?; What does a cat say?; What noise does a cat make?; What noise do cats make? -> A cat says meow.
What noise does a cow make?; What does a cow say?; What sound do cows make?; What do cows say?; How does a cow sound?; Which sound does a cow make? -> A cow says moo.
What sound does a sheep make?; What does a sheep say?; What noise does a sheep make? -> A sheep says baa.
What sound does a duck make?; What does a duck say?; What noise does a duck make? -> A duck says quack.
What sound does a pig make?; What does a pig say?; What noise does a pig make? -> A pig says oink.
What sound does a lion make?; What does a lion do?; What noise does a lion make? -> A lion roars.
What does the fox say?; What does a fox say?; What sound does a fox make? -> Nobody knows for sure; a fox barks and screams.
What do cows eat?; What does a cow eat?; What do sheep eat? -> They eat grass.
What do cats eat?; What does a cat eat? -> Cats eat meat, fish and mice.
What do pandas eat?; What does a panda eat? -> Pandas eat bamboo.
What do bees make?; Where does honey come from?; Who makes honey? -> Bees make honey.
Where does milk come from?; What gives milk?; Who gives us milk? -> Milk comes from cows.
What is a baby dog called?; What is a young dog called?; What do you call a baby dog? -> A baby dog is a puppy.
What is a baby cat called?; What is a young cat called?; What do you call a baby cat? -> A baby cat is a kitten.
Is a whale a fish?; Are whales fish?; What is a whale? -> A whale is not a fish; it is a mammal.
Is a tomato a fruit?; Is a tomato a vegetable?; Are tomatoes fruits? -> A tomato is a fruit, though we eat it as a vegetable.
What color is a banana?; What colour are bananas?; Color of a banana?; Which colour does a banana have? -> A banana is yellow.
What color is blood?; What colour is blood?; Which color does blood have? -> Blood is red.
What color is snow?; What colour is snow?; Which color does snow have? -> Snow is white.
What color is the sun?; What colour does the sun have?; Which color is the sun? -> The sun looks yellow.
What color is a tomato?; What colour are tomatoes?; What colour is a strawberry?; What color are cherries? -> It is red.
What color are leaves?; What colour is a leaf?; What colour are trees? -> Leaves are green.
What color is coal?; What colour is the night?; What colour is a raven? -> It is black.
What color is the sea?; What colour is the ocean?; Which colour has the sea? -> The sea is blue.
What colour is grass?; Which colour has grass?; What's the color of grass? -> Grass is green.
What is the color of the sky?; Which colour has the sky?; What's the colour of the sky?; What color does the sky have?; Sky color? -> The sky is blue.
What do you get from blue and yellow?; What do blue and yellow make?; Blue and yellow makes which color? -> Blue and yellow make green.
What do red and blue make?; What do you get when you mix red and blue? -> Red and blue make purple.
What do red and yellow make?; What do you get when you mix red and yellow? -> Red and yellow make orange.
What are the primary colors?; Name the primary colours. -> Red, yellow and blue.
Who wrote Hamlet?; Who wrote Macbeth?; Who is the author of Romeo and Juliet?; Who wrote the play Romeo and Juliet?; Author of Hamlet?; Romeo and Juliet was written by whom?; Who is Shakespeare? -> William Shakespeare wrote Hamlet, Macbeth, and Romeo and Juliet.
Who wrote Faust?; Author of Faust?; Who is Goethe? -> Goethe wrote Faust.
Who wrote Don Quixote?; Author of Don Quixote? -> Cervantes wrote Don Quixote.
Who painted the Mona Lisa?; Painter of the Mona Lisa?; Who made the Mona Lisa? -> Leonardo da Vinci painted the Mona Lisa.
Who painted the Starry Night?; Who is Van Gogh? -> Vincent van Gogh painted the Starry Night.
Who discovered America?; Who found America?; Who is Columbus? -> Columbus reached America in 1492.
Who was the first man on the moon?; Who walked on the moon first?; First person on the moon?; Who is Neil Armstrong? -> Neil Armstrong was the first on the moon, in 1969.
When was the moon landing?; In which year did people land on the moon? -> The first moon landing was in 1969.
Who invented the telephone?; Who made the first telephone? -> Alexander Graham Bell patented the telephone.
Who invented the light bulb?; Who made the light bulb? -> Thomas Edison is known for the light bulb.
Who was Albert Einstein?; Who is Einstein?; What did Einstein do?; Who found relativity? -> Albert Einstein was a physicist who found the theory of relativity.
Who was Isaac Newton?; Who is Newton?; Who discovered gravity? -> Isaac Newton was a physicist who described gravity.
Who was Alan Turing?; Who is Turing? -> Alan Turing was a pioneer of computer science.
Who is Ada Lovelace?; Who was the first programmer? -> Ada Lovelace wrote the first computer program.
Who invented Python?; Who made Python?; Who created Python? -> Guido van Rossum created Python.
Who made Linux?; Who created Linux?; Who is Linus Torvalds? -> Linus Torvalds created Linux.
Who was the first president of the USA?; First president of the United States?; Who was George Washington? -> George Washington was the first president of the United States.
When did World War 2 end?; When did the second world war end?; When was the end of World War II? -> World War II ended in 1945.
When did World War 1 start?; When did the first world war begin? -> World War I began in 1914.
When did the Berlin wall fall?; In which year did the Berlin wall come down? -> The Berlin wall fell in 1989.
What is the highest mountain?; What is the tallest mountain?; Highest mountain in the world?; Which mountain is the highest? -> The highest mountain is Mount Everest.
What is the longest river?; Which river is the longest?; Longest river in the world? -> The longest river is the Nile.
What is the largest ocean?; What is the biggest ocean?; Which ocean is the largest? -> The largest ocean is the Pacific.
What are the oceans?; How many oceans are there?; Name the oceans. -> There are 5 oceans: Pacific, Atlantic, Indian, Southern and Arctic.
What is the largest country?; What's the biggest country?; Which country is the largest? -> The largest country is Russia.
What is the smallest country?; Which country is the smallest? -> The smallest country is Vatican City.
What is the largest desert?; Which desert is the largest hot one?; Where is the Sahara? -> The Sahara, in Africa, is the largest hot desert.
Where is the Eiffel Tower?; In which city is the Eiffel Tower?; Where can I see the Eiffel Tower? -> The Eiffel Tower is in Paris.
Where is the Statue of Liberty?; In which city is the Statue of Liberty? -> The Statue of Liberty is in New York.
Where is Big Ben?; In which city is Big Ben? -> Big Ben is in London.
Where are the pyramids?; Where can I see the pyramids? -> The pyramids are in Egypt.
Where is the Colosseum?; In which city is the Colosseum? -> The Colosseum is in Rome.
Which language do people speak in Brazil?; What language is spoken in Brazil? -> People in Brazil speak Portuguese.
Which language do people speak in Mexico?; What language is spoken in Spain? -> They speak Spanish.
Which language do people speak in Austria?; What language is spoken in Germany? -> They speak German.
Which language do people speak in Egypt?; What language is spoken in Egypt? -> People in Egypt speak Arabic.
What is the currency of Japan?; Which money do people use in Japan? -> The currency of Japan is the yen.
What is the currency of the USA?; Which money do people use in America? -> The currency of the United States is the dollar.
What is the currency of Germany?; Which money do people use in France?; What is the currency of Europe? -> It is the euro.
How many days does February have in a leap year?; How long is February in leap years? -> In a leap year, February has 29 days.
How many days are in a leap year?; Number of days in a leap year?; How long is a leap year?; Days of a leap year?; How many days has a leap year?; A leap year has how many days? -> A leap year has 366 days.
How many weeks are in a year?; How many weeks does a year have?; Weeks in a year? -> A year has 52 weeks.
How many days are in a month?; How long is a month? -> A month has 28 to 31 days.
How many hours are in a week?; Hours in a week? -> A week has 168 hours.
How many seconds are in an hour?; Seconds in an hour?; How many seconds does an hour have? -> An hour has 3600 seconds.
How many minutes are in a day?; Minutes in a day? -> A day has 1440 minutes.
How many is a dozen?; What is a dozen?; How much is a dozen?; How many things are in a dozen?; A dozen is how many?; How many are in a dozen? -> A dozen is 12.
How many is half a dozen?; What is half a dozen?; Half a dozen is how many? -> Half a dozen is 6.
How many are a pair?; What is a pair?; How many is a couple? -> A pair is 2.
How many zeros does a million have?; How many zeros are in a million?; What is a million? -> A million is 1,000,000: it has 6 zeros.
How many zeros does a billion have?; What is a billion? -> A billion is 1,000,000,000: it has 9 zeros.
How many bits are in a byte?; What is a byte?; How many bits does a byte have? -> A byte has 8 bits.
How many fingers does a hand have?; How many fingers are on a hand?; How many fingers do I have on one hand? -> A hand has 5 fingers.
How many fingers do people have?; How many fingers does a human have?; How many toes do I have? -> People have 10 fingers and 10 toes.
How many eyes do people have?; How many eyes does a human have?; How many ears do I have? -> People have 2.
How many bones does a human have?; How many bones are in the body? -> An adult has 206 bones.
How many teeth does a human have?; How many teeth do adults have? -> An adult has up to 32 teeth.
How many players are in a football team?; How many players has a soccer team? -> A soccer team has 11 players.
How many strings does a guitar have?; How many strings has a guitar? -> A guitar has 6 strings.
How many strings does a violin have?; How many strings has a violin? -> A violin has 4 strings.
How many keys does a piano have?; How many keys has a piano? -> A piano has 88 keys.
How many cards are in a deck?; How many cards does a deck have? -> A deck has 52 cards.
How many squares does a chess board have?; How many fields are on a chess board? -> A chess board has 64 squares.
How many states does the USA have?; How many states are in the USA? -> The United States has 50 states.
What is Python?; What kind of language is Python?; Explain Python. -> Python is a programming language.
What is Linux?; Is Linux an operating system? -> Linux is an operating system.
What is a computer?; Explain what a computer is. -> A computer is a machine that follows instructions.
What is the internet?; Explain the internet. -> The internet is a network that connects computers all over the world.
What is AI?; What is artificial intelligence?; Explain AI. -> Artificial intelligence is software that does what seems to need a mind.
What is machine learning?; Explain machine learning. -> In machine learning, a program learns from examples instead of rules.
What is a neural network?; Explain neural networks. -> A neural network is layers of simple units whose weights are learned from data.
What is PyTorch?; Explain PyTorch.; What is torch? -> PyTorch is a library for neural networks in Python. fastgen uses it.
What is CUDA?; Explain CUDA. -> CUDA is NVIDIA's platform to compute on its GPUs.
What is Triton?; Explain Triton. -> Triton is a language for GPU kernels in Python. fastgen's kernels are written in it.
What is vLLM?; Explain vLLM.; Do you know vLLM?; What does vLLM do? -> vLLM is a library that serves large language models, with many models and features.
What is SGLang?; Explain SGLang.; What is llama.cpp?; What is Ollama?; What is TGI? -> It is another program that runs language models.
What is Hugging Face?; Explain Hugging Face.; What is the hub?; What is a hub id? -> Hugging Face has a hub of models; a hub id such as Qwen/Qwen3-8B names one.
What is NVIDIA?; Who makes GPUs?; What is an H100?; What is an H200? -> NVIDIA makes GPUs such as the H100 and the H200.
What is OpenAI?; Who made ChatGPT?; What is ChatGPT?; What is GPT? -> OpenAI is the company that made ChatGPT, a large language model.
What is Anthropic?; Who made Claude?; What is Claude?; What is Claude Code? -> Anthropic is the company that made Claude, a large language model.
What is Llama?; Who made Llama?; What is Qwen?; What is Mistral? -> It is a family of language models that fastgen runs.
What is JSON?; What does JSON mean?; Explain JSON. -> JSON is a text format for data: objects, lists, strings and numbers.
What is an API?; What does API mean?; Explain APIs. -> An API is how one program asks another for something.
What is HTTP?; What does HTTP mean?; What is a server?; Explain servers. -> A server answers requests of other programs, often over HTTP.
What is asyncio?; Explain asyncio.; What is async Python? -> asyncio runs many waiting tasks in one thread of Python.
What is Rust?; What is JavaScript?; What is C++?; What is Go? -> It is a programming language.
What is Git?; What is GitHub?; Explain Git. -> Git keeps the versions of code; GitHub hosts it.
What is Docker?; What is a container?; Explain Docker. -> Docker runs programs in containers, with all that they need.
What is pip?; What is a virtual environment?; What is PyPI? -> pip installs packages of Python from PyPI into an environment.
What is a haiku?; Explain what a haiku is. -> A haiku is a poem of three short lines.
What is a palindrome?; Explain palindromes. -> A palindrome reads the same backwards, such as level.
What is a prime number?; What are primes?; Explain prime numbers. -> A prime number is larger than 1 and can be divided only by 1 and itself.
What is an even number?; When is a number even? -> An even number can be divided by 2, such as 4.
What is an odd number?; When is a number odd? -> An odd number can not be divided by 2, such as 7.
What is today?; How late is it?; Tell me the time.; What's the date?; Do you know what time it is?; Which year do we have?; What is the current time?; Have you got the time?; Can you tell me the time?; time?; date? -> I can not see a clock or a calendar, so I do not know.
How is the weather in London?; What's the weather in Tokyo?; Weather in New York; Is it sunny in Rome?; How hot is it in Madrid right now?; What's the temperature outside?; Do I need an umbrella?; What will the weather be like tomorrow?; weather today; Will it be hot in Paris today?; What is the weather like in Oslo now?; Is it raining in Vienna? -> I can not look at the weather. I hope it is sunny!
"""  # fmt: skip


def _parse(text: str) -> tuple[tuple[tuple[str, ...], str], ...]:
    lines = (line.split(" -> ") for line in text.strip().splitlines())
    return tuple((tuple(asked.split("; ")), reply) for asked, reply in lines)


FACTS = _parse(_FACTS)


def fact(rng: random.Random) -> Task:
    """Small facts: planets, animals, colors, authors, records"""
    asked, reply = rng.choice(FACTS)
    opener = (
        rng.choice(("Do you know: ", "I have a question. ", "My son asks: ", "Trivia: ")) if rng.random() < 0.12 else ""
    )
    return exchange(rng, [opener + text for text in asked], (reply,))


# English: Spanish, French, German, Italian.
_LANGUAGES = ("Spanish", "French", "German", "Italian")
_TRANSLATIONS = {
    line.split(":")[0]: line.split(":")[1].split(",")
    for line in """hello:hola,bonjour,hallo,ciao|goodbye:adiós,au revoir,auf Wiedersehen,arrivederci
thank you:gracias,merci,danke,grazie|thanks:gracias,merci,danke,grazie|please:por favor,s'il vous plaît,bitte,per favore
yes:sí,oui,ja,sì|no:no,non,nein,no|good morning:buenos días,bonjour,guten Morgen,buongiorno
good night:buenas noches,bonne nuit,gute Nacht,buona notte|cat:gato,chat,Katze,gatto|dog:perro,chien,Hund,cane
house:casa,maison,Haus,casa|water:agua,eau,Wasser,acqua|bread:pan,pain,Brot,pane|milk:leche,lait,Milch,latte
book:libro,livre,Buch,libro|friend:amigo,ami,Freund,amico|sun:sol,soleil,Sonne,sole|moon:luna,lune,Mond,luna
love:amor,amour,Liebe,amore|red:rojo,rouge,rot,rosso|blue:azul,bleu,blau,blu|one:uno,un,eins,uno|two:dos,deux,zwei,due
three:tres,trois,drei,tre|man:hombre,homme,Mann,uomo|woman:mujer,femme,Frau,donna|beer:cerveza,bière,Bier,birra
cheese:queso,fromage,Käse,formaggio|apple:manzana,pomme,Apfel,mela|tree:árbol,arbre,Baum,albero""".replace(
        "\n", "|"
    ).split("|")
}


def translate(rng: random.Random) -> Task:
    """A common word in Spanish, French, German or Italian; the split is by wording"""
    word, place = rng.choice(tuple(_TRANSLATIONS)), rng.randrange(4)
    language = _LANGUAGES[place]
    asked = ("How do you say {w} in {l}?", "What is {w} in {l}?", "Translate {w} to {l}.", "Translate {w} into {l}.",
             "{w} in {l}", "What is the {l} word for {w}?", "How do I say {w} in {l}?", "What's {l} for {w}?",
             "How does one say {w} in {l}?", "What is {w} called in {l}?", "Say {w} in {l}.")  # fmt: skip
    written = rng.choice((word, word, word, f'"{word}"', f"'{word}'"))
    question = phrase(rng, asked, w=written, l=language if rng.random() < 0.5 else language.lower())
    answer = _TRANSLATIONS[word][place]
    reply = pick(rng, ("{w} is {a} in {l}.", "In {l}: {a}."), w=word.capitalize(), a=answer, l=language)
    return task(question, reply, f"translate:{question.lower()}", (answer, f"{answer} in {language}"), short=answer)


_RHYMES = tuple(
    line.split()
    for line in """cat hat bat rat mat|dog fog log frog|house mouse blouse|tree bee sea free key|moon spoon soon noon
light night bright kite|day play say way|ring king sing thing|cake lake snake make|ball wall tall fall|star car far jar
book look cook hook|rain train brain pain|bed red head bread|sun fun run one|box fox socks|blue shoe true two|bear chair hair pear
nose rose hose|gold cold old bold|mice ice rice nice|hand sand land band|love glove dove|time lime rhyme|fish dish wish
goat boat coat|clock rock sock lock|pen ten hen men|green queen seen|snow go know show|heart art part start|fire wire tire
name game flame same|word bird heard|door floor more four""".replace("\n", "|").split("|")
)  # fmt: skip
_PLURALS = dict(
    pair.split("/")
    for pair in """mouse/mice goose/geese child/children man/men woman/women foot/feet tooth/teeth ox/oxen sheep/sheep
    fish/fish person/people leaf/leaves knife/knives wolf/wolves life/lives half/halves shelf/shelves wife/wives baby/babies
    city/cities lady/ladies fly/flies cherry/cherries story/stories box/boxes bus/buses fox/foxes dish/dishes watch/watches
    church/churches tomato/tomatoes potato/potatoes hero/heroes deer/deer thief/thieves party/parties""".split()
)
_PALINDROMES = "level racecar radar noon civic madam kayak refer rotor stats wow mom dad eye deed peep solos tenet anna otto".split()


def rhyme(rng: random.Random) -> Task:
    """A word that rhymes with another; the split is by wording"""
    group = rng.choice(_RHYMES)
    word, other = rng.sample(group, 2)
    asked = ("What rhymes with {w}?", "What word rhymes with {w}?", "Find a rhyme for {w}.", "Give me a rhyme for {w}.", "Rhyme with {w}",
             "Which word rhymes with {w}?", "A rhyme for {w}?", "Tell me a word that rhymes with {w}.", "What does {w} rhyme with?",
             "Rhymes for {w}")  # fmt: skip
    question = phrase(rng, asked, w=word)
    accept = tuple(f"{o} rhymes with {word}." for o in group if o != word)
    return task(question, f"{other} rhymes with {word}.".capitalize(), f"rhyme:{question.lower()}", accept, short=other)


def plural(rng: random.Random) -> Task:
    """The plural of a noun; the split is by wording"""
    word = (
        rng.choice(tuple(_PLURALS))
        if rng.random() < 0.6
        else rng.choice(("cat", "dog", "house", "tree", "car", "apple", "book", "table", "egg"))
    )
    answer = _PLURALS.get(word, f"{word}s")
    asked = ("What is the plural of {w}?", "Plural of {w}?", "The plural of {w}", "What's the plural form of {w}?", "What is the plural for {w}?",
             "One {w}, two what?", "Give me the plural of {w}.", "Tell me the plural of {w}.", "How do you write {w} in the plural?")  # fmt: skip
    question = phrase(rng, asked, w=word)
    return task(
        question,
        pick(rng, ("The plural of {w} is {a}.", "{a}"), w=word, a=answer),
        f"plural:{question.lower()}",
        answer,
    )


def palindrome(rng: random.Random) -> Task:
    """Is level a palindrome? The reply writes the word backwards"""
    word = rng.choice(_PALINDROMES) if rng.random() < 0.5 else any_word(rng)
    if rng.random() < 0.2:
        half = made_up_word(rng)[: rng.randint(2, 4)]
        word = half + half[::-1][rng.randrange(2) :]
    same = word == word[::-1]
    asked = ("Is {w} a palindrome?", "Is the word {w} a palindrome?", "{w}: palindrome?", "Check if {w} is a palindrome.",
             "Does {w} read the same backwards?", "Is {w} a palindrome or not?")  # fmt: skip
    letters = f"{'-'.join(word)} backwards is {'-'.join(word[::-1])}"
    reply = f"{letters}: {'yes' if same else 'no'}, {word} is {'a' if same else 'not a'} palindrome."
    return task(
        phrase(rng, asked, w=word), reply, f"palindrome:{word}", (reply,), "exact", short="Yes." if same else "No."
    )


_ANIMALS = "dog cat horse cow sheep lion tiger elephant mouse rabbit bear wolf fox monkey eagle shark snake frog duck goat".split()
_FRUITS = "apple banana cherry grape lemon mango orange peach pear plum strawberry melon kiwi lime fig".split()
_KINDS: dict[str, tuple[str, ...]] = {
    "animals": tuple(_ANIMALS),
    "fruits": tuple(_FRUITS),
    "colors": COLORS[:10],
    "colours": COLORS[:10],
    "countries": tuple(CAPITALS)[::5],
    "names": NAMES[::9],
    "capitals": tuple(CAPITALS.values())[::6],
    "vegetables": ("carrot", "potato", "onion", "pea", "bean", "cabbage", "spinach", "broccoli"),
    "words": WORDS[::40],
    "things": THINGS,
    "planets": ("Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune"),
    "programming languages": ("Python", "C", "Java", "Rust", "Go", "JavaScript"),
}
_COUNTS = ("zero", "one", "two", "three", "four", "five")


def name_some(rng: random.Random) -> Task:
    """Name three animals; a word that starts with z; the split is by wording"""
    if rng.random() < 0.4:
        letter = rng.choice(WORDS)[0]
        word = next(word for word in WORDS if word[0] == letter)
        asked = ("Give me a word that starts with {l}.", "A word with {l}?", "Name a word that begins with {l}.", "Tell me a word starting with {l}.",
                 "What is a word that starts with {l}?", "Which word starts with {l}?", "Say a word that begins with the letter {l}.")  # fmt: skip
        question = phrase(rng, asked, l=rng.choice((word[0], word[0].upper())))
        return task(question, f"{word.capitalize()}.", f"startswith:{question.lower()}", word)
    kind = rng.choice(tuple(_KINDS))
    n = rng.randint(2, 5)
    chosen = ", ".join(_KINDS[kind][:n])
    asked = (
        "Name {n} {k}.", "Tell me {n} {k}.", "List {n} {k}.", "Give me {n} {k}.", "Can you name {n} {k}?", "What are {n} {k}?", "{n} {k}",
    )  # fmt: skip
    question = phrase(rng, asked, n=_COUNTS[n] if rng.random() < 0.6 else n, k=kind)
    return task(question, f"{chosen[0].upper()}{chosen[1:]}.", f"name:{question.lower()}", chosen)


SKILLS: dict[str, tuple[float, Callable[[random.Random], Task]]] = {
    "fact": (9, fact),
    "translate": (2, translate),
    "rhyme": (1, rhyme),
    "plural": (1, plural),
    "palindrome": (1, palindrome),
    "name_some": (1.5, name_some),
}
