-- ARGV: tenant, id, expire_ms. Returns missing, ended or updated.
local key = record_key(ARGV[1], ARGV[2])
local state = redis.call('HGET', key, 'state')
if not state then return 'missing' end
if is_terminal(state) or state == DELETING then return 'ended' end
redis.call('HSET', key, 'expire_ms', ARGV[3])
lease(ARGV[1], ARGV[2])
changed(ARGV[1], ARGV[2])
return 'updated'
