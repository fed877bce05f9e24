-- ARGV: limit, then of this scheduler's last pass its time by this clock, or 0, and how long ago it was by the scheduler's own.
-- Claims leases that ran out, in one step with the re-read: a renewal comes before it or finds the sandbox DELETING. Returns this
-- pass's time and the names of sandboxes to delete.
local now = now_ms()

-- Time in which nobody could renew a lease does not count against it: a step of the clock, a machine that was suspended, or, at
-- the first pass, the time since any scheduler's last.
local lost = 0
if tonumber(ARGV[2]) > 0 then
  lost = now - tonumber(ARGV[2]) - tonumber(ARGV[3])
else
  lost = now - tonumber(redis.call('GET', REAPED) or now)
end
redis.call('SET', REAPED, text(now))
if math.abs(lost) > LOST_SLACK_MS then
  for _, name in ipairs(redis.call('ZRANGE', LEASES, 0, -1)) do
    local tenant, id = split(name)
    local key = record_key(tenant, id)
    local r = redis.call('HMGET', key, 'state', 'last_heartbeat_ms', 'last_active_ms')
    if r[1] and not is_terminal(r[1]) and r[1] ~= DELETING then
      -- Never beyond now: what was renewed since is as new as can be, also where each of several schedulers does this.
      local moved = math.max(lost, 0)
      redis.call('HSET', key, 'last_heartbeat_ms', text(math.min(now, tonumber(r[2]) + moved)), 'last_active_ms',
        text(math.min(now, tonumber(r[3]) + moved)))
      lease(tenant, id)
    end
  end
end

local doomed = {text(now)}
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
