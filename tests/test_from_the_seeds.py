"""docs/from-the-seeds.md: every name of ours on it exists, and no name of the seeds is missing."""

import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest
from msgspec import Struct

from stillfresh.cli import main
from stillfresh.gateway.live import messages
from stillfresh.stores.dynamodb import rows, schema
from stillfresh.stores.sqlite.schema import TIMES
from stillfresh.systems.coordinator import TtlConfig, nexus
from stillfresh.systems.feed.model import Index, comments_key, topic_key
from stillfresh.systems.feed.schema import SEED
from stillfresh.systems.waiting.messages import WAITING_LONGEST, News

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "from-the-seeds.md").read_text()
SCRIPT = (ROOT / "src" / "stillfresh" / "gateway" / "static" / "stillfresh.js").read_text()
HOMES = [
    importlib.import_module(name)
    for name in (
        "stillfresh",
        "stillfresh.systems.coordinator",
        "stillfresh.systems.feed",
        "stillfresh.systems.waiting",
        "stillfresh.systems.waiting.client",
        "game_service",
        "game_service.app",
        "stillfresh.pages",
        "stillfresh.stores.dynamodb",
        "stillfresh.stores.contract",
    )
]
PYTHON = {"str", "timedelta", "with", "async", '"1h"', "~"}
"""Words of Python and of the shell."""

SEEDS = {
    "000": """TtlCoordinator getInstance CoordinatorsManager start() stop() setRoute reset()
        subscribePost unsubscribePost subscribeUser unsubscribeUser compositePostId CompositePostId
        pubky Pubky onBatchTick subscribedPosts subscribedUsers postBatchQueue userBatchQueue
        userRefCount POST_TTL_MS USER_TTL_MS BATCH_INTERVAL_MS POST_MAX_BATCH_SIZE
        USER_MAX_BATCH_SIZE cooldownMs post_ttl user_ttl lastUpdatedAt isStale IndexedDB Dexie
        TtlController forceRefreshPostsByIds forceRefreshUsersByIds postIds userIds forceFetch*
        getOrFetch* postStreamApi.postsByIds userStreamApi.usersByIds NexusPost NexusUser viewerId
        IntersectionObserver useEffect StreamCoordinator""",
    "001": """feed_cache.db feed_topics feed_comments feed_cache_meta topic_uuid topic_json
        category_id created_at deleted cached_at comments_json comment_count cache_key last_fetched
        idx_feed_topics_category idx_feed_topics_created idx_feed_topics_cached
        idx_feed_comments_cached FEED_CACHE_TTL_SECONDS FEED_CACHE_EVICT_SECONDS feed_cache_init
        feed_cache_close feed_cache_evict_expired feed_cache_put_topic feed_cache_get_topic
        feed_cache_delete_topic feed_cache_put_topics feed_cache_get_topics_by_category
        feed_cache_get_topics_all feed_cache_put_comments feed_cache_get_comments
        feed_cache_invalidate_comments feed_cache_is_stale feed_cache_stats dna_feed_topic_t
        dna_feed_topic_info_t dna_feed_comment_info_t 0 -1 -2 -3 dna_handle_feed_get_all
        get_category get_topic get_comments TASK_FEED_REVALIDATE_INDEX dna_handle_feed_revalidate
        DNA_EVENT_FEED_CACHE_UPDATED feed_provider.dart cache_manager.c index:all:7
        index:general:7""",
    "002": """TtlCache TtlCache::new insert get remove cleanup_expired TtlEntry expires_at
        tokio::sync::RwLock HashMap WsState pending_staging_requests pending_time_suggestions
        generation_read_state PendingStagingStoreImpl TimeSuggestionStoreImpl
        GenerationStateStoreImpl""",
    "003": """/api/games/waiting-longest GameService::game_waiting_longest game_ids waiting_since
        game_id queryKeys.games.waitingLongestCache() queryKeys.games.waitingLongest() LW.pool
        LW.isCompleteFromServer LW.snapshot createSnapshot your_turn long_wait_invalidated GameState
        game_state myTurn onOptimisticSend initialData useGameSync currentGameId prevIsUsersTurn
        pendingAction lw-cache.ts web-socket-provider.tsx Header.tsx R0 R0.1 R0.2 R1 R2 R3 R4 R5""",
    "004": """META LOCK pk sk CACHE#<cache_key_hash> TENANT#<tenant_id>#CACHE#<cache_key_hash>
        s3_key generated_at revalidate_seconds etag ttl lease_token lease_expires_at PutItem
        UpdateItem GetItem FaceTheoryCacheMetadata FaceTheoryCacheLease TableName()
        FACETHEORY_CACHE_TABLE_NAME
        faceTheoryCacheMetadataModel faceTheoryCacheLeaseModel FACE_THEORY_CACHE_METADATA
        FACE_THEORY_CACHE_LEASE theorydb_field ModelDefinition defineModel""",
}
"""The names of each design document."""


def sections() -> dict[str, str]:
    """By the number of its seed."""
    parts = re.split(r"^## Seed (\d+).*$", PAGE, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def spans() -> list[str]:
    """What the page has in code letters, but for its blocks and the seeds' own column."""
    prose = re.sub(r"^```.*?^```$", "", PAGE, flags=re.MULTILINE | re.DOTALL)
    lines = [line.split(" | ", 1)[-1] if "|" in line[:2] else line for line in prose.splitlines()]
    return sorted({span for line in lines for span in re.findall(r"`([^`]+)`", line)})


def parts_of(module: ModuleType) -> set[str]:
    """Attributes of its public classes, and parameters of their methods."""
    found: set[str] = set()
    for name in module.__dict__.get("__all__", vars(module)):
        value = getattr(module, name)
        if inspect.isclass(value) and value.__module__.startswith("stillfresh"):
            found |= set(dir(value))
            for _, method in inspect.getmembers(value, inspect.isfunction):
                found |= set(inspect.signature(method).parameters)
    return found


def messages_of(*types: Any) -> set[str]:
    return {it.__struct_config__.tag for it in types}


KNOWN = (
    set[str]().union(*map(parts_of, HOMES))
    | {name.upper() for name in TtlConfig.__dataclass_fields__}
    | set(re.findall(r"\w+", " ".join(SEED) + TIMES))
    | {"post", "user", "post_ttl", "user_ttl"}
    | messages_of(*get_args(News))
    | messages_of(
        *(it for it in vars(messages).values() if isinstance(it, type) and issubclass(it, Struct))
    )
    | {schema.META, schema.LOCK, schema.EPOCH, schema.INVALIDATED, rows.CURRENT, "TAG#"}
    | {topic_key("{uuid}"), comments_key("{uuid}"), Index(None, 7).key}
    | {WAITING_LONGEST, "stillfresh_…", "dynamodb://", "pk=raw", "stillfresh.js"}
    | {f"POST {nexus.POSTS}", f"POST {nexus.USERS}"}
)


def found(path: str) -> Any:
    """The object of this name, or None."""
    module, _, name = path.rpartition(".")
    try:
        return importlib.import_module(path)
    except ImportError:
        pass
    if module.startswith("stillfresh"):
        return getattr(importlib.import_module(module), name, None)
    first, *parts = path.split(".")
    for home in HOMES:
        value = getattr(home, first, None)
        if first not in getattr(home, "__all__", vars(home)) or value is None:
            continue
        for part in parts:
            fields = getattr(value, "__dataclass_fields__", {})
            value = getattr(value, part, fields.get(part))
        return value
    return None


def is_ours(span: str) -> bool:
    """A name with its parameters, a word of ours, a command, or a name in the browser's module."""
    call = re.fullmatch(r"([\w.]+)\((.*)\)", span)
    name = call[1] if call else span
    if re.fullmatch(r"[A-Za-z_][\w.]*", name) and (value := found(name)) is not None:
        given = re.findall(r"(\w+)=", call[2]) if call else []
        return not given or set(given) <= set(inspect.signature(value).parameters)
    if span.startswith("stillfresh "):
        return span.split()[1] in main.listed
    return span in KNOWN | PYTHON or re.search(rf"\b{re.escape(span)}\b", SCRIPT) is not None


def test_every_name_on_the_seeds_page_exists() -> None:
    """As a path, a parameter, a table, a route, a message; or it is a name of a seed."""
    named = {name for names in SEEDS.values() for name in names.split()}
    assert len(spans()) > 100
    assert [span for span in spans() if span not in named and not is_ours(span)] == []


@pytest.mark.parametrize("seed", sorted(SEEDS))
def test_no_name_of_a_seed_is_missing_on_the_page(seed: str) -> None:
    """The first column of its table has each of them."""
    lines = [line for line in sections()[seed].splitlines() if line.startswith("| ")]
    first = " ".join(line.split(" | ")[0] for line in lines)
    missing = [name for name in SEEDS[seed].split() if not re.search(whole(name), first)]
    assert missing == []


def whole(name: str) -> str:
    return rf"(?<![\w-]){re.escape(name)}(?!\w)"


@pytest.mark.parametrize("span", ["TtlCoordinator.subscribePosts", "TtlCache(lifetime=)", "nosuch"])
def test_an_unknown_name_on_the_seeds_page_is_noticed(span: str) -> None:
    """A method that was renamed, a parameter that has gone."""
    assert not is_ours(span)
