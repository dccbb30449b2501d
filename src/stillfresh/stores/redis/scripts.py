"""The store's atomic steps, scripts that the server runs: each on keys of one slot (S2, S5).

The token is the fence, compared in the step that writes; its time only permits a takeover. A token
is made here, from the caller's random part and the server's microsecond: an ACQUIRE that arrives
late or twice never grants the same one again, and one that is sent again finds its lease by the
caller's part (S8).

Ids are added to the sets of their tags before the key is written, and removed after it: in a
cluster a set may have moved to another node, and then the script ends there, without a visible
change. One id too many in a set does no harm.

Keys have a time to live that covers every possible read, and a minute for differing clocks; the
sets of a tag live at least as long as any of their ids.

EVICT and COUNT walk over the whole database in slices, GLANCES reads many ids with one reply. They
are not atomic steps: they may cross slots.
"""

from collections.abc import Sequence
from typing import Final

from stillfresh.freshness import LONGEST_LEASE, MAX_SKEW
from stillfresh.stores.redis.layout import (
    ASKER,
    GLANCE,
    NAME,
    VOIDED,
    Command,
    announced,
    unpacked_tags,
)
from stillfresh.stores.redis.lua import BY_SHA, EVAL, Script

TAGS_AT_ONCE: Final = 8
"""Buckets whose next hundred ids are invalidated in one go: others' steps pass between (E28)."""
UNSURE: Final = -1
"""S2: the reply of a PUBLISH that was sent again, if nothing shows whether the first was done."""
MOVING: Final = "moving"
"""Argument of ACQUIRE on a node that does not hold the slot yet: epochs may be missing there."""

ACQUIRE: Final = Script(f"""
local key, base, member, now = KEYS[1], ARGV[1], ARGV[2], clock(ARGV[3])
local seen, asker, lease_for, tags = ARGV[4], ARGV[5], tonumber(ARGV[6]), ARGV[7]
local failures, take_over = tonumber(ARGV[8]), ARGV[9] == '1'
local epoch = string.format('%.0f', ARGV[10] == '{MOVING}' and -1 or epoch_of(base))
local last_end = now + math.max(lease_for, {LONGEST_LEASE}) + {MAX_SKEW}
local h = head(key)
if h then doubt(key, base, member, h) end
if h and h.token:sub(1, {ASKER}) == asker and h.held_until > now then
  is_there(key)
  return {{'lease', struct.pack('>d', h.held_until), h.token, epoch}}
end
if h and h.copy > 0 and h.generation ~= seen then return {{'newer', redis.call('GET', key)}} end
if h and not take_over and h.token ~= NOBODY and h.held_until > now
    and h.held_until <= last_end then
  return {{'held', struct.pack('>d', h.held_until)}}
end
if h and failures >= 0 and h.failures > 0 and h.failures ~= failures then
  return {{'newer', redis.call('GET', key)}}
end
local time, held_until = redis.call('TIME'), now + lease_for
local token = asker .. string.format('%010d%06d', tonumber(time[1]), tonumber(time[2]))
local lease = struct.pack('>dc{NAME}', held_until, token)
if not h then
  local text = struct.pack('>c4BBddddc{NAME}', MAGIC, 0, 0, 0, 0, 0, 0, NOBODY) .. lease
    .. struct.pack('>IdII', 0, 0, #tags, 0)
  redis.call('SET', key, text .. tags, 'PX', named(base, member, parsed(text), tags, now))
else
  local before = tags_text(key, h)
  local _, late = split_tags(before)
  tags = with_late(tags, late)
  h.token, h.held_until = token, held_until
  local life = named(base, member, h, tags, now)
  if before == tags then
    redis.call('SETRANGE', key, LEASE_AT, lease)
    redis.call('PEXPIRE', key, life)
  else
    local text = redis.call('GET', key)
    redis.call('SET', key, text:sub(1, LEASE_AT) .. lease
      .. struct.pack('>IdII', h.failures, h.retry_at, #tags, h.error)
      .. tags .. text:sub(HEAD + h.tags + 1), 'PX', life)
    untag(base, member, before, tags)
  end
end
return {{'lease', struct.pack('>d', held_until), token, epoch}}
""")

PUBLISH: Final = Script(f"""
local key, base, member, now = KEYS[1], ARGV[1], ARGV[2], clock(ARGV[3])
local token, copy, value, told, late, epoch, again = unpack(ARGV, 4, 10)
local h, unsure = head(key), again == '1' and {UNSURE} or 0
if not h then return unsure end
if h.token == token and is_past(base, tonumber(epoch), late) then
  void(key, base, member, h, 0)
  return 0
end
if h.token ~= token then
  if again ~= '1' or h.copy == 0 or h.generation ~= copy:sub(-{NAME}) then return unsure end
  is_there(key)
  return 1
end
if h.held_until <= now then return 0 end
local before = tags_text(key, h)
if not is_named(base, member, before) then return 0 end
local tags = before
if told == '1' then tags = with_late(split_tags(before), late) end
local text = copy .. FREE .. struct.pack('>IdII', 0, 0, #tags, 0)
local life = named(base, member, parsed(text), tags, now)
redis.call('SET', key, text .. tags .. value, 'PX', life)
if tags ~= before then untag(base, member, before, tags) end
tell(base, PUBLISHED .. copy:sub(-{NAME}) .. member)
return 1
""")

RENEW: Final = Script("""
local key, base, member, now = KEYS[1], ARGV[1], ARGV[2], clock(ARGV[3])
local h = head(key)
if not h or h.token ~= ARGV[4] or h.held_until <= now then return 0 end
if not is_named(base, member, tags_text(key, h)) then return 0 end
h.held_until = now + tonumber(ARGV[5])
local life = named(base, member, h, tags_text(key, h), now)
redis.call('SETRANGE', key, LEASE_AT, struct.pack('>d', h.held_until))
redis.call('PEXPIRE', key, life)
return 1
""")

RELEASE: Final = Script("""flags=allow-oom
local key, base, member, now = KEYS[1], ARGV[1], ARGV[2], clock(ARGV[3])
local failure, said = ARGV[5], ARGV[6]
local h = head(key)
if not h or h.token ~= ARGV[4] then return 0 end
if failure == '' and h.copy == 0 and h.failures == 0 then
  forget(key, base, member, h)
  return 1
end
local tags = tags_text(key, h)
doubt(key, base, member, h)
h.token = NOBODY
if failure ~= '' then h.failures, h.retry_at = struct.unpack('>Id', failure) end
local life = named(base, member, h, tags, now)
if failure == '' then
  redis.call('SETRANGE', key, LEASE_AT, FREE)
  redis.call('PEXPIRE', key, life)
else
  local text = redis.call('GET', key)
  redis.call('SET', key, text:sub(1, LEASE_AT) .. FREE .. failure
    .. struct.pack('>II', #tags, #said) .. tags .. said
    .. text:sub(HEAD + h.tags + h.error + 1), 'PX', life)
end
return 1
""")

INVALIDATE: Final = Script("""flags=allow-oom
local h = head(KEYS[1])
if h then void(KEYS[1], ARGV[1], ARGV[2], h, tonumber(ARGV[3])) else is_gone(KEYS[1]) end
tell(ARGV[1], VOIDED .. ARGV[2])
return 1
""")

INVALIDATE_TAG: Final = Script("""flags=allow-oom
local set, base, mark = KEYS[1], ARGV[1], tonumber(ARGV[2])
local found, reached = redis.call('SSCAN', set, ARGV[3], 'COUNT', 100), {}
local tag, is_first = set:sub(#base + 2), ARGV[3] == '0' and base:find(FIRST, 1, true)
begin_epoch(base, tag) -- with every page, so that there is a change to confirm (S9)
if is_first then tell(base, TAGGED .. tag) end
for _, member in ipairs(found[2]) do
  local h = head(base .. member)
  if h then
    void(base .. member, base, member, h, mark)
    tell(base, VOIDED .. member)
    reached[#reached + 1] = member
  else
    redis.call('SREM', set, member)
  end
end
return {found[1], reached}
""")

NOTE_TAG: Final = Script("""flags=allow-oom
begin_epoch(ARGV[1], ARGV[2])
return 1
""")
"""The first part of INVALIDATE_TAG."""

DELETE: Final = Script("""flags=allow-oom
local h = head(KEYS[1])
if h then forget(KEYS[1], ARGV[1], ARGV[2], h) else is_gone(KEYS[1]) end
tell(ARGV[1], VOIDED .. ARGV[2])
return 1
""")

EVICT: Final = Script("""flags=allow-oom,allow-cross-slot-keys
local found = redis.call('SCAN', ARGV[1], 'MATCH', ARGV[2], 'COUNT', 500, 'TYPE', 'string')
local before, dropped = tonumber(ARGV[3]), 0
for _, key in ipairs(found[2]) do
  local h = parsed(redis.pcall('GETRANGE', key, 0, HEAD - 1))
  if h and math.max(served_until(h), h.token ~= NOBODY and h.held_until or 0) < before then
    local base = key:sub(1, key:find('}:', 1, true) + 1)
    forget(key, base, key:sub(#base + 1), h)
    dropped = dropped + 1
  end
end
return {found[1], dropped}
""")

COUNT: Final = Script("""flags=no-writes,allow-cross-slot-keys
local found = redis.call('SCAN', ARGV[1], 'MATCH', ARGV[2], 'COUNT', 500, 'TYPE', 'string')
local now, copies, leases, bytes = clock(ARGV[3]), 0, 0, 0
for _, key in ipairs(found[2]) do
  local h = parsed(redis.pcall('GETRANGE', key, 0, HEAD - 1))
  if h and h.copy > 0 then copies = copies + 1 end
  if h and h.token ~= NOBODY and h.held_until > now then leases = leases + 1 end
  bytes = bytes + (tonumber(redis.pcall('STRLEN', key)) or 0)
end
return {found[1], copies, leases, bytes}
""")

GLANCES: Final = Script(
    """flags=no-writes,allow-cross-slot-keys
local found, last = {}, tonumber(ARGV[1]) - 1
for at, key in ipairs(KEYS) do
  local text = redis.pcall('GETRANGE', key, 0, last)
  found[at] = type(text) == 'string' and text or ''
end
return found
""",
    common="\n",
)

DOUBTS: Final = Script("""flags=no-writes,allow-cross-slot-keys
local found, last = {}, tonumber(ARGV[1]) - 1
for at, key in ipairs(KEYS) do
  local text = redis.pcall('GETRANGE', key, 0, last)
  local h = parsed(text)
  if h and h.copy > 0 and h.mark < 2 and h.tags > 0 then
    local base = key:sub(1, key:find('}:', 1, true) + 1)
    if not is_named(base, key:sub(#base + 1), tags_text(key, h)) then
      text = text:sub(1, 5) .. string.char(2) .. text:sub(7)
    end
  end
  found[at] = type(text) == 'string' and text or ''
end
return found
""")
"""Like GLANCES, on a server that drops keys: a copy missing from its tag's set counts as marked."""


def glance(keys: list[bytes], *, doubts: bool = False) -> Command:
    """The first bytes of each id; a single id is read without a script, which is faster."""
    if doubts:
        return DOUBTS.call(keys, GLANCE)
    if len(keys) == 1:
        return "GETRANGE", keys[0], 0, GLANCE - 1
    return GLANCES.call(keys, GLANCE)


def values(keys: list[bytes], *, doubts: bool = False) -> Command:
    return DOUBTS.call(keys, 0) if doubts else ("MGET", *keys)


def tags_asked(acquire: Command) -> list[bytes]:
    """The tags that an ACQUIRE names."""
    return unpacked_tags(acquire[10])


def while_moving(command: Command) -> Command:
    """I26: while its slot moves, a load cannot have tags of its own."""
    if command[1] == ACQUIRE.sha:
        return (*command, MOVING)
    return (*command[:-2], -1, command[-1]) if command[1] == PUBLISH.sha else command


def with_sets(command: Command, tags: Sequence[bytes]) -> Command:
    """The step with the sets of these tags among its keys, and with its text."""
    _, sha, _, key, base, *arguments = command
    sets = [base + b"#" + tag for tag in tags]
    return (EVAL, BY_SHA[sha].text, 1 + len(sets), key, *sets, base, *arguments)


def told_again(command: Command) -> Command:
    """S10: announce a step on one id, whatever it did."""
    base, member = command[4:6]
    return announced(base, VOIDED, member)
