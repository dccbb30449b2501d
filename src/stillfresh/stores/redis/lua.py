"""What the scripts of the Redis store share, in Lua, and how a script is called.

A server keeps scripts by their hash. `COMMON` reads and writes the fields of `layout.py`; the steps
themselves are in `scripts.py`.
"""

from hashlib import sha1
from typing import Final

from stillfresh.stores.contract import REMEMBERED
from stillfresh.stores.redis.layout import (
    BUCKETS,
    CHANNEL,
    HEAD,
    NAME,
    PUBLISHED,
    TAGGED,
    VOIDED,
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
local LATE = '\\255\\255\\255\\255'
local FIRST = '{{{BUCKETS[0]}}}'
local PUBLISHED, VOIDED, TAGGED = '{PUBLISHED.decode()}', '{VOIDED.decode()}', '{TAGGED.decode()}'

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

-- Of a string that another has changed: as far as they can be told. Behind LATE stand those that
-- came with the copy (I26); second, where LATE is.
local function tags_of(text)
  local found, at, late = {{}}, 1, #text + 1
  while at + 3 <= #text do
    local first, last = at + 4, at + 3 + struct.unpack('>I', text, at)
    if text:sub(at, at + 3) == LATE then
      late = math.min(late, at)
      last = first - 1
    else
      if last > #text then break end
      found[#found + 1] = text:sub(first, last)
    end
    at = last + 1
  end
  return found, late
end

-- The tags of a lease, with those that came with the copy behind them.
local function with_late(tags, late)
  return late == '' and tags or tags .. LATE .. late
end

local function split_tags(text)
  local _, late = tags_of(text)
  return text:sub(1, late - 1), text:sub(late + 4)
end

-- A tag whose set the server dropped reaches nobody: what it named is not believed any more.
local function is_named(base, member, tags)
  for _, tag in ipairs(tags_of(tags)) do
    local found = redis.pcall('SISMEMBER', base .. '#' .. tag, member)
    if found ~= 1 then
      if type(found) == 'table' and not found.err:find('WRONGTYPE', 1, true) then error(found) end
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

local function untag(base, member, text, kept)
  local stay = {{}}
  for _, tag in ipairs(tags_of(kept or '')) do stay[tag] = true end
  for _, tag in ipairs(tags_of(text)) do
    if not stay[tag] then redis.pcall('SREM', base .. '#' .. tag, member) end
  end
end

-- S9: a caller that waits for the replicas waits for the changes before its last write. So a step
-- that finds its work done writes something, too, or it would confirm what a failover may undo.
local function is_there(key) redis.call('SETRANGE', key, 0, MAGIC) end

local function is_gone(key)
  redis.call('SET', key, '')
  redis.call('DEL', key)
end

local function forget(key, base, member, h)
  local tags = tags_text(key, h)
  redis.call('DEL', key)
  untag(base, member, tags)
end

-- Ids that the server forgot are still named: a step that names a new id checks two others. Not
-- while they move to this node (the step names all its keys then): some are still on the other one.
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

-- S10: tell all listeners. Where the ACL forbids that, the step is done all the same.
local function tell(base, news) redis.pcall('SPUBLISH', base .. '{CHANNEL.decode()}', news) end

-- I26: by tag, the epoch of its last invalidation; '!' has that of the last one that is forgotten.
-- A server may drop all of them: the microsecond makes the new ones higher.
local function next_epoch(base)
  local time, top = redis.call('TIME'), redis.pcall('ZREVRANGE', base .. '@', 0, 0, 'WITHSCORES')
  if top.err then -- what stands in its place and is none goes
    if not top.err:find('WRONGTYPE', 1, true) then error(top) end
    redis.call('DEL', base .. '@')
    top = {{}}
  end
  local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
  return math.max(now, (tonumber(top[2]) or 0) + 1), top[2]
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
end

local function is_past(base, epoch, tags)
  local found = tags_of(tags)
  if #found == 0 then return false end
  if epoch < 0 then return true end
  local known = redis.pcall('ZSCORE', base .. '@', '!')
  if not known or type(known) == 'table' or tonumber(known) > epoch then return true end
  if epoch_of(base) < epoch then return true end
  for _, tag in ipairs(found) do
    local score = redis.call('ZSCORE', base .. '@', '#' .. tag)
    if score and tonumber(score) > epoch then return true end
  end
  return false
end

local function void(key, base, member, h, mark)
  if h.copy == 0 and h.failures == 0 then return forget(key, base, member, h) end
  redis.call('SETRANGE', key, LEASE_AT, FREE)
  if h.copy > 0 and h.mark < mark then redis.call('SETRANGE', key, 5, string.char(mark)) end
end
"""

EVALSHA: Final = "EVALSHA"
EVAL: Final = "EVAL"
BY_SHA: Final[dict[str, "Script"]] = {}
"""All scripts, by hash: a server that was restarted has lost them."""


class Script:
    """A script, and the hash by which the server keeps it."""

    def __init__(self, text: str, common: str = COMMON) -> None:
        """The first line of the text has its flags."""
        flags, _, body = text.partition("\n")
        self.text = f"#!lua {flags}".strip() + common + body
        self.sha = sha1(self.text.encode(), usedforsecurity=False).hexdigest()
        BY_SHA[self.sha] = self

    def call(self, keys: list[bytes], *arguments: bytes | str | int) -> Command:
        return (EVALSHA, self.sha, len(keys), *keys, *arguments)

    def on(self, key: RedisKey, *arguments: bytes | str | int) -> Command:
        """The call for a step on one id; the keys come first."""
        return self.call([key.key], key.base, key.member, *arguments)
