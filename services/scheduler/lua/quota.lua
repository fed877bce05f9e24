-- ARGV: of each tenant its name and its quota as for note_quota.
for i = 1, #ARGV, 6 do note_quota(ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3], ARGV[i + 4], ARGV[i + 5]) end
return #ARGV / 6
