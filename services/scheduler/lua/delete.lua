-- ARGV: tenant, id, uid or '', reason. Returns {missing}, or {ended, other_uid or deleting, the record as field, value, ...}.
local tenant, id = ARGV[1], ARGV[2]
local key = record_key(tenant, id)
local r = redis.call('HMGET', key, 'state', 'uid', 'delete_reason')
if not r[1] then return {'missing'} end
if ARGV[3] ~= '' and r[2] ~= ARGV[3] then return {'other_uid', redis.call('HGETALL', key)} end
if is_terminal(r[1]) then return {'ended', redis.call('HGETALL', key)} end
if r[1] == QUEUED then
  finish(tenant, id, DELETED, ARGV[4], '', now_ms())
  return {'ended', redis.call('HGETALL', key)}
end
-- Looked at again later by the reaper, in case the delete is lost with its scheduler.
redis.call('ZADD', LEASES, text(now_ms() + 5000), member(tenant, id))
if r[3] == '' then redis.call('HSET', key, 'delete_reason', ARGV[4]) end
if r[1] ~= DELETING then
  redis.call('HSET', key, 'state', DELETING, 'reason', ARGV[4])
  changed(tenant, id)
end
return {'deleting', redis.call('HGETALL', key)}
