-- Shared by every script; the store puts it in front of each. Scripts alone change records and leases, so a change is whole
-- or not at all and nothing is read in one call and written in another. Times are milliseconds of the server's own clock.
local QUEUED, STARTING, READY, DELETING, DELETED, FAILED = '1', '2', '3', '4', '5', '6'
local REASON_NONE, REASON_REQUESTED, REASON_EXPIRED, REASON_UNSCHEDULABLE, REASON_EXTERNAL = '0', '1', '2', '4', '12'
local KEPT_MS = 86400000 -- terminal records and request ids are kept 24 h
local IDLE_SLACK_MS = 10000 -- two of the gateways' reports of activity: one may be late or lost without ending what is in use

local LEASES = 'orchard:leases'   -- "<tenant>/<id>" of every record that is not terminal, by deadline
local CLAIMED = 'orchard:claimed' -- "<tenant>/<id>" taken from the queue and not yet started, by when it may be taken again
local ENDED = 'orchard:ended'     -- "<tenant>/<id>" of terminal records, by end
local TURNS = 'orchard:turns'     -- tenants with queued creates, in the order of their turns
local CHANGES = 'orchard:changes' -- channel: "<tenant>/<id>" of each changed record

local function record_key(tenant, id) return 'orchard:sandbox:' .. tenant .. ':' .. id end
local function request_key(tenant, request_id) return 'orchard:request:' .. tenant .. ':' .. request_id end
local function queue_key(tenant) return 'orchard:queue:' .. tenant end
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

-- Take a tenant out of the turns when nothing of it is queued any more.
local function leave_queue(tenant, id)
  redis.call('ZREM', queue_key(tenant), id)
  if redis.call('ZCARD', queue_key(tenant)) == 0 then redis.call('LREM', TURNS, 0, tenant) end
end

local function finish(tenant, id, state, reason, message, now)
  local key, name = record_key(tenant, id), member(tenant, id)
  redis.call('HSET', key, 'state', state, 'reason', reason, 'message', message, 'end_ms', text(now))
  redis.call('ZREM', LEASES, name)
  redis.call('ZREM', CLAIMED, name)
  leave_queue(tenant, id)
  redis.call('ZADD', ENDED, text(now), name)
  changed(tenant, id)
end
