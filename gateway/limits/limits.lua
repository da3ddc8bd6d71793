-- Leases in Redis. Each call is atomic; the clock is the server's. Commands of Redis 6.2 and nothing newer.
--
-- KEYS: of each scope its buckets (a hash) and its leases (a sorted set, by the second in which they expire).
-- A bucket is kept as what is taken of it, when that was so, its limit and its window then: four doubles. What is
-- not kept is full. Limits come packed by msgpack, of each scope {how many leases it may hold, or -1; its buckets
-- as {field, limit, seconds, each, weight, saved}}: a lease takes `each` and `weight` a token, and in the
-- settlement a cached token counts `saved` less.
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000

-- What is taken of each of a scope's buckets by now, of which limit, in which window.
local function read(key, buckets)
  local fields, states = {}, {}
  for b, bucket in ipairs(buckets) do fields[b] = bucket[1] end
  if #fields == 0 then return states end
  for b, kept in ipairs(redis.call('HMGET', key, unpack(fields))) do
    local state = { taken = 0, limit = buckets[b][2], window = buckets[b][3] }
    if kept then
      local taken, at, limit, window = struct.unpack('<dddd', kept)
      local refilled = math.max(0, now - at) * limit / window
      state = { taken = math.max(0, taken - refilled), limit = limit, window = window }
    end
    states[b] = state
  end
  return states
end

local function keep(key, buckets, states)
  local values, longest = {}, 0
  for b, state in ipairs(states) do
    values[#values + 1] = buckets[b][1]
    values[#values + 1] = struct.pack('<dddd', state.taken, now, state.limit, state.window)
    longest = math.max(longest, state.taken / state.limit * state.window)
  end
  if #values == 0 then return end
  redis.call('HSET', key, unpack(values))
  -- A full bucket need not be kept.
  local left = math.ceil(longest * 1000) + 1
  if redis.call('PTTL', key) < left then redis.call('PEXPIRE', key, left) end
end

local function hold(key, seconds, leases)
  local members = {}
  for _, lease in ipairs(leases) do
    members[#members + 1] = now + seconds
    members[#members + 1] = lease
  end
  redis.call('ZADD', key, unpack(members))
  redis.call('PEXPIRE', key, math.ceil(seconds * 1000) + 1000)
end

local op = {}

-- ARGV: lease, tokens, seconds until it expires, limits.
-- Returns {1, what is left of each bucket} or {0, the scope that is full or 0, what is left}, in millionths.
function op.reserve(lease, tokens, seconds, limits)
  local scopes, full, short, left, all = cmsgpack.unpack(limits), 0, false, {}, {}
  for s, scope in ipairs(scopes) do
    redis.call('ZREMRANGEBYSCORE', KEYS[2 * s], '-inf', now)
    if full == 0 and scope[1] >= 0 and redis.call('ZCARD', KEYS[2 * s]) >= scope[1] then full = s end
    all[s] = read(KEYS[2 * s - 1], scope[2])
    for b, bucket in ipairs(scope[2]) do
      local state, limit, amount = all[s][b], bucket[2], bucket[4] + tokens * bucket[5]
      -- Of an edited limit the same share is taken.
      if state.limit ~= limit then state.taken = state.taken / state.limit * limit end
      state.limit, state.window = limit, bucket[3]
      if limit - state.taken < amount then short = true end
      left[#left + 1] = { limit - state.taken, amount }
      state.taken = state.taken + amount
    end
  end
  local refused = full > 0 or short
  local reply = refused and { 0, full } or { 1 }
  for _, bucket in ipairs(left) do
    reply[#reply + 1] = math.floor((bucket[1] - (refused and 0 or bucket[2])) * 1000000)
  end
  if refused then return reply end
  for s, scope in ipairs(scopes) do
    keep(KEYS[2 * s - 1], scope[2], all[s])
    hold(KEYS[2 * s], seconds, { lease })
  end
  return reply
end

-- ARGV: lease, tokens that it reserved, tokens that were used, cached ones among them, its limits, and those of
-- the tier that answered where it was another. Returns 1, or 0 for a lease that is not there: nothing is changed.
function op.settle(lease, reserved, used, cached, limits, others)
  if redis.call('ZREM', KEYS[2], lease) == 0 then return 0 end
  for s = 2, #KEYS / 2 do redis.call('ZREM', KEYS[2 * s], lease) end
  local function charge(packed, given, taking)
    for s, scope in ipairs(cmsgpack.unpack(packed)) do
      local states = read(KEYS[2 * s - 1], scope[2])
      for b, bucket in ipairs(scope[2]) do
        local change = taking * (used * bucket[5] - cached * bucket[6]) - given * bucket[5]
        states[b].taken = math.max(0, states[b].taken + change / bucket[2] * states[b].limit)
      end
      keep(KEYS[2 * s - 1], scope[2], states)
    end
  end
  if others == '' then
    charge(limits, reserved, 1)
  else
    -- First what was taken: what was refilled meanwhile must not be lost to a full bucket.
    charge(others, 0, 1)
    charge(limits, reserved, 0)
  end
  return 1
end

-- KEYS: one scope's leases. ARGV: seconds until they expire, and the leases.
function op.renew(seconds, ...)
  hold(KEYS[1], tonumber(seconds), { ... })
  return 1
end

-- KEYS: the processes. ARGV: this one, seconds until it counts as gone.
-- Returns {how many there are, how many of them sort before this one}.
function op.beat(process, seconds)
  redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
  hold(KEYS[1], seconds, { process })
  local before = 0
  for _, other in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
    if other < process then before = before + 1 end
  end
  return { redis.call('ZCARD', KEYS[1]), before }
end

return op[ARGV[1]](unpack(ARGV, 2))
