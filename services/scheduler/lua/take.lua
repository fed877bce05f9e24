-- ARGV: claim_ms, count. Takes the next creates, `count` at most, each: one whose claim ran out, or the first that fits of the tenant whose turn it is. When there are
-- both, one of each kind by turns: creates that the runtime refuses again and again must not keep the others from starting.
-- A store that was emptied does not know what counts against which quota: until that is rebuilt nothing is taken.
-- Returns {wait_ms, a record as field, value, ... for each that was taken}. wait_ms is empty: take again; else nothing more may be taken
-- for so long, or until something changes; -1 for no time known.
local now = now_ms()
if redis.call('EXISTS', EPOCH) == 0 then return {'-1'} end

local SHOWN = {sandboxes = {'%.0f sandboxes', 1}, cpu = {'%.6g CPUs', 1000}, memory = {'%.6g GiB of memory', 1073741824}}

local function park(tenant, at, why)
  redis.call('ZADD', PARKED, at, tenant)
  redis.call('HSET', tenant_key(tenant), 'waits', "it waits for the tenant's quota of " .. why)
end

-- Whether the tenant's first create may start now. If not, the tenant is parked until it may, or the create has ended.
local function admitted(tenant, id, key)
  local r = redis.call('HMGET', key, 'cpu_milli', 'memory_bytes')
  local over = over_quota(tenant, r[1], r[2], true)
  if over then
    local form, unit = unpack(SHOWN[over[1]])
    finish(tenant, id, FAILED, REASON_QUOTA, "it alone is over the tenant's quota of " .. string.format(form, over[2] / unit), now)
    return false
  end
  over = over_quota(tenant, r[1], r[2], false)
  if over then
    local form, unit = unpack(SHOWN[over[1]])
    park(tenant, NEVER, string.format(form .. ', of which %.6g are taken', over[2] / unit, over[3] / unit))
    return false
  end
  local rate = redis.call('HMGET', tenant_key(tenant), 'interval_ms', 'next_ms')
  if rate[1] and rate[1] ~= '' then
    -- A bucket that holds a second's worth, kept as the time at which it is full.
    local interval, full_at = tonumber(rate[1]), tonumber(rate[2] or '0')
    local at = full_at - math.max(1000 - interval, 0)
    if at > now then
      park(tenant, text(math.ceil(at)), string.format('%.6g creates a second', 1000 / interval))
      return false
    end
    redis.call('HSET', tenant_key(tenant), 'next_ms', string.format('%.3f', math.max(full_at, now) + interval))
  end
  return true
end

for _, tenant in ipairs(redis.call('ZRANGEBYSCORE', PARKED, '-inf', text(now))) do
  redis.call('ZREM', PARKED, tenant)
  redis.call('RPUSH', TURNS, tenant)
end

-- The name of the next create. With nil: how long to wait as above, empty where one only left its queue.
local function next_name()
  local stale = redis.call('ZRANGEBYSCORE', CLAIMED, '-inf', text(now), 'LIMIT', 0, 1)
  if stale[1] and (redis.call('EXISTS', TURNS) == 0 or redis.call('INCR', 'orchard:takes') % 2 == 0) then
    return split(stale[1])
  end
  local tenant = redis.call('LPOP', TURNS)
  if not tenant then
    local first = redis.call('ZRANGE', PARKED, 0, 0, 'WITHSCORES')
    if first[2] and tonumber(first[2]) < tonumber(NEVER) then return nil, text(tonumber(first[2]) - now) end
    return nil, '-1'
  end
  local id = redis.call('ZRANGE', queue_key(tenant), 0, 0)[1]
  if not id then return nil, '' end
  local taken = admitted(tenant, id, record_key(tenant, id))
  if taken then
    redis.call('ZREM', queue_key(tenant), id)
    redis.call('HDEL', tenant_key(tenant), 'waits')
  end
  if redis.call('ZCARD', queue_key(tenant)) > 0 and not redis.call('ZSCORE', PARKED, tenant) then redis.call('RPUSH', TURNS, tenant) end
  if not taken then return nil, '' end
  return tenant, id
end

local answer = {''}
for _ = 1, tonumber(ARGV[2]) do
  local tenant, id = next_name()
  if tenant then
    local key = record_key(tenant, id)
    local state = redis.call('HGET', key, 'state')
    if state ~= QUEUED and state ~= STARTING then
      redis.call('ZREM', CLAIMED, member(tenant, id))
    else
      redis.call('ZADD', CLAIMED, text(now + tonumber(ARGV[1])), member(tenant, id))
      if state == QUEUED then
        count(tenant, key, '1')
        redis.call('HSET', key, 'state', STARTING, 'start_ms', text(now))
        changed(tenant, id)
      end
      answer[#answer + 1] = redis.call('HGETALL', key)
    end
  elseif id ~= '' then
    answer[1] = id
    break
  end
end
return answer
