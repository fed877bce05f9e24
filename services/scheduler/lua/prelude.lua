-- Shared by every script; the store puts it in front of each. Scripts alone change records and leases, so a change is whole
-- or not at all and nothing is read in one call and written in another. Times are milliseconds of the server's own clock.
local QUEUED, STARTING, READY, DELETING, DELETED, FAILED = '1', '2', '3', '4', '5', '6'
local REASON_NONE, REASON_REQUESTED, REASON_EXPIRED, REASON_UNSCHEDULABLE, REASON_QUOTA, REASON_EXTERNAL = '0', '1', '2', '4', '5', '12'
local NEVER = '9007199254740991'
local KEPT_MS = 86400000 -- terminal records and request ids are kept 24 h
local IDLE_SLACK_MS = 10000 -- two of the gateways' reports of activity: one may be late or lost without ending what is in use

local LOST_SLACK_MS = 3000 -- a busy machine may be this late between its clock's reading and the server's

local LEASES = 'orchard:leases'   -- "<tenant>/<id>" of every record that is not terminal, by deadline
local CLAIMED = 'orchard:claimed' -- "<tenant>/<id>" taken from the queue and not yet started, by when it may be taken again
local ENDED = 'orchard:ended'     -- "<tenant>/<id>" of terminal records, by end
local TURNS = 'orchard:turns'     -- tenants with queued creates that may be taken, in the order of their turns
local PARKED = 'orchard:parked'   -- tenants whose next create does not fit their quota, by when to look again; NEVER: when room is made
local REAPED = 'orchard:reaped'   -- when a scheduler looked for leases that ran out last
local EPOCH = 'orchard:epoch'     -- there once every record has been rebuilt from the runtime; gone with all of the store
local CHANGES = 'orchard:changes' -- channel: "<tenant>/<id>" of each changed record

local function record_key(tenant, id) return 'orchard:sandbox:' .. tenant .. ':' .. id end
local function request_key(tenant, request_id) return 'orchard:request:' .. tenant .. ':' .. request_id end
local function queue_key(tenant) return 'orchard:queue:' .. tenant end
local function tenant_key(tenant) return 'orchard:tenant:' .. tenant end -- its quota, what counts against it, what its queue waits for
local function index_key(tenant) return 'orchard:index:' .. tenant end
local function member(tenant, id) return tenant .. '/' .. id end
local function split(name) return string.match(name, '^([^/]*)/(.*)$') end
local function is_terminal(state) return state == DELETED or state == FAILED end

local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

local function text(number) return string.format('%.0f', number) end

-- The moment at which a record's lease ends: its time to live, idle timeout or heartbeat timeout, whichever is first. Only what is
-- READY can be idle. Heartbeats count from the create on: the queue need not start what a dead client left in it.
local function deadline(key)
  local r = redis.call('HMGET', key, 'expire_ms', 'idle_timeout_ms', 'last_active_ms', 'heartbeat_timeout_ms', 'last_heartbeat_ms', 'ready_ms')
  local at = tonumber(r[1])
  local idle, heartbeat = tonumber(r[2]), tonumber(r[4])
  if idle > 0 and r[6] ~= '0' then at = math.min(at, tonumber(r[3]) + idle + IDLE_SLACK_MS) end
  if heartbeat > 0 then at = math.min(at, tonumber(r[5]) + heartbeat) end
  return at
end

local function lease(tenant, id)
  redis.call('ZADD', LEASES, text(deadline(record_key(tenant, id))), member(tenant, id))
end

local function changed(tenant, id) redis.call('PUBLISH', CHANGES, member(tenant, id)) end

-- What counts against a tenant's quota is what its records say, each from STARTING to its end: `charged` tells that it does, and
-- changes with the sums in one step, so they cannot part.
local function count(tenant, key, charged)
  local r = redis.call('HMGET', key, 'charged', 'cpu_milli', 'memory_bytes')
  if (r[1] or '0') == charged then return false end
  local sign = charged == '1' and '' or '-'
  redis.call('HSET', key, 'charged', charged)
  redis.call('HINCRBY', tenant_key(tenant), 'used_sandboxes', sign .. '1')
  for i, field in ipairs({'used_cpu_milli', 'used_memory_bytes'}) do
    local amount = r[i + 1] or '0'
    if amount ~= '0' then redis.call('HINCRBY', tenant_key(tenant), field, sign .. amount) end
  end
  return true
end

-- A parked tenant's next create may fit now: it takes its turn again. One that waits for its rate knows the time itself.
local function unpark(tenant)
  local at = redis.call('ZSCORE', PARKED, tenant)
  if not at or tonumber(at) < tonumber(NEVER) then return end
  redis.call('ZREM', PARKED, tenant)
  redis.call('RPUSH', TURNS, tenant)
  redis.call('PUBLISH', CHANGES, member(tenant, '')) -- wakes whoever takes creates
end

-- A create leaves its queue. With nothing left its tenant has no turn; else what comes next may fit.
local function leave_queue(tenant, id)
  local left = redis.call('ZREM', queue_key(tenant), id)
  if redis.call('ZCARD', queue_key(tenant)) == 0 then
    redis.call('LREM', TURNS, 0, tenant)
    redis.call('ZREM', PARKED, tenant)
    redis.call('HDEL', tenant_key(tenant), 'waits')
  elseif left == 1 then
    unpark(tenant)
  end
end

-- What a create is over of its tenant's quota, {what, bound, used}, or nil. With `alone`: even if nothing else counted.
local function over_quota(tenant, cpu_milli, memory_bytes, alone)
  local q = redis.call('HMGET', tenant_key(tenant), 'sandboxes', 'cpu_milli', 'memory_bytes', 'used_sandboxes', 'used_cpu_milli',
    'used_memory_bytes')
  local wanted = {1, tonumber(cpu_milli or '0'), tonumber(memory_bytes or '0')}
  for i, what in ipairs({'sandboxes', 'cpu', 'memory'}) do
    if q[i] and q[i] ~= '' and wanted[i] > 0 then
      local bound, used = tonumber(q[i]), alone and 0 or tonumber(q[i + 3] or '0')
      if used + wanted[i] > bound then return {what, bound, used} end
    end
  end
end

-- Keep a tenant's quota if it is newer than the one that is kept. An empty bound bounds nothing.
local function note_quota(tenant, revision, sandboxes, cpu_milli, memory_bytes, interval_ms)
  if tonumber(revision) <= tonumber(redis.call('HGET', tenant_key(tenant), 'revision') or '0') then return end
  redis.call('HSET', tenant_key(tenant), 'revision', revision, 'sandboxes', sandboxes, 'cpu_milli', cpu_milli, 'memory_bytes',
    memory_bytes, 'interval_ms', interval_ms)
  if redis.call('ZSCORE', PARKED, tenant) then
    redis.call('ZADD', PARKED, NEVER, tenant)
    unpark(tenant)
  end
end

local function finish(tenant, id, state, reason, message, now)
  local key, name = record_key(tenant, id), member(tenant, id)
  redis.call('HSET', key, 'state', state, 'reason', reason, 'message', message, 'end_ms', text(now))
  redis.call('ZREM', LEASES, name)
  redis.call('ZREM', CLAIMED, name)
  if count(tenant, key, '0') then unpark(tenant) end
  leave_queue(tenant, id)
  redis.call('ZADD', ENDED, text(now), name)
  changed(tenant, id)
end
