"""`stillfresh prove`: does a store keep its promises while processes and connections fail?

Real processes read, load and invalidate (`worker`) and log everything (`witness`). Faults come one
after another (`crowd`, `proxy`), and `history` judges the log.
"""

from stillfresh.lab.prove.history import CHECKS, DOUBLED, LOST
from stillfresh.lab.prove.peers import PEERS, checked_peer
from stillfresh.lab.prove.places import MEANING, proving
from stillfresh.lab.prove.run import ProofRun, Report
from stillfresh.lab.prove.stage import Stage, lasting

__all__ = [
    "CHECKS",
    "DOUBLED",
    "LOST",
    "MEANING",
    "PEERS",
    "ProofRun",
    "Report",
    "Stage",
    "checked_peer",
    "lasting",
    "proving",
]
