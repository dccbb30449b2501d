"""The Lua functions that the scripts of the Redis store share, and how a script is called.

A server keeps scripts by their hash. The parts below read and write the fields of `layout.py`; the
steps themselves are in `scripts.py`.

Two things are called late. A late *tag* came with the copy, after the lease (`LATE` stands before
them). A late *step* arrives after its sender has given up, or after the same step sent again.

The fence. Every bucket has a counter, the hash `<base>+`: `n` is the last stamp, `b` the stamp
with which it began, the server's microsecond. Each change of an entry takes the next stamp and
leaves it in the entry. A put, an invalidation and a deletion say which stamp their sender has heard
last (`as_of`, `heard.py`); if the entry has changed after it, they do nothing and answer AGAIN. So
one that arrives late cannot act after a later change.

A stamp in an entry is 0 or missing if no change is known, as in a lease without a copy, and -1 if
the counter was on another node of a cluster when the entry changed: the next put gives it one.
"""

import re
from hashlib import sha1
from typing import Final

from stillfresh.stores.contract import REMEMBERED
from stillfresh.stores.redis.heard import AGAIN, StampedCommand
from stillfresh.stores.redis.layout import (
    BUCKETS,
    CHANGED_AT,
    CHANNEL,
    EXTRA,
    EXTRA_MARK,
    FULL_HEAD,
    HEAD,
    LAST_STAMP,
    NAME,
    PUBLISHED,
    SHORT_ID,
    TAGGED,
    VOIDED,
    Command,
    RedisKey,
)

TRACE_FOR: Final = 60_000
"""Milliseconds: a deletion leaves an empty entry with its stamp for so long."""


def _quoted(data: bytes) -> str:
    """The bytes as a text in Lua, which the server reads once."""
    return "'" + "".join(f"\\{byte:03d}" for byte in data) + "'"


CONSTANTS: Final = f"""
local HEAD, FULL_HEAD, CHANGED_AT, KEPT, LONGEST = {HEAD}, {FULL_HEAD}, {CHANGED_AT}, 60, 315360000
local EXTRA_SIZE, LAST_STAMP, AGAIN = {EXTRA.size}, {LAST_STAMP}, {AGAIN}
local NOBODY, NONE_REPLACED = {_quoted(bytes(NAME))}, {_quoted(bytes(4 * SHORT_ID))}
local MAGIC, EXTRA_MARK = {_quoted(b"SF" + bytes([0, 1]))}, {_quoted(EXTRA_MARK)}
local FIELDS, EXTRA = '>c4BBddddc{NAME}dc{NAME}IdII', '>Ic4dc{4 * SHORT_ID}'
local LEASE_AT = HEAD - 20 - {NAME} - 8
local FREE = {_quoted(bytes(8 + NAME))}
local LATE = {_quoted(bytes([255] * 4))}
local FIRST = '{{{BUCKETS[0]}}}'
local PUBLISHED, VOIDED, TAGGED = '{PUBLISHED.decode()}', '{VOIDED.decode()}', '{TAGGED.decode()}'
-- On a node that does not hold the slot yet, every step names all keys that it needs there.
local IS_MOVING = #KEYS > 1
local HAS_COUNTER = not IS_MOVING
"""

STAMPS: Final = """
local function is_elsewhere(reply)
  return type(reply) == 'table' and reply.err and reply.err:find('non local key', 1, true)
end

local function is_wrong_type(reply) return reply.err:find('WRONGTYPE', 1, true) end

local function microsecond()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000000 + tonumber(time[2])
end

-- The counter is missing, or another program has changed it.
local function new_counter(base)
  local born = string.format('%.0f', microsecond())
  redis.call('DEL', base .. '+')
  redis.call('HSET', base .. '+', 'n', born, 'b', born)
  return tonumber(born)
end

-- -1 where the counter is on another node. One that begins with a low number was missing.
local function next_stamp(base)
  if not HAS_COUNTER then return -1 end
  local stamp = redis.pcall('HINCRBY', base .. '+', 'n', 1)
  if type(stamp) == 'number' and stamp > 1000000 and stamp < LAST_STAMP then return stamp end
  if is_elsewhere(stamp) then return -1 end
  if type(stamp) == 'table' and not is_wrong_type(stamp)
      and not stamp.err:find('integer', 1, true) and not stamp.err:find('overflow', 1, true) then
    error(stamp)
  end
  return new_counter(base)
end

-- nil where the counter is on another node.
local function last_stamp(base)
  if not HAS_COUNTER then return nil end
  local found = redis.pcall('HGET', base .. '+', 'n')
  if is_elsewhere(found) then return nil end
  if type(found) == 'table' and not is_wrong_type(found) then error(found) end
  local stamp = type(found) == 'string' and tonumber(found) or 0
  if stamp > 1000000 and stamp < LAST_STAMP then return stamp end
  return new_counter(base)
end

-- If the entry has changed after `as_of`: the stamp to ask with again. A stamp that the counter has
-- not reached is of a counter that was lost, and says nothing.
local function stamp_if_changed(base, changed, as_of)
  if changed <= as_of then return nil end
  local last = last_stamp(base)
  if last == nil then return changed end
  return changed <= last and last or nil
end

local function extra(stamp, replaced, version)
  return struct.pack(EXTRA, EXTRA_SIZE - 4 + #version, EXTRA_MARK, stamp, replaced) .. version
end
"""

HEADS: Final = """
local function clock(given)
  if given ~= '' then return tonumber(given) end
  local time = redis.call('TIME')
  return tonumber(time[1]) + tonumber(time[2]) / 1000000
end

-- The fields of a string that begins like this; `extra` is the size of the tag that is none.
local function parsed(text)
  if type(text) ~= 'string' or #text < HEAD or text:sub(1, 4) ~= MAGIC then return nil end
  local h, magic = {}, nil
  magic, h.copy, h.mark, h.fetched_at, h.fresh_for, h.stale_for, h.error_for, h.generation,
    h.held_until, h.token, h.failures, h.retry_at, h.tags, h.error = struct.unpack(FIELDS, text)
  h.extra, h.changed, h.replaced = 0, 0, NONE_REPLACED
  if h.tags >= EXTRA_SIZE and text:sub(HEAD + 5, HEAD + 8) == EXTRA_MARK then
    if #text < FULL_HEAD then return nil end -- another program has cut it
    local size, mark
    size, mark, h.changed, h.replaced = struct.unpack(EXTRA, text, HEAD + 1)
    h.extra = size + 4
    if h.extra < EXTRA_SIZE or h.extra > h.tags then return nil end
    if not (h.changed >= 0 and h.changed < LAST_STAMP) then h.changed = -1 end
  end
  return h
end

-- Of what somebody else has put there, nothing; of a key on another node, that node's error.
local function head(key)
  local text = redis.pcall('GETRANGE', key, 0, FULL_HEAD - 1)
  if type(text) == 'table' and not is_wrong_type(text) then error(text) end
  return parsed(text)
end

local function tags_text(key, h)
  if h.tags == h.extra then return '' end
  return redis.call('GETRANGE', key, HEAD + h.extra, HEAD + h.tags - 1)
end

local function version_of(key, h)
  if h.extra <= EXTRA_SIZE then return '' end
  return redis.call('GETRANGE', key, FULL_HEAD, HEAD + h.extra - 1)
end

local function is_empty(h) return h.copy == 0 and h.failures == 0 and h.token == NOBODY end

-- The ids of replaced copies, with this one, which is about to be.
local function with_replaced(h)
  if h.copy == 0 then return h.replaced end
  return h.generation:sub(1, 8) .. h.replaced:sub(1, 24)
end
"""

TAGS: Final = """
-- The tags in a string, as far as they can be read if another program has changed it. Tags that
-- came with the copy stand behind LATE. Returns the tags, and where LATE is.
local function tags_of(text)
  local found, at, late_at = {}, 1, #text + 1
  while at + 3 <= #text do
    local first, last = at + 4, at + 3 + struct.unpack('>I', text, at)
    if text:sub(at, at + 3) == LATE then
      late_at = math.min(late_at, at)
      last = first - 1
    else
      if last > #text then break end
      found[#found + 1] = text:sub(first, last)
    end
    at = last + 1
  end
  return found, late_at
end

-- The tags of a lease, with those that came with the copy behind them.
local function with_late_tags(tags, late_tags)
  return late_tags == '' and tags or tags .. LATE .. late_tags
end

-- The tags of the lease, and the late tags.
local function split_tags(text)
  local _, late_at = tags_of(text)
  return text:sub(1, late_at - 1), text:sub(late_at + 4)
end

local function untag(base, member, text, kept)
  local stay = {}
  for _, tag in ipairs(tags_of(kept or '')) do stay[tag] = true end
  for _, tag in ipairs(tags_of(text)) do
    if not stay[tag] then redis.pcall('SREM', base .. '#' .. tag, member) end
  end
end

-- Ids that the server forgot are still named: a step that names a new id checks two others. Not
-- while they move to this node: some are still on the other one.
local function tidy(set, base, new)
  if IS_MOVING or redis.call('SCARD', set) <= 64 then return end
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
  return added
end

-- The tags name the id for so many milliseconds at least.
local function name_for(base, member, tags, life)
  for _, tag in ipairs(tags_of(tags)) do
    local set = base .. '#' .. tag
    local is_new = add(set, base, member) == 1 and redis.call('PEXPIRE', set, life, 'NX') == 1
    if not is_new then redis.call('PEXPIRE', set, life, 'GT') end
  end
end
"""

ENTRIES: Final = f"""
-- A tag whose set the server dropped reaches nobody: what it named is not believed any more.
local function is_named(base, member, tags)
  for _, tag in ipairs(tags_of(tags)) do
    local found = redis.pcall('SISMEMBER', base .. '#' .. tag, member)
    if found ~= 1 then
      if type(found) == 'table' and not is_wrong_type(found) then error(found) end
      return false
    end
  end
  return true
end

local function doubt(key, base, member, h)
  if h.copy > 0 and h.mark < 2 and not is_named(base, member, tags_text(key, h)) then
    redis.call('SETRANGE', key, 5, string.char(2))
    h.mark = 2
  end
end

-- A caller that waits for the replicas waits for the changes before its last write. So a step
-- that finds its work done writes something, too, or it would confirm what a failover may undo.
local function is_there(key) redis.call('SETRANGE', key, 0, MAGIC) end

-- There is no copy, but the entry still says when it was last changed: late puts are noticed.
local function leave_trace(key, stamp, replaced)
  redis.call('SET', key, struct.pack('>c4BBddddc{NAME}', MAGIC, 0, 0, 0, 0, 0, 0, NOBODY) .. FREE
    .. struct.pack('>IdII', 0, 0, EXTRA_SIZE, 0) .. extra(stamp, replaced, ''), 'PX', {TRACE_FOR})
end

-- Without a change that a late put would have to know of.
local function forget(key, base, member, h)
  local tags = tags_text(key, h)
  if h.changed == 0 then
    redis.call('DEL', key)
  else
    leave_trace(key, h.changed, with_replaced(h))
  end
  untag(base, member, tags)
end

local function served_until(h)
  if h.copy == 0 then return h.retry_at end
  return h.fetched_at + (h.fresh_for + math.max(h.stale_for, h.error_for))
end

-- Adds the id to the sets of its tags, for as long as the entry is kept. Returns how long that is,
-- in milliseconds.
local function tag_and_lifetime(base, member, h, tags, now)
  local lease = h.token ~= NOBODY and h.held_until or 0
  local left = 0
  for _, last in ipairs({{served_until(h), lease, h.retry_at}}) do
    if last - now > left then left = last - now end -- what is no number is not more
  end
  local life = string.format('%.0f', math.ceil((math.min(left, LONGEST) + KEPT) * 1000))
  name_for(base, member, tags, life)
  return life
end

-- Notify all listeners. If the ACL forbids that, the step is done all the same.
local function tell(base, news) redis.pcall('SPUBLISH', base .. '{CHANNEL.decode()}', news) end

local function end_lease(key, base, member, h)
  if h.copy == 0 and h.failures == 0 then return forget(key, base, member, h) end
  redis.call('SETRANGE', key, LEASE_AT, FREE)
end

-- An invalidation: no lease, the copy marked, and the stamp for a minute at least.
local function void(key, base, member, h, mark, stamp)
  if not h then return leave_trace(key, stamp, NONE_REPLACED) end
  if h.copy == 0 and h.failures == 0 then
    local tags = tags_text(key, h)
    leave_trace(key, stamp, h.replaced)
    return untag(base, member, tags)
  end
  if h.extra > 0 then
    redis.call('SETRANGE', key, CHANGED_AT, struct.pack('>d', stamp))
  else -- from before there were stamps
    local text = redis.call('GET', key)
    redis.call('SET', key, text:sub(1, HEAD - 8) .. struct.pack('>II', h.tags + EXTRA_SIZE, h.error)
      .. extra(stamp, NONE_REPLACED, '') .. text:sub(HEAD + 1), 'KEEPTTL')
  end
  if h.token ~= NOBODY then redis.call('SETRANGE', key, LEASE_AT, FREE) end
  if h.copy > 0 and h.mark < mark then redis.call('SETRANGE', key, 5, string.char(mark)) end
  redis.call('PEXPIRE', key, {TRACE_FOR}, 'GT')
end
"""

EPOCHS: Final = f"""
-- For each tag, the stamp of its last invalidation; '!' has the newest stamp that is forgotten.
-- A server may drop all of them: the new ones are higher. Where the counter is on another node,
-- they are the server's microseconds.
local function next_epoch(base)
  local top = redis.pcall('ZREVRANGE', base .. '@', 0, 0, 'WITHSCORES')
  if top.err then -- what stands in its place and is none goes
    if not is_wrong_type(top) then error(top) end
    redis.call('DEL', base .. '@')
    top = {{}}
  end
  local last = tonumber(top[2]) or 0
  local stamp = next_stamp(base)
  if stamp < 0 then return math.max(microsecond(), last + 1), top[2] end
  return math.max(stamp, last + 1), top[2]
end

local function noted(base, member, epoch)
  redis.call('ZADD', base .. '@', string.format('%.0f', epoch), member)
end

-- Of a lease that is granted now; -1 where the epochs are on another node: no tag can come late.
local function epoch_of(base)
  local top = redis.pcall('ZREVRANGE', base .. '@', 0, 0, 'WITHSCORES')
  if top.err then return -1 end
  if not top[2] then
    top[2] = next_epoch(base)
    noted(base, '!', top[2])
  end
  return tonumber(top[2])
end

local function begin_epoch(base, tag)
  local epoch, top = next_epoch(base)
  if not top then noted(base, '!', epoch - 1) end
  noted(base, '#' .. tag, epoch)
  if redis.call('ZCARD', base .. '@') > {REMEMBERED} + 1 then
    local last = redis.call('ZRANGE', base .. '@', 1, 1, 'WITHSCORES')
    redis.call('ZREM', base .. '@', last[1])
    noted(base, '!', tonumber(last[2]))
  end
  return epoch
end

local function is_past(base, epoch, tags)
  local found = tags_of(tags)
  if #found == 0 then return false end
  if epoch < 0 or IS_MOVING then return true end
  local known = redis.pcall('ZSCORE', base .. '@', '!')
  if not known or type(known) == 'table' or tonumber(known) > epoch then return true end
  if epoch_of(base) < epoch then return true end
  for _, tag in ipairs(found) do
    local score = redis.call('ZSCORE', base .. '@', '#' .. tag)
    if score and tonumber(score) > epoch then return true end
  end
  return false
end
"""

FUNCTION: Final = re.compile(
    r"^local function (\w+)(?:[^\n]*\bend$|.*?^end$)", re.MULTILINE | re.DOTALL
)
"""One of the functions above: on one line, or up to an `end` that is not indented."""
FUNCTIONS: Final = {
    function[1]: function[0]
    for function in FUNCTION.finditer(STAMPS + HEADS + TAGS + ENTRIES + EPOCHS)
}
"""By name, each behind those that it calls."""


def functions_for(step: str) -> str:
    """The functions that a step calls, and those that these call.

    The server defines them anew at every call of a script, so a script has no others.
    """
    needed: set[str] = set()
    unread = [step]
    while unread:
        names = FUNCTIONS.keys() & set(re.findall(r"\w+", unread.pop()))
        unread += [FUNCTIONS[name] for name in names - needed]
        needed |= names
    return "".join(f"{text}\n" for name, text in FUNCTIONS.items() if name in needed)


EVALSHA: Final = "EVALSHA"
EVAL: Final = "EVAL"
BY_SHA: Final[dict[str, "Script"]] = {}
"""All scripts, by hash: a server that was restarted has lost them."""


class Script:
    """A script, and the hash by which the server keeps it."""

    def __init__(self, text: str, *, is_whole: bool = False, is_stamped: bool = False) -> None:
        """The first line of the text has its flags.

        `is_whole`: it has its constants and functions itself. `is_stamped`: its reply brings a
        stamp.
        """
        flags, _, body = text.partition("\n")
        common = "\n" if is_whole else CONSTANTS + functions_for(body)
        self.text = f"#!lua {flags}".strip() + common + body
        self.sha = sha1(self.text.encode(), usedforsecurity=False).hexdigest()
        self._is_stamped = is_stamped
        BY_SHA[self.sha] = self

    def call(self, keys: list[bytes], *arguments: object) -> Command:
        command = (EVALSHA, self.sha, len(keys), *keys, *arguments)
        return StampedCommand(command) if self._is_stamped else command

    def on(self, key: RedisKey, *arguments: object) -> Command:
        """The call for a step on one id; the keys come first."""
        return self.call([key.key], key.base, key.member, *arguments)
