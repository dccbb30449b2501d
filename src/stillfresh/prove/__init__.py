"""`stillfresh prove`: is a store kept right while processes die and connections break? (T11)

Real processes read, load and invalidate (`worker`), a log is told all they do (`witness`), faults
come one after another (`crowd`, `proxy`), and the history is judged (`history`).
"""

from stillfresh.prove.history import CHECKS, DOUBLED, LOST
from stillfresh.prove.peers import PEERS, checked_peer
from stillfresh.prove.places import MEANING, proving
from stillfresh.prove.run import ProofRun, Report
from stillfresh.prove.stage import Stage, lasting

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
