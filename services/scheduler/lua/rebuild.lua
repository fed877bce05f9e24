-- ARGV: tenant, id, request_id, spec_hash, create_ms, then field, value, ... of the whole record. Makes the record unless there is one;
-- that of a sandbox that had the id before, and has ended, is none.
local tenant, id = ARGV[1], ARGV[2]
local key = record_key(tenant, id)
local r = redis.call('HMGET', key, 'state', 'request_id', 'create_ms')
if r[1] then
  if not is_terminal(r[1]) or r[2] == ARGV[3] or tonumber(r[3]) >= tonumber(ARGV[5]) then return 0 end
  redis.call('DEL', key)
  redis.call('ZREM', ENDED, member(tenant, id))
end
for i = 6, #ARGV, 2 do redis.call('HSET', key, ARGV[i], ARGV[i + 1]) end
redis.call('HSET', request_key(tenant, ARGV[3]), 'id', id, 'spec_hash', ARGV[4])
redis.call('PEXPIRE', request_key(tenant, ARGV[3]), KEPT_MS)
redis.call('ZADD', index_key(tenant), redis.call('HGET', key, 'create_ms'), id)
lease(tenant, id)
count(tenant, key, '1')
changed(tenant, id)
return 1
