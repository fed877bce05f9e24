-- ARGV: tenant, id, request_id, state, reason, message. Ends a record unless it has ended or is another create's.
local r = redis.call('HMGET', record_key(ARGV[1], ARGV[2]), 'state', 'request_id')
if not r[1] or r[2] ~= ARGV[3] or is_terminal(r[1]) then return 0 end
finish(ARGV[1], ARGV[2], ARGV[4], ARGV[5], ARGV[6], now_ms())
return 1
