-- ARGV: limit. Forgets terminal records older than they are kept.
local old = redis.call('ZRANGEBYSCORE', ENDED, '-inf', text(now_ms() - KEPT_MS), 'LIMIT', 0, ARGV[1])
for _, name in ipairs(old) do
  local tenant, id = split(name)
  redis.call('DEL', record_key(tenant, id))
  redis.call('ZREM', index_key(tenant), id)
  redis.call('ZREM', ENDED, name)
end
return #old
