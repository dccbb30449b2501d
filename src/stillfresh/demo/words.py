"""What the people of the demo say: names, sentences, questions. Text only."""

from typing import Final

PEOPLE: Final = (
    "Amina Diallo", "Bruno Costa", "Chen Wei", "Dana Levi", "Emil Berg", "Fatima Noor",
    "Goran Petrov", "Hana Sato", "Ivan Moreno", "Jana Novak", "Kofi Mensah", "Lena Vogt",
    "Mateo Rossi", "Nadia Haddad", "Oskar Lind", "Priya Nair", "Quinn Harper", "Rosa Blanco",
    "Samir Khan", "Tara Walsh", "Umar Bello", "Vera Horvat", "Wanda Kowal", "Yusuf Demir",
)  # fmt: skip

OPENINGS: Final = (
    "Morning walk along the canal:", "Notes from the workshop:", "Small discovery today:",
    "Question for the gardeners:", "From the bakery at six:", "Field report:",
    "Reading this week:", "On the night train:", "Heard at the market:", "In the lab again:",
)  # fmt: skip

LINES: Final = (
    "the herons are back, and nobody believes how large they are.",
    "a hinge, two screws and an hour of patience beat a new door.",
    "the sourdough rises faster when the radio plays. Correlation, surely.",
    "has anybody kept tomatoes alive on a north-facing balcony?",
    "three chapters in, and the lighthouse keeper is still my favourite.",
    "the map was wrong, the bridge was gone, the soup on the other side was excellent.",
    "measured it twice, cut it once, and still it is a centimetre short.",
    "the old clock in the hall gains four minutes a day. I have decided to trust it.",
    "somebody painted the ferry yellow, and the whole harbour looks awake.",
    "if you have a quiet hour, listen to the rain on the tram stop's tin roof.",
    "the new telescope arrived. So did the clouds.",
    "learned to fold a paper crane from a six-year-old. She is a strict teacher.",
    "the chess club meets in the laundrette now; it is warm, and nobody hurries.",
    "we counted eleven kinds of moss on one wall.",
)  # fmt: skip

EDITS: Final = (
    "(Edit: it was a Tuesday.)", "(Edit: photo follows.)", "(Edit: thank you all!)",
    "(Edit: the second bridge, not the first.)", "(Edit: recipe in the comments.)",
)  # fmt: skip

TITLES: Final = (
    "Which bridge is the oldest?", "A swap shelf for the station", "Lost: one yellow umbrella",
    "Seeds to give away", "Repair evening on Thursday", "The quietest café in town",
    "Night buses: what would you change?", "A name for the new ferry", "Choir needs two altos",
    "Who feeds the courtyard cat?", "Best window seat on line 4", "Open rehearsal on Sunday",
)  # fmt: skip

REPLIES: Final = (
    "Count me in.", "I asked my grandmother: she says the stone one.", "Thursday works for me.",
    "Seen near the fountain, an hour ago.", "I can bring two chairs.", "What time does it start?",
    "This made my day.", "The cat has at least three names.", "Yes, and bring the children!",
    "The second one, by far.", "Is there room for one more?", "I have photos of it from 1974.",
)  # fmt: skip

GOODS: Final = (
    ("Coffee beans, 1 kg", 1850), ("Olive oil, 1 l", 1290), ("Bicycle tube", 690),
    ("Notebook, dotted", 540), ("Reading lamp", 4900), ("Rain jacket", 7900),
)  # fmt: skip

ASKS: Final = (
    ("The build robot", "wants to publish version 4.2"),
    ("The garden pump", "wants to water the roof for ten minutes"),
    ("The night porter", "wants to open the side door for a courier"),
    ("The travel agent bot", "wants to book seat 14 A"),
    ("The library desk", "wants to lend out the last copy"),
    ("The kitchen bot", "wants to order twelve eggs"),
    ("The archive", "wants to delete logs older than a year"),
)  # fmt: skip

BOTS: Final = ("Ada", "Bo", "Cleo", "Dex", "Edda", "Fin")
