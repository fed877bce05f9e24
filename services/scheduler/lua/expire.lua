-- ARGV: limit. Claims leases that ran out, in one step with the re-read: a renewal comes before it or finds the sandbox
-- DELETING. Returns the names of sandboxes to delete.
local now = now_ms()
local doomed = {}
for _, name in ipairs(redis.call('ZRANGEBYSCORE', LEASES, '-inf', text(now), 'LIMIT', 0, ARGV[1])) do
  local tenant, id = split(name)
  local key = record_key(tenant, id)
  local state = redis.call('HGET', key, 'state')
  if not state or is_terminal(state) then
    redis.call('ZREM', LEASES, name)
  elseif state ~= DELETING and deadline(key) > now then
    lease(tenant, id)
  elseif state == QUEUED then
    finish(tenant, id, DELETED, REASON_EXPIRED, 'its time to live or heartbeat timeout ended while it was queued', now)
  else
    if state ~= DELETING then
      redis.call('HSET', key, 'state', DELETING, 'reason', REASON_EXPIRED, 'delete_reason', REASON_EXPIRED)
      changed(tenant, id)
    end
    -- Looked at again later, in case the delete is lost with its scheduler.
    redis.call('ZADD', LEASES, text(now + 5000), name)
    doomed[#doomed + 1] = name
  end
end
return doomed
