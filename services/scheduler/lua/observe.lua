-- ARGV: tenant, id, request_id, uid, revision (20 digits), state, reason, message, ready_ms, create_ms
-- Writes what the watcher saw. Returns applied, missing (no record of it), ended (for the record it is over, so nothing of it may live),
-- other (another create's) or old.
local tenant, id = ARGV[1], ARGV[2]
local key = record_key(tenant, id)
local r = redis.call('HMGET', key, 'state', 'request_id', 'revision', 'delete_reason', 'ready_ms', 'uid', 'create_ms', 'reason', 'message')
if not r[1] then return 'missing' end
if r[2] ~= ARGV[3] then
  -- An id is given again only after its end: what is older than the record is a leftover.
  if tonumber(ARGV[10]) < tonumber(r[7]) then return 'ended' end
  -- Its own record was lost with the store's last moments, and came after the end of this one.
  if is_terminal(r[1]) then return 'missing' end
  return 'other'
end
if is_terminal(r[1]) then return 'ended' end
if ARGV[5] <= r[3] then return 'old' end
if r[6] ~= '' and r[6] ~= ARGV[4] then return 'other' end
local now = now_ms()
if r[1] == QUEUED then leave_queue(tenant, id) end
redis.call('HSET', key, 'uid', ARGV[4], 'revision', ARGV[5])
redis.call('ZREM', CLAIMED, member(tenant, id))
local state, reason, message = ARGV[6], ARGV[7], ARGV[8]
if state == FAILED or state == DELETED then
  if r[4] ~= '' then
    -- It was to go, and went; how it ended on its way is nobody's loss.
    finish(tenant, id, DELETED, r[4], '', now)
  elseif reason == REASON_EXPIRED then
    -- The runtime ended it at the end of its life, before the reaper did.
    finish(tenant, id, DELETED, reason, message, now)
  elseif state == DELETED and reason == REASON_NONE then
    finish(tenant, id, FAILED, REASON_EXTERNAL, 'it was removed without the platform being asked', now)
  else
    finish(tenant, id, FAILED, reason, message, now)
  end
elseif r[1] ~= DELETING then
  count(tenant, key, '1')
  if state == READY and r[5] == '0' then
    redis.call('HSET', key, 'ready_ms', ARGV[9], 'last_active_ms', text(now), 'last_heartbeat_ms', text(now))
    lease(tenant, id)
  end
  -- A watcher that has just started has not asked the agent again yet: what was READY does not start anew.
  local again = r[1] == READY and state == STARTING
  if not again and (state ~= r[1] or reason ~= r[8] or message ~= r[9]) then
    redis.call('HSET', key, 'state', state, 'reason', reason, 'message', message)
    changed(tenant, id)
  end
end
return 'applied'
