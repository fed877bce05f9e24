-- ARGV: tenant, id, request_id, uid, revision (20 digits), state, reason, message, ready_ms, create_ms
-- Writes what the watcher saw. Returns applied, missing (no record), ended (for the record it is over, so nothing of it may live),
-- other (another create's) or old.
local tenant, id = ARGV[1], ARGV[2]
local key = record_key(tenant, id)
local r = redis.call('HMGET', key, 'state', 'request_id', 'revision', 'delete_reason', 'ready_ms', 'uid', 'create_ms')
if not r[1] then return 'missing' end
if r[2] ~= ARGV[3] then
  -- An id is given again only after its end: what is older than the record is a leftover.
  if tonumber(ARGV[10]) < tonumber(r[7]) then return 'ended' end
  return 'other'
end
if is_terminal(r[1]) then return 'ended' end
if ARGV[5] <= r[3] then return 'old' end
if r[6] ~= '' and r[6] ~= ARGV[4] then return 'other' end
local now = now_ms()
if r[1] == QUEUED then leave_queue(tenant, id) end
redis.call('HSET', key, 'uid', ARGV[4], 'revision', ARGV[5])
redis.call('ZREM', CLAIMED, member(tenant, id))
local state = ARGV[6]
if state == FAILED then
  finish(tenant, id, FAILED, ARGV[7], ARGV[8], now)
elseif state == DELETED then
  if r[4] ~= '' then
    finish(tenant, id, DELETED, r[4], '', now)
  else
    finish(tenant, id, FAILED, REASON_EXTERNAL, 'it was removed without the platform being asked', now)
  end
elseif r[1] ~= DELETING then
  count(tenant, key, '1')
  if state == READY and r[5] == '0' then
    redis.call('HSET', key, 'ready_ms', ARGV[9], 'last_active_ms', text(now), 'last_heartbeat_ms', text(now))
    lease(tenant, id)
  end
  if state ~= r[1] then
    redis.call('HSET', key, 'state', state, 'message', ARGV[8])
    changed(tenant, id)
  end
end
return 'applied'
