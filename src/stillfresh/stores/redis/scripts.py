"""The store's atomic steps, scripts that the server runs: each on keys of one slot (S2, S5).

The token is the fence, compared in the step that writes; its time only permits a takeover. A token
is made here, of what its asker drew and the server's microsecond: an ACQUIRE that arrives late or
twice never grants the same one again, and one that is sent again finds its lease by its own part
(S8).

Tags are named before the key is written, and forgotten after: in a cluster a set may have moved to
another node already, and then the script ends there, with nothing done that shows. A name too many
in a set does no harm.

What a step leaves has a time to live that covers every reader it may serve, and a minute for clocks
that differ; the sets of a tag live at least as long as any of their ids.

EVICT and COUNT walk over the whole database in slices, GLANCES reads many ids with one reply. They
are no steps: they may cross slots.
"""

from hashlib import sha1
from typing import Final

from stillfresh.freshness import LONGEST_LEASE, MAX_SKEW
from stillfresh.stores.redis.layout import (
    ASKER,
    GLANCE,
    HEAD,
    NAME,
    Command,
    RedisKey,
)

COMMON: Final = f"""
local HEAD, KEPT, LONGEST = {HEAD}, 60, 315360000
local NOBODY = string.rep('\\0', {NAME})
local FIELDS = '>c4BBddddc{NAME}dc{NAME}IdII'
local MAGIC = 'SF\\0\\1'
local LEASE_AT = HEAD - 20 - {NAME} - 8
local FREE = struct.pack('>dc{NAME}', 0, NOBODY)

local function clock(given)
  if given ~= '' then return tonumber(given) end
  local time = redis.call('TIME')
  return tonumber(time[1]) + tonumber(time[2]) / 1000000
end

local function parsed(text)
  if type(text) ~= 'string' or #text < HEAD or text:sub(1, 4) ~= MAGIC then return nil end
  local h, magic = {{}}, nil
  magic, h.copy, h.mark, h.fetched_at, h.fresh_for, h.stale_for, h.error_for, h.generation,
    h.held_until, h.token, h.failures, h.retry_at, h.tags, h.error = struct.unpack(FIELDS, text)
  return h
end

-- Of what somebody else has put there, nothing; of a key on another node, that node's error.
local function head(key)
  local text = redis.pcall('GETRANGE', key, 0, HEAD - 1)
  if type(text) == 'table' and text.err and not text.err:find('WRONGTYPE', 1, true) then
    error(text)
  end
  return parsed(text)
end

local function tags_text(key, h)
  return redis.call('GETRANGE', key, HEAD, HEAD + h.tags - 1)
end

-- Of a string that another has changed: as far as they can be told.
local function tags_of(text)
  local found, at = {{}}, 1
  while at + 3 <= #text do
    local first, last = at + 4, at + 3 + struct.unpack('>I', text, at)
    if last > #text then break end
    found[#found + 1] = text:sub(first, last)
    at = last + 1
  end
  return found
end

local function untag(base, member, text, kept)
  local stay = {{}}
  for _, tag in ipairs(tags_of(kept or '')) do stay[tag] = true end
  for _, tag in ipairs(tags_of(text)) do
    if not stay[tag] then redis.pcall('SREM', base .. '#' .. tag, member) end
  end
end

local function forget(key, base, member, h)
  local tags = tags_text(key, h)
  redis.call('DEL', key)
  untag(base, member, tags)
end

-- Ids that the server forgot are still named: who names a new one looks at two others. Not while
-- they move to this node (the step names all its keys then): some are still on the other one.
local function tidy(set, base, new)
  if #KEYS > 1 or redis.call('SCARD', set) <= 64 then return end
  for _, other in ipairs(redis.call('SRANDMEMBER', set, 2)) do
    if other ~= new and redis.call('EXISTS', base .. other) == 0 then
      redis.call('SREM', set, other)
    end
  end
end

-- What stands in a set's place and is none goes.
local function add(set, base, member)
  local added = redis.pcall('SADD', set, member)
  if type(added) == 'table' then
    redis.call('DEL', set)
    added = redis.call('SADD', set, member)
  end
  if added == 1 then tidy(set, base, member) end
end

local function served_until(h)
  if h.copy == 0 then return h.retry_at end
  return h.fetched_at + (h.fresh_for + math.max(h.stale_for, h.error_for))
end

-- How long it is kept, in milliseconds; its tags are named for as long.
local function named(base, member, h, tags, now)
  local lease = h.token ~= NOBODY and h.held_until or 0
  local left = 0
  for _, last in ipairs({{served_until(h), lease, h.retry_at}}) do
    if last - now > left then left = last - now end -- what is no number is not more
  end
  local life = math.ceil((math.min(left, LONGEST) + KEPT) * 1000)
  local text = string.format('%.0f', life)
  for _, tag in ipairs(tags_of(tags)) do
    local set = base .. '#' .. tag
    add(set, base, member)
    if redis.call('PTTL', set) < life then redis.call('PEXPIRE', set, text) end
  end
  return text
end

-- S10: to all who listen. Whoever may not is not told, and the step is done all the same.
local function tell(base, news) redis.pcall('SPUBLISH', base .. '!', news) end

local function void(key, base, member, h, mark)
  if h.copy == 0 and h.failures == 0 then return forget(key, base, member, h) end
  redis.call('SETRANGE', key, LEASE_AT, FREE)
  if h.copy > 0 and h.mark < mark then redis.call('SETRANGE', key, 5, string.char(mark)) end
end
"""

EVALSHA: Final = "EVALSHA"
EVAL: Final = "EVAL"
BY_SHA: Final[dict[str, "Script"]] = {}
"""All there are: a server that was started anew has forgotten them."""


class Script:
    """A text that the server keeps, and the name that it keeps it by."""

    def __init__(self, text: str, common: str = COMMON) -> None:
        """The first line of the text is its flags."""
        flags, _, body = text.partition("\n")
        self.text = f"#!lua {flags}".strip() + common + body
        self.sha = sha1(self.text.encode(), usedforsecurity=False).hexdigest()
        BY_SHA[self.sha] = self

    def call(self, keys: list[bytes], *arguments: bytes | str | int) -> Command:
        return (EVALSHA, self.sha, len(keys), *keys, *arguments)

    def on(self, key: RedisKey, *arguments: bytes | str | int) -> Command:
        """For a step on one id: where it lies comes first."""
        return self.call([key.key], key.base, key.member, *arguments)


ACQUIRE: Final = Script(f"""
local key, base, member, now = KEYS[1], ARGV[1], ARGV[2], clock(ARGV[3])
local seen, asker, lease_for, tags = ARGV[4], ARGV[5], tonumber(ARGV[6]), ARGV[7]
local failures, take_over = tonumber(ARGV[8]), ARGV[9] == '1'
local last_end = now + math.max(lease_for, {LONGEST_LEASE}) + {MAX_SKEW}
local h = head(key)
if h and h.token:sub(1, {ASKER}) == asker and h.held_until > now then
  return {{'lease', struct.pack('>d', h.held_until), h.token}}
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
return {{'lease', struct.pack('>d', held_until), token}}
""")

PUBLISH: Final = Script(f"""
local key, base, member, now = KEYS[1], ARGV[1], ARGV[2], clock(ARGV[3])
local token, copy, value, again = ARGV[4], ARGV[5], ARGV[6], ARGV[7]
local h = head(key)
if not h then return 0 end
if h.token ~= token or h.held_until <= now then
  local done = again == '1' and h.copy > 0 and h.generation == copy:sub(-{NAME})
  return done and 1 or 0
end
local tags = tags_text(key, h)
local text = copy .. FREE .. struct.pack('>IdII', 0, 0, #tags, 0)
local life = named(base, member, parsed(text), tags, now)
redis.call('SET', key, text .. tags .. value, 'PX', life)
tell(base, 'P' .. copy:sub(-{NAME}) .. member)
return 1
""")

RENEW: Final = Script("""
local key, base, member, now = KEYS[1], ARGV[1], ARGV[2], clock(ARGV[3])
local h = head(key)
if not h or h.token ~= ARGV[4] or h.held_until <= now then return 0 end
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
if h then void(KEYS[1], ARGV[1], ARGV[2], h, tonumber(ARGV[3])) end
tell(ARGV[1], 'V' .. ARGV[2])
return 1
""")

INVALIDATE_TAG: Final = Script("""flags=allow-oom
local set, base, mark = KEYS[1], ARGV[1], tonumber(ARGV[2])
local found, reached = redis.call('SSCAN', set, ARGV[3], 'COUNT', 500), {}
for _, member in ipairs(found[2]) do
  local h = head(base .. member)
  if h then
    void(base .. member, base, member, h, mark)
    tell(base, 'V' .. member)
    reached[#reached + 1] = member
  else
    redis.call('SREM', set, member)
  end
end
return {found[1], reached}
""")

DELETE: Final = Script("""flags=allow-oom
local h = head(KEYS[1])
if h then forget(KEYS[1], ARGV[1], ARGV[2], h) else redis.call('DEL', KEYS[1]) end
tell(ARGV[1], 'V' .. ARGV[2])
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


def glance(keys: list[bytes]) -> Command:
    """The first bytes of each; of one alone without a script, which would take longer."""
    if len(keys) == 1:
        return "GETRANGE", keys[0], 0, GLANCE - 1
    return GLANCES.call(keys, GLANCE)
