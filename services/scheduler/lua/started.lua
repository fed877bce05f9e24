-- ARGV: tenant, id, request_id, uid, create_ms. The runtime accepted the sandbox. Returns {outcome, expire_ms}: started; missing (the
-- store was emptied or lost its last moments meanwhile, and the record is to be made anew); unwanted (deleted, ended or replaced meanwhile).
local tenant, id = ARGV[1], ARGV[2]
local key = record_key(tenant, id)
local r = redis.call('HMGET', key, 'state', 'request_id', 'uid', 'expire_ms', 'create_ms')
if not r[1] then return {'missing', '0'} end
if r[2] ~= ARGV[3] then
  local before = is_terminal(r[1]) and tonumber(r[5]) < tonumber(ARGV[5])
  return {before and 'missing' or 'unwanted', '0'}
end
redis.call('ZREM', CLAIMED, member(tenant, id))
if r[3] == '' then redis.call('HSET', key, 'uid', ARGV[4]) end
if is_terminal(r[1]) or r[1] == DELETING then return {'unwanted', r[4]} end
return {'started', r[4]}
