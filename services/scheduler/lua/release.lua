-- ARGV: tenant, id, request_id, delay_ms, message. A start failed for now: lets the claimed create be taken again after the delay, or
-- ends it when its start timeout is over. Returns 1 if it was ended.
local tenant, id = ARGV[1], ARGV[2]
local key = record_key(tenant, id)
local r = redis.call('HMGET', key, 'request_id', 'state', 'start_ms', 'start_timeout_ms', 'message')
if r[1] ~= ARGV[3] or r[2] ~= STARTING or not redis.call('ZSCORE', CLAIMED, member(tenant, id)) then return 0 end
local now = now_ms()
if now > tonumber(r[3]) + tonumber(r[4]) then
  finish(tenant, id, FAILED, REASON_UNSCHEDULABLE, 'it could not be started within its start timeout; last: ' .. ARGV[5], now)
  return 1
end
redis.call('ZADD', CLAIMED, text(now + tonumber(ARGV[4])), member(tenant, id))
if r[5] ~= ARGV[5] then
  redis.call('HSET', key, 'message', ARGV[5])
  changed(tenant, id)
end
return 0
