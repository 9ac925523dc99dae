"""What the server does in one step, so that nobody sees half of it. KEYS: the hand-off's hash, and its news."""

BEGIN = """
-- ARGV: generation, time to live (ms), record
local state = redis.call('HGET', KEYS[1], 'state')
if state == 'unwanted' then
  redis.call('HSET', KEYS[1], 'state', 'released')
  return 'released'
end
redis.call('UNLINK', KEYS[1])
redis.call('XTRIM', KEYS[2], 'MAXLEN', 0)  -- not deleted: names of records must go on rising
redis.call('HSET', KEYS[1], 'state', 'open', 'generation', ARGV[1])
redis.call('XADD', KEYS[2], '*', 'r', ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('PEXPIRE', KEYS[2], ARGV[2])
return 'open'
"""

APPEND = """
-- ARGV: generation, time to live (ms), record, new state, then the fields that were set just before
local found = redis.call('HMGET', KEYS[1], 'generation', 'state')
if found[1] ~= ARGV[1] or found[2] ~= 'open' then
  for index = 5, #ARGV do redis.call('HDEL', KEYS[1], ARGV[index]) end
  return found[2] or 'expired'
end
redis.call('HSET', KEYS[1], 'state', ARGV[4])
redis.call('XADD', KEYS[2], '*', 'r', ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('PEXPIRE', KEYS[2], ARGV[2])
return ARGV[4]
"""

END_HERE = """
local function finish(reason, ttl, record)
  redis.call('UNLINK', KEYS[1])
  redis.call('XTRIM', KEYS[2], 'MAXLEN', 0)
  redis.call('HSET', KEYS[1], 'state', reason)
  redis.call('PEXPIRE', KEYS[1], ttl)
  redis.call('XADD', KEYS[2], '*', 'r', record)
  redis.call('PEXPIRE', KEYS[2], ttl)
end
"""

TAKE = (
    END_HERE
    + """
-- ARGV: generation, time to live of what is remembered (ms), record
local found = redis.call('HMGET', KEYS[1], 'generation', 'state')
if found[1] ~= ARGV[1] or found[2] ~= 'sealed' then return '0' end
finish('taken', ARGV[2], ARGV[3])
return '1'
"""
)

END = (
    END_HERE
    + """
-- ARGV: reason, time to live of what is remembered (ms), record, generation or ''
local found = redis.call('HMGET', KEYS[1], 'generation', 'state')
local there = found[2] == 'open' or found[2] == 'sealed'
if found[2] and not there then return found[2] end
if ARGV[4] ~= '' and found[1] ~= ARGV[4] then return found[2] or '' end
finish(ARGV[1], ARGV[2], ARGV[3])
if not there and ARGV[1] == 'released' then redis.call('HSET', KEYS[1], 'state', 'unwanted') end
return ARGV[1]
"""
)

RENEW = """
-- ARGV: time to live (ms)
local state = redis.call('HGET', KEYS[1], 'state')
if state == 'sealed' then
  redis.call('PEXPIRE', KEYS[1], ARGV[1])
  redis.call('PEXPIRE', KEYS[2], ARGV[1])
end
return state or ''
"""
