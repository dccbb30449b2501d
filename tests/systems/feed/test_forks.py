"""F2: after a fork the file's thread and connections are the parent's, and the child is told so."""

import subprocess
import sys
from pathlib import Path

FORKS = """
import os, signal, sys
from stillfresh.systems.feed import FeedCache, Topic

cache = FeedCache.open(sys.argv[1])
cache.put_topic(Topic("a", "me", "mine", 1))
if (pid := os.fork()) == 0:
    signal.alarm(10)
    for use in (
        lambda: cache.put_topic(Topic("b", "me", "mine", 1)), lambda: cache.get_topic("a"),
        lambda: cache.get_topics_all(0), cache.stats, cache.evict_expired, cache.__enter__,
    ):
        try:
            print("no error", use(), flush=True)
        except Exception as exc:
            print(type(exc).__name__, exc, flush=True)
    cache.close()
    with FeedCache.open(sys.argv[1]) as own:
        own.put_topic(Topic("c", "me", "mine", 1))
    os._exit(0)
assert os.waitpid(pid, 0) == (pid, 0)
cache.put_topic(Topic("d", "me", "mine", 1))
print(*sorted(topic.topic_uuid for topic in cache.get_topics_all(0)))
cache.close()
"""


class TestF2Forks:
    def test_a_forked_child_is_told_to_open_the_file_itself(self, tmp_path: Path) -> None:
        """Whatever it asks of the parent's; its own works, and so does the parent's."""
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", FORKS, str(tmp_path / "feed.db")],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )
        *refused, left = done.stdout.splitlines()
        sentence = "this feed cache was open when the process forked; open it in the child process"
        assert refused == [f"NotOpen {sentence} with FeedCache.open(path)"] * 6, done.stderr
        assert left == "a c d"
