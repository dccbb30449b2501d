"""The upstream's own data, and how it changes by itself: people, posts, topics, prices.

Seeded, so that two runs begin alike. Bounded: new comments replace the oldest.
"""

import random
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from itertools import cycle
from typing import Any, Final

from stillfresh.systems.feed import Comment, Topic

POSTS: Final = 240
MOST_COMMENTS: Final = 60
"""Comments of one topic; the oldest are dropped."""
DAY: Final = 86_400

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


@dataclass
class UpstreamData:
    """All data of the upstream; it begins at `now`, and `change` changes it."""

    now: int
    dice: random.Random
    users: dict[str, dict[str, Any]] = field(default_factory=dict)
    posts: dict[str, dict[str, Any]] = field(default_factory=dict)
    topics: dict[str, Topic] = field(default_factory=dict)
    comments: dict[str, list[Comment]] = field(default_factory=dict)
    prices: dict[str, int] = field(default_factory=lambda: dict(GOODS))
    rates: dict[str, float] = field(default_factory=lambda: {"USD": 1.0842})
    """What a euro costs."""
    changes: int = 0
    _written: int = 0

    def __post_init__(self) -> None:
        for name in PEOPLE:
            id_ = name.partition(" ")[0].lower()
            counts = {"followers": self.dice.randrange(40, 4_000), "posts": POSTS // len(PEOPLE)}
            self.users[id_] = {"details": {"id": id_, "name": name}, "counts": counts}
        for number, author in zip(range(POSTS), cycle(self.users)):
            details = {
                "author": author,
                "id": str(number),
                "content": self._text(),
                "edited": False,
            }
            counts = {"likes": self.dice.randrange(900), "replies": self.dice.randrange(40)}
            self.posts[f"{author}:{number}"] = {"details": details, "counts": counts}
        for number, title in enumerate(TITLES):
            uuid = f"topic-{number}"
            at = self.now - number * DAY // 2 - 600
            self.topics[uuid] = Topic(uuid, self._someone(), title, at)
            self.comments[uuid] = []
            for _ in range(self.dice.randrange(1, 5)):
                self._say(uuid)

    def change(self, now: int) -> None:
        """One thing happens: mostly a like, now and then an edit, a comment, a price."""
        self.now = max(self.now, now)
        self.changes += 1
        others = (self._follow, self._price, self._comment, self._edit, self._rate, self._reply)
        kind, is_like = divmod(self.changes, 2)
        if is_like:
            self._like()
        else:
            change = others[kind % len(others)]
            change()

    def topics_of(self, day: date) -> list[Topic]:
        return [
            topic
            for topic in self.topics.values()
            if datetime.fromtimestamp(topic.created_at, UTC).date() == day
        ]

    def add_comment(self, uuid: str, comment: Comment) -> bool:
        """Add a comment once: a writer that got no answer may send it again."""
        comments = self.comments.get(uuid)
        if comments is None:
            return False
        if all(other.comment_uuid != comment.comment_uuid for other in comments):
            comments.append(comment)
            del comments[:-MOST_COMMENTS]
        return True

    def _like(self) -> None:
        self._near_the_top()["counts"]["likes"] += self.dice.randrange(1, 6)

    def _reply(self) -> None:
        self._near_the_top()["counts"]["replies"] += 1

    def _edit(self) -> None:
        details = self._near_the_top()["details"]
        details["content"] = f"{details['content'].partition(' (Edit')[0]} {self._any(EDITS)}"
        details["edited"] = True

    def _follow(self) -> None:
        self.users[self._someone()]["counts"]["followers"] += self.dice.randrange(1, 4)

    def _price(self) -> None:
        name = self._any(tuple(self.prices))
        step = self.dice.choice((-50, -20, -10, 10, 20, 50))
        self.prices[name] = max(100, self.prices[name] + step)

    def _rate(self) -> None:
        change = self.dice.uniform(-0.003, 0.003)
        self.rates["USD"] = round(self.rates["USD"] * (1 + change), 4)

    def _comment(self) -> None:
        self._say(self._any(tuple(self.topics)[:4]))

    def _say(self, uuid: str) -> None:
        self._written += 1
        id_ = f"said-{self._written}"
        body = self._any(REPLIES)
        at = self.now if self.changes else self.topics[uuid].created_at
        self.add_comment(uuid, Comment(id_, uuid, self._someone(), at, body))

    def _near_the_top(self) -> dict[str, Any]:
        """Any post, but mostly one of the first, where readers see it change."""
        number = self.dice.randrange(12 if self.dice.random() < 0.6 else POSTS)
        return list(self.posts.values())[number]

    def _text(self) -> str:
        return f"{self._any(OPENINGS)} {self._any(LINES)}"

    def _someone(self) -> str:
        return self._any(tuple(self.users))

    def _any(self, choices: tuple[str, ...]) -> str:
        return self.dice.choice(choices)
