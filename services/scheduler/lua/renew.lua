-- ARGV: field (last_heartbeat_ms or last_active_ms), then tenant, id, uid or '' of each. Returns the names that are not alive.
local now = now_ms()
local missing = {}
for i = 2, #ARGV, 3 do
  local tenant, id = ARGV[i], ARGV[i + 1]
  local key = record_key(tenant, id)
  local r = redis.call('HMGET', key, 'state', 'uid')
  if not r[1] or is_terminal(r[1]) or r[1] == DELETING or (ARGV[i + 2] ~= '' and r[2] ~= ARGV[i + 2]) then
    missing[#missing + 1] = member(tenant, id)
  else
    redis.call('HSET', key, ARGV[1], text(now))
    lease(tenant, id)
  end
end
return missing
