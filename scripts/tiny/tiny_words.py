# ruff: noqa: SIM905, E501 (a word list is easier to read as text)
"""Word lists for the bundled model's training dialogues: plain words, names, countries, calendar.

Everything here was written for this project; the dialogues of `tiny_data.py` are built from these lists alone.
"""

WORDS: tuple[str, ...] = tuple(
    """
apple apricot avocado banana bean beet berry biscuit bread broccoli butter cabbage cake candy carrot cashew celery
cheese cherry chocolate cinnamon coconut coffee cookie corn cream cucumber cupcake dinner dough egg fig flour garlic
ginger grape honey jam juice kiwi lemon lettuce lime lunch mango maple meal melon milk mint muffin mushroom mustard
noodle nut oat olive onion orange pancake papaya pasta pastry peach peanut pear pepper pickle pie pizza plum popcorn
potato pudding pumpkin radish raisin raspberry rice salad salt sandwich sauce soup spice spinach squash strawberry
sugar sushi syrup tea toast tomato turnip vanilla vinegar waffle walnut watermelon wheat yogurt alligator ant badger
bat bear beaver bee beetle bird bison buffalo butterfly camel canary cat cheetah chicken cobra cow coyote crab cricket
crocodile crow deer dog dolphin donkey dragon dragonfly duck eagle elephant falcon ferret finch fish flamingo fox frog
gecko giraffe goat goose gorilla hamster hawk hedgehog hippo horse jaguar kangaroo kitten koala ladybug lamb leopard
lion lizard lobster monkey moose mosquito moth mouse octopus otter owl ox panda panther parrot peacock pelican penguin
pig pigeon pony puppy rabbit raccoon rat raven rhino robin rooster salmon seal shark sheep shrimp snail snake sparrow
spider squid squirrel swan tiger toad trout turkey turtle walrus wasp weasel whale wolf wombat worm zebra arm back
beard blood body bone brain cheek chest chin ear elbow eye eyebrow face finger foot forehead hair hand head heart heel
hip jaw knee leg lip lung mouth muscle nail neck nerve nose palm rib shoulder skin stomach thumb toe tongue tooth
wrist actor artist author baker barber builder butcher captain chef clerk coach cook dancer dentist doctor driver
editor engineer farmer firefighter gardener guard guide hunter inventor judge knight lawyer leader librarian manager
mayor mechanic merchant musician nurse officer painter pilot plumber poet police printer professor programmer queen
sailor scientist secretary servant singer soldier student surgeon tailor teacher trainer waiter worker writer airplane
airport alarm album anchor apartment armor arrow attic bag ball balloon basket bathroom battery beach bed bedroom bell
belt bench bicycle blanket boat book boot bottle bowl box bracelet brick bridge broom brush bucket building bus button
cabin cable calendar camera candle canvas car card carpet castle ceiling chain chair chalk church circle city clock
closet cloth coat coin collar comb compass computer corner cottage cotton couch cup curtain cushion desk diamond
dictionary dish door drawer dress drum dust elevator engine envelope eraser fabric factory fence field flag flashlight
floor flute folder fork fountain frame fridge furniture garage garden gate gift glass globe glove glue gold guitar
hall hammer handle harbor hat helmet highway hook hospital hotel house iron island jacket jar jeans jewel key keyboard
kitchen kite knife knot ladder lamp lantern laptop leather letter library lighthouse lock magazine magnet mailbox map
market marble mask mat match medal metal microphone microscope mirror motor mountain museum nail necklace needle net
newspaper notebook ocean office oven package paint palace paper park pencil phone photo piano picture pillow pipe
plane planet plastic plate pocket pool poster pottery printer prison puzzle radio railway ribbon ring river road robot
rocket roof room rope rubber rug ruler sail satellite saw scarf school scissors screen screw shelf ship shirt shoe
shop shovel shower silver sink skirt soap sock sofa spoon stairs stamp station statue stone store stove street string
subway suit suitcase sweater sword table tank telephone telescope television temple tent theater thread ticket tire
tool torch towel tower town toy tractor trail train tray triangle truck trumpet tunnel umbrella uniform vase vehicle
village violin wagon wall wallet watch wheel whistle window wire wood yard zipper autumn blizzard breeze canyon cave
cliff cloud coast creek dawn desert dew dirt dusk earth earthquake evening flame flood flower fog forest frost galaxy
glacier grass gravel hail hill horizon hurricane ice jungle lake lava leaf lightning meadow midnight moon morning moss
mud night noon oasis petal plain pond rain rainbow reef rock root sand sea season seed shade shadow shore sky smoke
snow spring star steam storm stream summer sun sunrise sunset swamp thunder tide tornado tree valley volcano water
waterfall wave weather weed wind winter able active afraid ancient angry awake bad basic beautiful big bitter blind
bold brave brief bright broad broken busy calm careful cheap clean clear clever cold common cool correct crazy cruel
curious dark dead deep different difficult dirty dry dull eager early easy empty equal evil exact expensive fair
famous fancy fast fat final fine firm flat foolish foreign free fresh friendly full funny gentle giant glad good grand
grateful great greedy guilty handsome happy hard harmless healthy heavy helpful hidden high hollow honest hot huge
hungry important innocent jealous jolly kind large late lazy light little local lonely long loose loud lovely low
lucky mad magic main mild modern narrow nasty natural neat nervous new nice noisy normal odd official old open
ordinary perfect plain pleasant polite poor popular precious pretty private proper proud public pure quick quiet rapid
rare raw ready real recent rich right rough round royal rude sad safe salty scared secret serious shallow sharp short
shy sick silent silly similar simple single slim slow small smart smooth social soft solid sorry sour special square
steady steep stiff straight strange strict strong stupid sudden sweet swift tall tender thick thin tight tiny tired
total tough true ugly unique upset useful usual vast violent warm weak wet whole wide wild wise wonderful wooden
worried worthy wrong young accept achieve admire admit advise agree allow announce answer appear arrive ask attack
attend avoid bake balance become begin behave believe belong bend blame blow borrow bounce break breathe bring build
burn bury buy calculate call carry catch cause celebrate change charge chase check cheer choose clap climb close
collect compare complain connect consider contain continue control copy cough count cover crash crawl create cross cry
cure dance decide deliver depend describe destroy develop disappear discover divide doubt drag draw dream drink drive
drop earn eat encourage enjoy enter escape examine exist expand expect explain explore fail fall feed feel fetch fight
fill find finish fix float fly fold follow forget forgive freeze gather give glow grab grow guess handle hang happen
hate hear help hide hit hold hope hug hunt hurry imagine improve include increase invent invite join joke jump keep
kick kiss knock know laugh launch lead learn leave lend lift like listen live load look lose love make manage mark
marry measure meet melt memorize mention mix move multiply need notice obey observe offer order own pack pass pay
perform play plan plant point polish pour practice pray prefer prepare present press pretend prevent promise protect
prove provide pull punish push raise reach read receive recognize record reduce reflect refuse relax remain remember
remind remove repair repeat replace reply report rescue rest return reverse ride rise roll rule run rush save say
scare scream search see sell send separate serve settle shake share shine shoot shout show shut sing sit sleep slide
smell smile sneeze solve sort sound speak spell spend spin spread stand stare start stay steal stick stop stretch
study subtract succeed suffer suggest supply support suppose surprise surround swim swing take talk taste teach tear
tease tell thank think throw tie touch trade travel treat trust try turn type understand untie use vanish visit wait
wake walk want warn wash waste wear weigh welcome whisper win wish wonder work worry wrap write yell about above
across action advice after again age air alone always among amount animal area army art aunt baby bath battle beauty
behind birth birthday brother business capital care century chance chapter character child choice class college color
comfort concert contest country couple courage cousin crowd culture custom damage danger date daughter day death
degree detail difference direction distance during edge education effect energy entrance error event every evidence
example exercise experience family father fear fever fiction fire flavor force freedom friend fun future game goal
government grammar group growth habit health height hero history hobby holiday home hour humor idea inside interest
jealousy journey joy justice knowledge language law length lesson level liberty life limit list luck machine many math
meaning medicine member memory message method middle minute mistake moment money month mother motion music mystery
name nation nature never news noise nothing number object opinion option other outside pain pair parent part party
past pattern peace people perhaps period person place pleasure poem point power price prize problem product profit
program project purpose quality quarter question rate reason recipe record region religion result reward rhythm risk
role rule science second secret sentence series service shape side sign silence sister size skill sleep soul source
space speech speed spirit sport square state step story strength student subject success surface system talent task
team temperature test than theory thing thought time title today together tomorrow tonight topic trade tradition
travel trick trip trouble truth twice uncle under universe until usually value victory view voice volume war way
wealth week weekend weight wisdom within without word world year yesterday zero
""".split()
)

NAMES: tuple[str, ...] = tuple(
    """
Adam Ahmed Aisha Alan Alex Alice Amir Amy Andre Andrea Anna Anton Arthur Ava Ben Bella Bob Boris Brian Carla Carlos
Carol Chen Chloe Chris Clara Claude Dan Daniel David Dennis Diana Diego Dmitri Elena Eli Ella Emil Emily Emma Eric
Erik Eva Fatima Felix Finn Fiona Frank Fred Gabriel Gary George Gina Grace Greta Hannah Hans Harry Hassan Heidi Helen
Henry Hugo Ian Ines Ingrid Irene Isaac Ivan Jack Jakob James Jane Jasmin Jean Jenny Jim Joan Joe John Jonas Jose Julia
Juan Kai Karen Karl Kate Kenji Kevin Kim Lara Laura Lea Lee Lena Leo Lily Linda Lisa Louis Lucas Lucy Luis Luke Maja
Marco Maria Marie Mark Martin Mary Mateo Max Maya Mei Mia Mike Mila Mohamed Nadia Nick Nina Noah Nora Olga Oliver
Olivia Omar Oscar Pablo Paul Pedro Peter Petra Philip Priya Rachel Rahul Ravi Rita Robert Rosa Ruth Sam Sara Sarah
Sebastian Simon Sofia Sophie Stefan Steve Susan Tara Theo Thomas Tim Tina Tom Uma Vera Victor Wang Wei Will Yara Yuki
Yusuf Zoe
""".split()
)

THINGS: tuple[str, ...] = tuple(
    "apples oranges coins cookies books pencils marbles eggs cards stamps balloons candies dollars euros cats cups flowers stickers bananas toys".split()
)

COLORS: tuple[str, ...] = tuple(
    "red blue green yellow orange purple pink black white brown gray teal gold silver violet turquoise beige".split()
)

CAPITALS: dict[str, str] = dict(
    line.split(":")
    for line in """Afghanistan:Kabul
Albania:Tirana|Algeria:Algiers|Andorra:Andorra la Vella|Angola:Luanda|Argentina:Buenos Aires
Armenia:Yerevan|Australia:Canberra|Austria:Vienna|Azerbaijan:Baku|Bahrain:Manama|Bangladesh:Dhaka
Barbados:Bridgetown|Belarus:Minsk|Belgium:Brussels|Belize:Belmopan|Benin:Porto-Novo|Bhutan:Thimphu|Bolivia:Sucre
Bosnia and Herzegovina:Sarajevo|Botswana:Gaborone|Brazil:Brasilia|Brunei:Bandar Seri Begawan|Bulgaria:Sofia
Burkina Faso:Ouagadougou|Cambodia:Phnom Penh|Cameroon:Yaounde|Canada:Ottawa|Chad:N'Djamena|Chile:Santiago
China:Beijing|Colombia:Bogota|Costa Rica:San Jose|Croatia:Zagreb|Cuba:Havana|Cyprus:Nicosia|Czechia:Prague
Denmark:Copenhagen|Djibouti:Djibouti|Dominican Republic:Santo Domingo|Ecuador:Quito|Egypt:Cairo
El Salvador:San Salvador|Eritrea:Asmara|Estonia:Tallinn|Ethiopia:Addis Ababa|Fiji:Suva|Finland:Helsinki
France:Paris|Gabon:Libreville|Gambia:Banjul|Georgia:Tbilisi|Germany:Berlin|Ghana:Accra|Greece:Athens
Guatemala:Guatemala City|Guinea:Conakry|Guyana:Georgetown|Haiti:Port-au-Prince|Honduras:Tegucigalpa
Hungary:Budapest|Iceland:Reykjavik|India:New Delhi|Indonesia:Jakarta|Iran:Tehran|Iraq:Baghdad|Ireland:Dublin
Italy:Rome|Jamaica:Kingston|Japan:Tokyo|Jordan:Amman|Kazakhstan:Astana|Kenya:Nairobi|Kuwait:Kuwait City
Kyrgyzstan:Bishkek|Laos:Vientiane|Latvia:Riga|Lebanon:Beirut|Liberia:Monrovia|Libya:Tripoli|Liechtenstein:Vaduz
Lithuania:Vilnius|Luxembourg:Luxembourg|Madagascar:Antananarivo|Malawi:Lilongwe|Malaysia:Kuala Lumpur
Maldives:Male|Mali:Bamako|Malta:Valletta|Mauritania:Nouakchott|Mauritius:Port Louis|Mexico:Mexico City
Moldova:Chisinau|Monaco:Monaco|Mongolia:Ulaanbaatar|Montenegro:Podgorica|Morocco:Rabat|Mozambique:Maputo
Myanmar:Naypyidaw|Namibia:Windhoek|Nepal:Kathmandu|Netherlands:Amsterdam|New Zealand:Wellington
Nicaragua:Managua|Niger:Niamey|Nigeria:Abuja|North Korea:Pyongyang|North Macedonia:Skopje|Norway:Oslo
Oman:Muscat|Pakistan:Islamabad|Panama:Panama City|Papua New Guinea:Port Moresby|Paraguay:Asuncion|Peru:Lima
Philippines:Manila|Poland:Warsaw|Portugal:Lisbon|Qatar:Doha|Romania:Bucharest|Russia:Moscow|Rwanda:Kigali
Samoa:Apia|San Marino:San Marino|Saudi Arabia:Riyadh|Senegal:Dakar|Serbia:Belgrade|Sierra Leone:Freetown
Singapore:Singapore|Slovakia:Bratislava|Slovenia:Ljubljana|Somalia:Mogadishu|South Africa:Pretoria
South Korea:Seoul|South Sudan:Juba|Spain:Madrid|Sri Lanka:Colombo|Sudan:Khartoum|Suriname:Paramaribo
Sweden:Stockholm|Switzerland:Bern|Syria:Damascus|Taiwan:Taipei|Tajikistan:Dushanbe|Tanzania:Dodoma
Thailand:Bangkok|Togo:Lome|Tunisia:Tunis|Turkey:Ankara|Turkmenistan:Ashgabat|Uganda:Kampala|Ukraine:Kyiv
United Arab Emirates:Abu Dhabi|United Kingdom:London|United States:Washington, D.C.|Uruguay:Montevideo
Uzbekistan:Tashkent|Venezuela:Caracas|Vietnam:Hanoi|Yemen:Sana'a|Zambia:Lusaka|Zimbabwe:Harare""".replace(
        "|", "\n"
    ).splitlines()
)
COUNTRY_ALIASES: dict[str, tuple[str, ...]] = {
    "United States": ("USA", "US", "America", "the United States", "the USA"),
    "United Kingdom": ("UK", "England", "Great Britain", "the UK", "the United Kingdom"),
    "Netherlands": ("the Netherlands", "Holland"),
    "Czechia": ("the Czech Republic",),
    "Philippines": ("the Philippines",),
    "United Arab Emirates": ("UAE", "the UAE"),
}

OPPOSITES: tuple[tuple[str, str], ...] = tuple(
    (pair.split("/")[0], pair.split("/")[1])
    for pair in """hot/cold big/small tall/short fast/slow happy/sad good/bad old/young new/old light/dark up/down
    left/right open/closed full/empty rich/poor strong/weak hard/soft early/late first/last high/low
    long/short wet/dry clean/dirty loud/quiet day/night black/white true/false yes/no in/out on/off
    near/far love/hate win/lose begin/end push/pull buy/sell start/stop north/south east/west
    inside/outside before/after above/below thick/thin wide/narrow deep/shallow cheap/expensive
    easy/difficult sweet/sour sharp/dull smooth/rough safe/dangerous brave/afraid asleep/awake
    alive/dead always/never friend/enemy question/answer summer/winter heavy/light right/wrong more/less
    many/few polite/rude""".split()
)

DAYS: tuple[str, ...] = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS: tuple[str, ...] = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December",
)  # fmt: skip
MONTH_DAYS: tuple[int, ...] = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
ORDINALS: tuple[str, ...] = (
    "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth", "eleventh", "twelfth",
)  # fmt: skip

_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
_TENS = "_ _ twenty thirty forty fifty sixty seventy eighty ninety".split()


def number_in_words(n: int) -> str:
    """Spell out 0 <= n <= 999 in English: 42 -> "forty-two"."""
    if n < 20:
        return _ONES[n]
    if n < 100:
        return _TENS[n // 10] + (f"-{_ONES[n % 10]}" if n % 10 else "")
    rest = f" {number_in_words(n % 100)}" if n % 100 else ""
    return f"{_ONES[n // 100]} hundred{rest}"
