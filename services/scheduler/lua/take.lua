-- ARGV: claim_ms. Takes the next create: one whose claim ran out, or the first of the tenant whose turn it is. When there are both,
-- one of each kind by turns: creates that the runtime refuses again and again must not keep the others from starting.
-- Returns {tenant, id, the record as field, value, ...}, or {} when nothing waits; an empty id means: take again.
local now = now_ms()
local tenant, id
local stale = redis.call('ZRANGEBYSCORE', CLAIMED, '-inf', text(now), 'LIMIT', 0, 1)
if stale[1] and (redis.call('EXISTS', TURNS) == 0 or redis.call('INCR', 'orchard:takes') % 2 == 0) then
  tenant, id = split(stale[1])
else
  tenant = redis.call('LPOP', TURNS)
  if not tenant then return {} end
  local first = redis.call('ZPOPMIN', queue_key(tenant))
  if redis.call('ZCARD', queue_key(tenant)) > 0 then redis.call('RPUSH', TURNS, tenant) end
  id = first[1]
  if not id then return {} end
end
local key = record_key(tenant, id)
local state = redis.call('HGET', key, 'state')
if state ~= QUEUED and state ~= STARTING then
  redis.call('ZREM', CLAIMED, member(tenant, id))
  return {tenant, ''}
end
redis.call('ZADD', CLAIMED, text(now + tonumber(ARGV[1])), member(tenant, id))
if state == QUEUED then
  redis.call('HSET', key, 'state', STARTING, 'start_ms', text(now))
  changed(tenant, id)
end
return {tenant, id, redis.call('HGETALL', key)}
