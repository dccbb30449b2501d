"""The Redis store's atomic steps, as scripts that the server runs: each on keys of one slot.

The token is the fence of a load, compared in the step that writes; its time only permits a
takeover. A token is made here, from the caller's random part and the server's microsecond: an
ACQUIRE that arrives late or twice never grants the same one again, and one that is sent again finds
its lease by the caller's part. The fence of puts, invalidations and deletions are stamps
(`lua.py`).

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
from stillfresh.stores.contract import When
from stillfresh.stores.redis.heard import FENCE, GOOD_FOR, ReadCommand, StampedCommand
from stillfresh.stores.redis.layout import (
    ABSENT,
    ASKER,
    CHANGED_AT,
    CHANNEL,
    FULL_HEAD,
    GENERATION_AT,
    GLANCE,
    HEAD,
    HOW,
    NAME,
    SHORT_ID,
    VOIDED,
    Command,
    announced,
    base_of,
    put_tags,
    unpacked_tags,
)
from stillfresh.stores.redis.lua import (
    BY_SHA,
    CONSTANTS,
    EVAL,
    STAMPS,
    TAGS,
    TRACE_FOR,
    Script,
)

TAGS_AT_ONCE: Final = 8
"""Buckets whose next hundred ids are invalidated in one go: others' steps pass between."""
UNSURE: Final = -1
"""The code of a PUBLISH that was sent again, if nothing shows whether the first was done."""
DONE: Final = 1
STORED: Final = 1
REPLACED: Final = 2
KEPT: Final = 3
MIXED: Final = 4
REFUSED: Final = 5
"""Codes with which a reply begins; `heard.AGAIN` is another. STORED is a PUT's name for DONE."""

ACQUIRE: Final = Script(f"""
local key, base, member, now = KEYS[1], ARGV[1], ARGV[2], clock(ARGV[3])
local seen, asker, lease_for, tags = ARGV[4], ARGV[5], tonumber(ARGV[6]), ARGV[7]
local failures, take_over = tonumber(ARGV[8]), ARGV[9] == '1'
local epoch = string.format('%.0f', IS_MOVING and -1 or epoch_of(base))
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
  return {{'held', struct.pack('>d', h.held_until), h.token:sub(1, {ASKER})}}
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
  local life = tag_and_lifetime(base, member, parsed(text), tags, now)
  redis.call('SET', key, text .. tags, 'PX', life)
else
  local before = tags_text(key, h)
  local _, late_tags = split_tags(before)
  tags = with_late_tags(tags, late_tags)
  h.token, h.held_until = token, held_until
  local life = tag_and_lifetime(base, member, h, tags, now)
  if before == tags then
    redis.call('SETRANGE', key, LEASE_AT, lease)
    redis.call('PEXPIRE', key, life)
  else
    local text = redis.call('GET', key)
    redis.call('SET', key, text:sub(1, LEASE_AT) .. lease
      .. struct.pack('>IdII', h.failures, h.retry_at, h.extra + #tags, h.error)
      .. text:sub(HEAD + 1, HEAD + h.extra) .. tags .. text:sub(HEAD + h.tags + 1), 'PX', life)
    untag(base, member, before, tags)
  end
end
return {{'lease', struct.pack('>d', held_until), token, epoch}}
""")

PUBLISH: Final = Script(
    f"""
local key, base, member, now = KEYS[1], ARGV[1], ARGV[2], clock(ARGV[3])
local token, copy, value, version, has_late_tags, late_tags, epoch = unpack(ARGV, 4, 10)
local is_resent = ARGV[11] == '1'
local h, unsure = head(key), is_resent and {UNSURE} or 0
if not h then return {{unsure}} end
if h.token == token and is_past(base, tonumber(epoch), late_tags) then
  end_lease(key, base, member, h)
  return {{0}}
end
if h.token ~= token then
  if not is_resent or h.copy == 0 or h.generation ~= copy:sub(-{NAME}) then return {{unsure}} end
  is_there(key)
  return {{{DONE}, math.max(h.changed, 0)}}
end
if h.held_until <= now then return {{0}} end
local before = tags_text(key, h)
if not is_named(base, member, before) then return {{0}} end
local tags = before
if has_late_tags == '1' then tags = with_late_tags(split_tags(before), late_tags) end
if version == '' then version = version_of(key, h) end
local text = copy .. FREE .. struct.pack('>IdII', 0, 0, EXTRA_SIZE + #version + #tags, 0)
local life = tag_and_lifetime(base, member, parsed(text), tags, now)
local stamp = next_stamp(base)
redis.call('SET', key, text .. extra(stamp, with_replaced(h), version) .. tags .. value, 'PX', life)
if tags ~= before then untag(base, member, before, tags) end
tell(base, PUBLISHED .. copy:sub(-{NAME}) .. member)
return {{{DONE}, math.max(stamp, 0)}}
""",
    is_stamped=True,
)


def _answer(code: int) -> str:
    """End a PUT that found its work done, or may not do it.

    The answer counts once the replicas have what it relies on, so it writes something.
    """
    return f"""
  if is_ours then
    redis.call('SETRANGE', key, '0', MAGIC)
  else
    redis.call('SET', key, '')
    redis.call('DEL', key)
  end
  return {{{code}, math.max(changed, 0), stored_version, replaced, is_empty and 1 or 0}}
"""


def _zeros(size: int) -> str:
    """So many zero bytes, as a text in Lua."""
    return "'" + r"\0" * size + "'"


GENERATION: Final = f"{GENERATION_AT + 1}, {GENERATION_AT + NAME}"
"""The first and the last byte of the generation in an entry's string, as Lua counts them."""

# The stages of PUT, as the comments in it name them:
#
# 1. Read what is there. An entry that already holds this put's copy ends it (STORED), as does one
#    that remembers the copy as replaced (REPLACED): the put was done before.
# 2. Is this put late? AGAIN if the entry has changed after `as_of`, or may have.
# 3. Was one of its tags invalidated after `as_of`? AGAIN, too.
# 4. Find what a read would see of the stored copy: damaged copies and lost tags.
# 5. May it replace what is there? By its condition (REFUSED), and by its version (KEPT, MIXED). A
#    put of NO_LIVE_COPY that was sent while the copy was live is late (AGAIN): its sender may have
#    been told REFUSED, and what is told stays true.
# 6. Store it, add it to the sets of its tags, remove it from those it no longer has, announce it.
#
# STAMPS and TAGS define Lua functions. They stand inside the branches that call them, because to
# define them takes the server longer than a step that needs none.
PUT: Final = Script(
    CONSTANTS
    + f"""
HAS_COUNTER = true -- where the slot moves, the old node no longer has it
local fence, text = ARGV[1], ARGV[2]
local as_of, good_until, drops_keys, base_size, when, is_unread, keeps_tags, keeps_late_tags,
  version_size, given_tags_size = struct.unpack('{FENCE.format}{HOW.format[1:]}', fence)
local key = ARGV[6] or KEYS[1]
local base, own_generation = key:sub(1, base_size), text:sub({GENERATION})
local found = redis.pcall('GETRANGE', key, '0', '{FULL_HEAD - 1}')
if type(found) == 'table' then
  if not found.err:find('WRONGTYPE', 1, true) then error(found) end
  found = ''
end

-- 1. What is there.
local generation = found:sub({GENERATION})
local copy, extra_size, tags_size, error_size, changed, replaced = 0, 0, 0, 0, 0, NONE_REPLACED
local is_ours, stored_version, is_empty = #found >= HEAD and found:sub(1, 4) == MAGIC, '', true
if is_ours then
  local size, mark
  if #found == FULL_HEAD then
    tags_size, error_size, size, mark, changed, replaced =
      struct.unpack('>IIIc4dc{4 * SHORT_ID}', found, {HEAD - 7})
  end
  if mark == EXTRA_MARK and tags_size >= EXTRA_SIZE then
    extra_size = size + 4
    if not (changed >= 0 and changed < LAST_STAMP) then changed = -1 end
    if extra_size < EXTRA_SIZE or extra_size > tags_size then is_ours = false end
  else -- of an older release, or a lease
    changed, replaced = 0, NONE_REPLACED
    tags_size, error_size = struct.unpack('>II', found, {HEAD - 7})
  end
  if not is_ours then
    extra_size, tags_size, error_size, changed, replaced = 0, 0, 0, 0, NONE_REPLACED
  else
    copy = found:byte(5)
    if extra_size > EXTRA_SIZE and copy > 0 then
      stored_version = redis.call('GETRANGE', key, FULL_HEAD, HEAD + extra_size - 1)
      if not stored_version:find('^[it]') then copy, stored_version = 0, '' end -- damaged
    end
    if copy > 0 and generation == own_generation then {_answer(STORED)} end
    if replaced:find(own_generation:sub(1, {SHORT_ID}), 1, true) then {_answer(REPLACED)} end
  end
end

-- 2. Is this put late?
if changed > as_of or changed < 0 then
  {STAMPS}
  local last = changed > 0 and stamp_if_changed(base, changed, as_of)
  if last then return {{AGAIN, last}} end
  local stamp = next_stamp(base)
  if stamp < 0 then return redis.error_reply('ERR non local key') end
  redis.call('SETRANGE', key, CHANGED_AT, struct.pack('>d', stamp))
  return {{AGAIN, stamp}}
end
if changed == 0 then
  local counter = redis.pcall('HMGET', base .. '+', 'n', 'b')
  if counter.err then
    if not counter.err:find('WRONGTYPE', 1, true) then error(counter) end
    counter = {{}}
  end
  local last, born = tonumber(counter[1] or ''), tonumber(counter[2] or '')
  local time = redis.call('TIME')
  local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
  local is_lost = not last or not born or born > last
  if is_lost or as_of < born or good_until < now or drops_keys == 1 then
    {STAMPS}
    if is_lost then return {{AGAIN, new_counter(base), now}} end
    if as_of < born or good_until < now then return {{AGAIN, last_stamp(base), now}} end
    -- This server may have dropped the trace of a deletion. Leave one for puts that are late.
    local stamp = next_stamp(base)
    if is_ours then
      local whole = redis.call('GET', key)
      redis.call('SET', key, whole:sub(1, HEAD - 8)
        .. struct.pack('>II', tags_size + EXTRA_SIZE, error_size)
        .. extra(stamp, NONE_REPLACED, '') .. whole:sub(HEAD + 1), 'KEEPTTL')
      redis.call('PEXPIRE', key, {TRACE_FOR}, 'GT')
    else
      redis.call('SET', key, MAGIC .. string.rep('\\0', HEAD - 12)
        .. struct.pack('>II', EXTRA_SIZE, 0) .. extra(stamp, NONE_REPLACED, ''), 'PX', {TRACE_FOR})
    end
    return {{AGAIN, stamp, now}}
  end
end

-- 3. Was one of its tags invalidated after `as_of`? Version and tags stand between front and value.
local tags = ''
if given_tags_size > 0 then
  local first = {CHANGED_AT} + version_size
  tags = text:sub(first + 1, first + given_tags_size)
  local epochs = base .. '@'
  local is_known = redis.pcall('ZSCORE', epochs, '!')
  local is_damaged = type(is_known) == 'table'
  if is_damaged and not is_known.err:find('WRONGTYPE', 1, true) then error(is_known) end
  local top, at = not is_damaged and tonumber(is_known or '0') or 0, 1
  while at < given_tags_size and not is_damaged do
    local size = struct.unpack('>I', tags, at)
    if size == 4294967295 then size = 0 else
      local score = redis.call('ZSCORE', epochs, '#' .. tags:sub(at + 4, at + 3 + size))
      if score and tonumber(score) > top then top = tonumber(score) end
    end
    at = at + 4 + size
  end
  if top > as_of or not is_known or is_damaged then
    {STAMPS}
    local last = last_stamp(base)
    if last == nil then return redis.error_reply('ERR non local key') end
    if not is_known or is_damaged or top >= LAST_STAMP - 1000000000 then
      -- Which tags were invalidated is not known any more: all of them, up to now.
      top = last
      redis.call('DEL', epochs)
      redis.call('ZADD', epochs, string.format('%.0f', top), '!')
    elseif top > last then -- an older release has written it, or the counter was lost
      redis.call('HSET', base .. '+', 'n', string.format('%.0f', top))
      last = top
    end
    if top > as_of then return {{AGAIN, last}} end
  end
end

-- 4. Conditions and versions see what a read sees: no copy that another program has damaged, and
-- a marked one if the server has dropped a tag's set, which would have named it.
local mark = 0
if copy > 0 and (when > 0 or is_unread == 1 or stored_version ~= '') then
  mark = found:byte(6)
  local is_whole = copy <= 2 and mark <= 2 and not generation:find('[\\128-\\255]')
  for at = 7, 31, 8 do -- fetched_at, and the three durations
    local seconds = struct.unpack('>d', found, at)
    is_whole = is_whole and seconds >= (at > 7 and 0 or -math.huge) and seconds < math.huge
  end
  if not is_whole then
    copy, stored_version = 0, ''
  elseif drops_keys == 1 and mark < 2 and tags_size > extra_size then
    {TAGS}
    local stored_tags = redis.call('GETRANGE', key, HEAD + extra_size, HEAD + tags_size - 1)
    for _, tag in ipairs(tags_of(stored_tags)) do
      local named = redis.pcall('SISMEMBER', base .. '#' .. tag, key:sub(base_size + 1))
      if type(named) == 'table' and not named.err:find('WRONGTYPE', 1, true) then error(named) end
      if named ~= 1 then mark = 2 end
    end
  end
end

-- 5. May it replace what is there?
if when > 0 or is_unread == 1 then
  local holds
  if is_unread == 1 and copy == 0 then
    holds = false
  elseif when == {When.ALWAYS.value} then
    holds = true
  elseif when == {When.UNCHANGED.value} then
    if copy == 0 then
      holds = ARGV[4] == NOBODY
    else
      holds = generation == ARGV[4] and mark == tonumber(ARGV[5])
    end
  else
    local is_live = false
    if copy == 1 and mark == 0 then
      local now, fetched_at, fresh_for = tonumber(ARGV[3]), struct.unpack('>dd', found, 7)
      if not now then
        local time = redis.call('TIME')
        now = tonumber(time[1]) + tonumber(time[2]) / 1000000
        local ends, sent = fetched_at + fresh_for, good_until / 1000000 - {GOOD_FOR}
        if when == {When.NO_LIVE_COPY.value} and fresh_for > 0 and sent < ends and ends <= now then
          return {{AGAIN, as_of, now * 1000000}} -- the copy may have refused it, and is old by now
        end
      end
      local age = now - fetched_at
      is_live = age >= -{MAX_SKEW} and math.max(age, 0) < fresh_for
    end
    holds = is_live == (when == {When.LIVE_COPY.value})
  end
  if not holds then
    if is_ours then -- a deletion's trace, or an absence that lasts for no time, is nothing
      local kind = found:byte(5)
      is_empty = (kind == 0 or kind == {ABSENT} and found:sub(15, 38) == {_zeros(24)})
        and found:sub(LEASE_AT + 1, HEAD - 8) == FREE .. {_zeros(12)}
    end
    {_answer(REFUSED)}
  end
end
local version = ''
if stored_version ~= '' then
  version = text:sub({CHANGED_AT + 1}, {CHANGED_AT} + version_size)
  if version ~= '' then
    if stored_version:byte(1) ~= version:byte(1) then {_answer(MIXED)} end
    -- Byte by byte: Lua would compare texts by the server's locale.
    for at = 2, #stored_version do
      local stored, given = stored_version:byte(at), version:byte(at) or -1
      if stored > given then {_answer(KEPT)} end
      if stored < given then break end
    end
  end
end

-- 6. Store it. What the put does not bring stays: version, tags, value.
local life, old_tags, is_kept = fence:sub({FENCE.size + HOW.size + 1}), '', false
if tags_size > extra_size then
  old_tags = redis.call('GETRANGE', key, HEAD + extra_size, HEAD + tags_size - 1)
end
if given_tags_size > 0 or old_tags ~= '' then
  {TAGS}
  if old_tags ~= '' and (keeps_tags == 1 or keeps_late_tags == 1) then
    local lease_tags, late_tags = split_tags(old_tags)
    if keeps_tags == 1 then tags = lease_tags .. tags end
    if keeps_late_tags == 1 then tags = with_late_tags(tags, late_tags) end
    is_kept = true
  end
  name_for(base, key:sub(base_size + 1), tags, life)
end
local keeps_version = version_size == 0 and stored_version ~= ''
if keeps_version and text:byte(5) == {ABSENT} then
  local fresh_for, stale_for, error_for = struct.unpack('>ddd', text, 15)
  keeps_version = fresh_for + math.max(stale_for, error_for) > 0 -- else it is a deletion
end
local front, rest = text:sub(1, {CHANGED_AT}), text:sub({CHANGED_AT + 1})
if is_kept or keeps_version or is_unread == 1 then
  local value = rest:sub(version_size + given_tags_size + 1)
  version = keeps_version and stored_version or rest:sub(1, version_size)
  if is_unread == 1 then
    value = redis.call('GETRANGE', key, HEAD + tags_size + error_size, -1)
    front = front:sub(1, 4) .. found:sub(5, 5) .. front:sub(6)
  end
  front = front:sub(1, HEAD - 8) .. struct.pack('>IIIc4', EXTRA_SIZE + #version + #tags, 0,
    EXTRA_SIZE - 4 + #version, EXTRA_MARK)
  rest = version .. tags .. value
end
local stamp = redis.pcall('HINCRBY', base .. '+', 'n', '1')
if type(stamp) ~= 'number' or stamp < 1000000 or stamp >= LAST_STAMP or stamp <= as_of then
  -- The counter was lost, or the sender has heard of another server's.
  {STAMPS}
  if is_elsewhere(stamp) then error(stamp) end
  if type(stamp) ~= 'number' or stamp < 1000000 or stamp >= LAST_STAMP then
    stamp = new_counter(base)
  end
  if extra_size > 0 then redis.call('SETRANGE', key, CHANGED_AT, struct.pack('>d', stamp)) end
  return {{AGAIN, stamp}}
end
if copy > 0 then replaced = generation:sub(1, {SHORT_ID}) .. replaced:sub(1, {3 * SHORT_ID}) end
redis.call('SET', key, front .. struct.pack('>d', stamp) .. replaced .. rest, 'PX', life)
if old_tags ~= '' and old_tags ~= tags then
  {TAGS}
  untag(base, key:sub(base_size + 1), old_tags, tags)
end
redis.pcall('SPUBLISH', base .. '{CHANNEL.decode()}', PUBLISHED .. own_generation
  .. key:sub(base_size + 1))
if keeps_version then return {{{STORED}, stamp, version}} end
return stamp
""",
    is_whole=True,
    is_stamped=True,
)
"""It has few arguments, because each takes the server as long as a small step: the fence, the
string to store without its stamp, and those of its condition. The key is an argument where the slot
moves: the sender has seen that the old node has no counter, but either may have the entry."""

RENEW: Final = Script("""
local key, base, member, now = KEYS[1], ARGV[1], ARGV[2], clock(ARGV[3])
local h = head(key)
if not h or h.token ~= ARGV[4] or h.held_until <= now then return 0 end
if not is_named(base, member, tags_text(key, h)) then return 0 end
h.held_until = now + tonumber(ARGV[5])
local life = tag_and_lifetime(base, member, h, tags_text(key, h), now)
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
local life = tag_and_lifetime(base, member, h, tags, now)
if failure == '' then
  redis.call('SETRANGE', key, LEASE_AT, FREE)
  redis.call('PEXPIRE', key, life)
else
  local text = redis.call('GET', key)
  redis.call('SET', key, text:sub(1, LEASE_AT) .. FREE .. failure
    .. struct.pack('>II', h.tags, #said) .. text:sub(HEAD + 1, HEAD + h.tags) .. said
    .. text:sub(HEAD + h.tags + h.error + 1), 'PX', life)
end
return 1
""")

INVALIDATE: Final = Script(
    f"""flags=allow-oom
local key, base, member, as_of = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3])
local h = head(key)
local last = h and stamp_if_changed(base, h.changed, as_of)
if last then return {{AGAIN, last}} end
local stamp = next_stamp(base)
void(key, base, member, h, tonumber(ARGV[4]), stamp)
tell(base, VOIDED .. member)
return {{{DONE}, math.max(stamp, 0)}}
""",
    is_stamped=True,
)

INVALIDATE_TAG: Final = Script(
    f"""flags=allow-oom
local set, base, as_of, mark = KEYS[1], ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local found, reached, later = redis.call('SSCAN', set, ARGV[4], 'COUNT', 100), {{}}, {{}}
local tag, is_first = set:sub(#base + 2), ARGV[4] == '0' and base:find(FIRST, 1, true)
-- With every page, so that a caller that waits for replicas has a change to confirm.
local stamp = begin_epoch(base, tag)
if is_first then tell(base, TAGGED .. tag) end
for _, member in ipairs(found[2]) do
  local h = head(base .. member)
  if not h or is_empty(h) then
    redis.call('SREM', set, member)
  elseif h.changed > as_of and h.changed <= stamp then
    later[#later + 1] = member
  else
    void(base .. member, base, member, h, mark, stamp)
    tell(base, VOIDED .. member)
    reached[#reached + 1] = member
  end
end
return {{{DONE}, stamp, found[1], reached, later}}
""",
    is_stamped=True,
)
"""Ids that changed after `as_of` are named apart: the sender asks for this page again."""

NOTE_TAG: Final = Script("""flags=allow-oom
begin_epoch(ARGV[1], ARGV[2])
return 1
""")
"""The first part of INVALIDATE_TAG."""

DELETE: Final = Script(
    f"""flags=allow-oom
local key, base, member, as_of = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3])
local h = head(key)
local last = h and stamp_if_changed(base, h.changed, as_of)
if last then return {{AGAIN, last}} end
local stamp, tags = next_stamp(base), h and tags_text(key, h) or ''
leave_trace(key, stamp, h and with_replaced(h) or NONE_REPLACED)
untag(base, member, tags)
tell(base, VOIDED .. member)
return {{{DONE}, math.max(stamp, 0)}}
""",
    is_stamped=True,
)

EVICT: Final = Script("""flags=allow-oom,allow-cross-slot-keys
local found = redis.call('SCAN', ARGV[1], 'MATCH', ARGV[2], 'COUNT', 500, 'TYPE', 'string')
local before, dropped = tonumber(ARGV[3]), 0
for _, key in ipairs(found[2]) do
  local h = parsed(redis.pcall('GETRANGE', key, 0, FULL_HEAD - 1))
  local lease = h and h.token ~= NOBODY and h.held_until or 0
  if h and not is_empty(h) and math.max(served_until(h), lease) < before then
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
  local h = parsed(redis.pcall('GETRANGE', key, 0, FULL_HEAD - 1))
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
    is_whole=True,
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
        return ReadCommand(DOUBTS.call(keys, GLANCE))
    if len(keys) == 1:
        return ReadCommand(("GETRANGE", keys[0], 0, GLANCE - 1))
    return ReadCommand(GLANCES.call(keys, GLANCE))


def values(keys: list[bytes], *, doubts: bool = False) -> Command:
    return ReadCommand(DOUBTS.call(keys, 0) if doubts else ("MGET", *keys))


def tags_named(command: Command) -> list[bytes]:
    """The tags that an ACQUIRE or a PUT names."""
    if command[1] == ACQUIRE.sha:
        return unpacked_tags(command[10])
    return put_tags(command[5]) if command[1] == PUT.sha else []


def with_all_keys(command: Command, tags: Sequence[bytes]) -> Command:
    """The step for a node that does not hold the slot yet, which refuses it if a key is missing.

    Its text goes along. The keys are the id, twice, so that a step sees by their number that its
    slot moves, and the sets of these tags. Those of a PUT, which may create the id, are the counter
    (if both nodes lack it, this one begins it) and the epochs of its tags instead of the id.
    """
    _, sha, _, key, *arguments = command
    base = base_of(key)
    keys = [key, key]
    if sha == PUT.sha:
        keys = [base + b"+", base + b"+"]
        if tags_named(command):
            keys.append(base + b"@")
        arguments += [b""] * (5 - len(arguments)) + [key]
    keys += [base + b"#" + tag for tag in tags]
    form = (EVAL, BY_SHA[sha].text, len(keys), *keys, *arguments)
    return StampedCommand(form) if isinstance(command, StampedCommand) else form


def announcement_of(command: Command) -> Command:
    """The command that announces a step on one id, whatever the step did."""
    key = command[3]
    base = base_of(key)
    return announced(base, VOIDED, key[len(base) :])
