-- ARGV: tenant, id, request_id, spec_hash, then field, value, ... of the whole record. Makes the record unless there is one.
local tenant, id = ARGV[1], ARGV[2]
local key = record_key(tenant, id)
if redis.call('EXISTS', key) == 1 then return 0 end
for i = 5, #ARGV, 2 do redis.call('HSET', key, ARGV[i], ARGV[i + 1]) end
redis.call('HSET', request_key(tenant, ARGV[3]), 'id', id, 'spec_hash', ARGV[4])
redis.call('PEXPIRE', request_key(tenant, ARGV[3]), KEPT_MS)
redis.call('ZADD', index_key(tenant), redis.call('HGET', key, 'create_ms'), id)
lease(tenant, id)
count(tenant, key, '1')
changed(tenant, id)
return 1
