"""Scripts that run on a Valkey server in one step: the bound of `max_bytes`, and pins.

For each layout and codec, and in a cluster for each shard of them, a server keeps four keys beside the blocks, which
all scripts get as KEYS:

    1  index   sorted set of block hashes, by the time of their last use
    2  sizes   hash of block hash to bytes of the record
    3  pinned  set of block hashes
    4  total   sum of the sizes

Block hashes are in hexadecimal; a block's own key is the prefix in ARGV and its hash.
"""

from __future__ import annotations

USE_AND_EVICT = """
-- KEYS: index (by last use), sizes, pinned, total. ARGV: max bytes, prefix of blocks, now, then hash and size of each.
for at = 4, #ARGV, 2 do
  local before = tonumber(redis.call('HGET', KEYS[2], ARGV[at]) or '0')
  redis.call('HSET', KEYS[2], ARGV[at], ARGV[at + 1])
  redis.call('ZADD', KEYS[1], ARGV[3], ARGV[at])
  redis.call('INCRBY', KEYS[4], tonumber(ARGV[at + 1]) - before)
end
local gone, from = {}, 0
while tonumber(redis.call('GET', KEYS[4]) or '0') > tonumber(ARGV[1]) do
  local oldest = redis.call('ZRANGE', KEYS[1], from, from)[1]
  if not oldest then break end
  if redis.call('SISMEMBER', KEYS[3], oldest) == 1 then
    from = from + 1
  else
    redis.call('UNLINK', ARGV[2] .. oldest)
    redis.call('ZREM', KEYS[1], oldest)
    redis.call('DECRBY', KEYS[4], tonumber(redis.call('HGET', KEYS[2], oldest) or '0'))
    redis.call('HDEL', KEYS[2], oldest)
    gone[#gone + 1] = oldest
  end
end
return gone
"""

PIN = """
-- KEYS as above. ARGV: most bytes that may be pinned (-1: no bound), prefix of blocks, then hashes.
local pinned = 0
for _, name in ipairs(redis.call('SMEMBERS', KEYS[3])) do
  local size = redis.call('STRLEN', ARGV[2] .. name)
  if size == 0 then redis.call('SREM', KEYS[3], name) end
  pinned = pinned + size
end
local count = 0
for at = 3, #ARGV do
  local key = ARGV[2] .. ARGV[at]
  local size, is_pinned = redis.call('STRLEN', key), redis.call('SISMEMBER', KEYS[3], ARGV[at]) == 1
  if size > 0 and (is_pinned or tonumber(ARGV[1]) < 0 or pinned + size <= tonumber(ARGV[1])) then
    redis.call('PERSIST', key)
    redis.call('SADD', KEYS[3], ARGV[at])
    pinned = pinned + (is_pinned and 0 or size)
    count = count + 1
  end
end
return count
"""

FORGET = """
-- KEYS as above. ARGV: hashes that are not there any more.
for at = 1, #ARGV do
  redis.call('ZREM', KEYS[1], ARGV[at])
  redis.call('SREM', KEYS[3], ARGV[at])
  local size = redis.call('HGET', KEYS[2], ARGV[at])
  if size then
    redis.call('DECRBY', KEYS[4], tonumber(size))
    redis.call('HDEL', KEYS[2], ARGV[at])
  end
end
return #ARGV
"""

UNPIN = """
-- KEYS as above. ARGV: time to live in ms, prefix of blocks, then hashes.
local count = 0
for at = 3, #ARGV do
  count = count + redis.call('PEXPIRE', ARGV[2] .. ARGV[at], ARGV[1])
  redis.call('SREM', KEYS[3], ARGV[at])
end
return count
"""
