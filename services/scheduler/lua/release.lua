-- ARGV: tenant, id, delay_ms. Lets a claimed create be taken again after the delay.
if redis.call('ZSCORE', CLAIMED, member(ARGV[1], ARGV[2])) then
  redis.call('ZADD', CLAIMED, text(now_ms() + tonumber(ARGV[3])), member(ARGV[1], ARGV[2]))
end
return 1
