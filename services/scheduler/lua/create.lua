-- ARGV: tenant, id, request_id, spec_hash, queue_limit, priority, ttl_ms, idle_timeout_ms, heartbeat_timeout_ms, spec, expects_secret_env,
-- start_timeout_ms, cpu_milli, memory_bytes, lifetime_ms, then the tenant's quota as for note_quota
-- Returns {outcome, id, now}: created, repeat, request_conflict, request_ended, taken, queue_full; or {over_quota, id, now, what, bound}
-- for one that would not fit alone.
local tenant, id, request_id, spec_hash = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local now = now_ms()
note_quota(tenant, ARGV[16], ARGV[17], ARGV[18], ARGV[19], ARGV[20])
local earlier = redis.call('HMGET', request_key(tenant, request_id), 'id', 'spec_hash')
if earlier[1] then
  if earlier[2] ~= spec_hash then return {'request_conflict', earlier[1], text(now)} end
  id = earlier[1]
  local holder = redis.call('HGET', record_key(tenant, id), 'request_id')
  if holder == request_id then return {'repeat', id, text(now)} end
  -- Its sandbox has ended and somebody else's has the id now.
  if holder then return {'request_ended', id, text(now)} end
end
local key = record_key(tenant, id)
local r = redis.call('HMGET', key, 'state', 'request_id', 'spec_hash')
if r[1] and not is_terminal(r[1]) then
  -- A request id is known for as long as its sandbox lives.
  if r[2] ~= request_id then return {'taken', id, text(now)} end
  return {r[3] == spec_hash and 'repeat' or 'request_conflict', id, text(now)}
end
if redis.call('ZCARD', queue_key(tenant)) >= tonumber(ARGV[5]) then return {'queue_full', id, text(now)} end
local over = over_quota(tenant, ARGV[13], ARGV[14], true)
if over then return {'over_quota', id, text(now), over[1], text(over[2])} end

redis.call('DEL', key)
redis.call('ZREM', ENDED, member(tenant, id))
redis.call('HSET', key,
  'tenant', tenant, 'sandbox_id', id, 'request_id', request_id, 'spec_hash', spec_hash, 'spec', ARGV[10],
  'expects_secret_env', ARGV[11], 'state', QUEUED, 'reason', REASON_NONE, 'message', '', 'uid', '', 'revision', '',
  'create_ms', text(now), 'ready_ms', '0', 'end_ms', '0', 'expire_ms', text(now + tonumber(ARGV[7])),
  'idle_timeout_ms', ARGV[8], 'last_active_ms', text(now), 'heartbeat_timeout_ms', ARGV[9], 'last_heartbeat_ms', text(now),
  'start_ms', '0', 'start_timeout_ms', ARGV[12], 'delete_reason', '', 'cpu_milli', ARGV[13], 'memory_bytes', ARGV[14],
  'lifetime_ms', ARGV[15], 'charged', '0')
redis.call('HSET', request_key(tenant, request_id), 'id', id, 'spec_hash', spec_hash)
redis.call('PEXPIRE', request_key(tenant, request_id), KEPT_MS)
redis.call('ZADD', index_key(tenant), text(now), id)
lease(tenant, id)
if redis.call('ZCARD', queue_key(tenant)) == 0 then redis.call('RPUSH', TURNS, tenant) end
-- Higher priority first, then arrival. A double holds both exactly: 1000 * 1e12 + 1e12 < 2^53.
local turn = redis.call('INCR', 'orchard:arrivals') % 1000000000000
redis.call('ZADD', queue_key(tenant), text(turn - tonumber(ARGV[6]) * 1000000000000), id)
if redis.call('ZRANK', queue_key(tenant), id) == 0 then unpark(tenant) end
changed(tenant, id)
return {'created', id, text(now)}
