-- ARGV: tenant, id, request_id, uid. The runtime accepted the sandbox. Returns the record's state, or '' if it is not this create's.
local key = record_key(ARGV[1], ARGV[2])
local r = redis.call('HMGET', key, 'state', 'request_id', 'uid')
if r[2] ~= ARGV[3] then return '' end
redis.call('ZREM', CLAIMED, member(ARGV[1], ARGV[2]))
if r[3] == '' then redis.call('HSET', key, 'uid', ARGV[4]) end
return r[1]
