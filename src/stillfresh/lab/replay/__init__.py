"""`stillfresh replay`: one simulated history as a page that one can step through.

`scenarios` has what is played, `history` turns the record of a run into plain data, and `page`
writes that into one HTML file that loads nothing.
"""

from stillfresh.lab.replay.history import ReplayHistory, replayed
from stillfresh.lab.replay.page import page_of
from stillfresh.lab.replay.scenarios import SCENARIOS, Play, play_of

__all__ = ["SCENARIOS", "Play", "ReplayHistory", "page_of", "play_of", "replayed"]
