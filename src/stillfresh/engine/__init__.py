"""The engine: the read path that all systems share, and the one law.

Other packages come in through here, and through `keys`, `rules`, `watcher`, `explain`,
`loader` and `recordings`; `sync` also through `thread_face`. They use the public methods of `Cache`
and `Resource`. What is behind those (`core`, `memory`, `runtime`) is the engine's own.
"""

from stillfresh.engine.arrow_codec import ArrowCodec, arrow
from stillfresh.engine.at_least import (
    InvalidatedEntries,
    NotedChanges,
    commit_token,
    merge_tokens,
    note_token,
    noted_changes,
)
from stillfresh.engine.cache import Cache
from stillfresh.engine.calls import Call, Signature, key_text
from stillfresh.engine.changing import Changing
from stillfresh.engine.codec_makers import codec_of, encrypted, new_key, zstd
from stillfresh.engine.codecs import MsgpackCodec, codec_for
from stillfresh.engine.counts import COUNTERS, GAUGES, CacheStats, Lag, ResourceStats
from stillfresh.engine.explain import Explanation, Listed
from stillfresh.engine.function import Function
from stillfresh.engine.keys import Spec, no_loader, terms_of
from stillfresh.engine.memo import Memo
from stillfresh.engine.model import (
    DELETE,
    HITS,
    KEEP,
    LEAVE,
    MAX_TAGS,
    Amended,
    Answer,
    Codec,
    CodecMaker,
    Dropped,
    Hook,
    Loaded,
    Origin,
    Outcome,
    OwnLoad,
    OwnTerms,
    Private,
    Read,
    Refreshed,
    RefreshEnd,
    RetryAfter,
    Span,
    Stored,
    checked_tags,
)
from stillfresh.engine.prometheus import labelled, metric_lines, prometheus_text
from stillfresh.engine.resource import Handle, Resource, like_function
from stillfresh.engine.rules_objective import Objective, TruthObjective, objectives_of
from stillfresh.engine.rules_truth import CALLS, Objectives, TruthStats, WrongRead, check_declared
from stillfresh.engine.spans import Timing, inside_hooks
from stillfresh.engine.unreadable import UnreadableLog
from stillfresh.engine.update import Change
from stillfresh.engine.watch import Update, Watch

__all__ = ["COUNTERS", "DELETE", "GAUGES", "HITS", "KEEP", "LEAVE", "MAX_TAGS", "Amended", "Answer"]
__all__ += ["Cache", "CacheStats", "Call", "Change", "Changing", "Codec", "CodecMaker", "Dropped"]
__all__ += ["Explanation", "Function", "Handle", "Hook", "Lag", "Listed", "Loaded"]
__all__ += ["Memo", "MsgpackCodec", "Objective", "Origin", "Outcome", "OwnLoad", "OwnTerms"]
__all__ += [
    "Private",
    "Read",
    "RefreshEnd",
    "Refreshed",
    "Resource",
    "ResourceStats",
    "RetryAfter",
    "Signature",
    "Span",
    "Stored",
]
__all__ += ["Spec", "Timing", "Update", "Watch", "checked_tags", "codec_for"]
__all__ += [
    "CALLS",
    "Objectives",
    "TruthObjective",
    "TruthStats",
    "WrongRead",
    "check_declared",
    "objectives_of",
]
__all__ += ["ArrowCodec", "UnreadableLog", "arrow", "codec_of", "encrypted", "new_key", "zstd"]
__all__ += ["InvalidatedEntries", "NotedChanges"]
__all__ += ["commit_token", "merge_tokens", "note_token", "noted_changes"]
__all__ += ["key_text", "labelled", "like_function", "metric_lines"]
__all__ += ["inside_hooks", "no_loader", "prometheus_text", "terms_of"]
