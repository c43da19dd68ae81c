-- What the server does for the Redis engine. One script with a verb, so that a call that decides and a call
-- that reads agree on what an entry looks like.
--
-- KEYS[1] is the hash of a namespace's entries; the names of its other keys begin as it does. ARGV is the verb, the
-- prefix of the keys that hold records, and what the verb needs.
--
-- The verb commit does what limpet.transition.plan does, and a test holds it to that. It moves the bytes of
-- values and never looks into them.
--
-- An entry is its head, its meta and its value. The head is version, revision, created_revision, created_ms,
-- updated_ms and expires_ms (0 for never) as numbers of eight bytes, size as one of four, the length of the meta
-- as one of two, and a letter: j for JSON, b for bytes, r for a record. The fields of a record are a hash of their
-- own, so that HGETALL shows them.
--
-- The tally is what is counted of a namespace, in the field of the same hash that has no name: revision, floor, time
-- of the last commit, keys and their bytes, changes in the log and their bytes as numbers of eight bytes, two bytes that
-- tell whether requests may come late and whether there are indexes, and the replication id of the server.
--
-- The log is a stream. The changes of one call are one item of it, whose id is the revision of the last. It begins
-- with the time. Then come pairs: a label and an entry for each change, where a label is
--     op revision commit_revision family cause_bytes cause key
-- without the last space, for a cause may hold spaces. Plain puts are told in less: the word puts with the name of
-- their call, then a key and an entry for each. Their revisions and causes count up to those of the last.
--
-- A server runs all of a script from its first line at each call. So what is asked most is answered first, before
-- the functions for the rest are made.

local call = redis.call
local format, match, sub = string.format, string.match, string.sub
local HEAD, HEAD_BYTES = '>I8I8I8I8I8I8I4I2B', 55
local JSON, RECORD = 106, 114
local TALLY, TALLY_BYTES = '>I8I8I8I8I8I8I8BB', 58
local data_key, base = KEYS[1], sub(KEYS[1], 1, -5)
local prefix = ARGV[2]
local log_key = base .. 'log'

local function now_ms()
    local time = call('TIME')
    return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- The tally --------------------------------------------------------------------------------------------------
--
-- The time of a namespace is the server's clock, or the latest time that was recorded there if that is later: for what
-- reads as for what commits. So after a step back of the clock time stands still, and what has expired stays so.

local tally = {}

local function read_tally(packed)
    if not packed then
        return false
    end
    tally.revision, tally.floor, tally.at_ms, tally.keys, tally.bytes, tally.changes, tally.log_bytes, tally.late,
        tally.indexed = struct.unpack(TALLY, packed)
    tally.server = sub(packed, TALLY_BYTES + 1)
    return true
end

local function load_tally()
    return read_tally(call('HGET', data_key, ''))
end

local function new_tally(server)
    tally.revision, tally.floor, tally.at_ms, tally.keys, tally.bytes, tally.changes = 0, 0, 0, 0, 0, 0
    tally.log_bytes, tally.late, tally.server = 0, 0, server
    tally.indexed = call('EXISTS', base .. 'indexes')
end

local function packed_tally()
    return struct.pack(TALLY, tally.revision, tally.floor, tally.at_ms, tally.keys, tally.bytes, tally.changes,
        tally.log_bytes, tally.late, tally.indexed) .. tally.server
end

local function time_ms()
    return math.max(tally.at_ms, now_ms())
end

-- Make ready to decide, by the tally that was found; or what keeps this call from that.
local function begin(packed)
    local server, seen = ARGV[3], tonumber(ARGV[4])
    if not read_tally(packed) then
        new_tally(server)
    end
    if tally.server ~= server or tally.revision < seen then
        return {'lost', tally.revision}
    end
    tally.at_ms = time_ms()
end

-- The short way of plain puts: JSON values, never to expire, without meta or guard ---------------------------
--
-- Nothing is built for them that they do not need, and they are written by one command. Nothing is done where one
-- of them meets an entry that expires, a record, or a Redis key that is not ours, or where there are indexes: then all
-- go the long way.

local plain_keys, plain_values

local function put_plainly(found, group)
    local keys, values, held = plain_keys, plain_values, {}
    local first, now = tally.revision, tally.at_ms
    local answer, entries, fresh, places = {}, {}, {}, {}
    local fresh_bytes, changed_bytes, told_bytes = 0, 0, 0
    for i = 1, #keys do
        local key, value = keys[i], values[i]
        local old, size = held[key] or found[i + 1], #value
        local version, created, created_ms = 1, first + i, now
        if old then
            local _, expires_ms, old_size, kind
            version, _, created, created_ms, _, expires_ms, old_size, _, kind = struct.unpack(HEAD, old)
            if expires_ms > 0 or kind == RECORD then
                return nil
            end
            version, changed_bytes = version + 1, changed_bytes + size - old_size
        else
            fresh[#fresh + 1] = 0
            fresh[#fresh + 1] = key
            places[#places + 1] = prefix .. key
            fresh_bytes = fresh_bytes + #key + size
        end
        local entry = struct.pack(HEAD, version, first + i, created, created_ms, now, 0, size, 0, JSON) .. value
        held[key], entries[2 * i - 1], entries[2 * i] = entry, key, entry
        answer[3 * i - 2], answer[3 * i - 1], answer[3 * i] = version, created, created_ms
        told_bytes = told_bytes + #key + size
    end
    if #places > 0 and call('EXISTS', unpack(places)) > 0 then
        return nil
    end
    tally.revision = first + #keys
    tally.keys, tally.bytes = tally.keys + #fresh / 2, tally.bytes + fresh_bytes + changed_bytes
    tally.changes, tally.log_bytes = tally.changes + #keys, tally.log_bytes + told_bytes
    -- The log goes first: whatever somebody else may have put in its place, nothing is done then.
    call('XADD', log_key, format('%d-0', tally.revision), 'at', format('%d', now), 'puts', group, unpack(entries))
    call('HSET', data_key, '', packed_tally(), unpack(entries))
    if #fresh > 0 then
        call('ZADD', base .. 'data:keys', unpack(fresh))
    end
    return {'put', now, first, cmsgpack.pack(answer)}
end

if ARGV[1] == 'put' then
    plain_keys, plain_values = unpack(cmsgpack.unpack(ARGV[6]))
    local found = call('HMGET', data_key, '', unpack(plain_keys))
    local answer = begin(found[1]) or tally.late + tally.indexed == 0 and put_plainly(found, ARGV[5])
    if answer then
        return answer
    end
end

-- Entries ----------------------------------------------------------------------------------------------------

local due_key, late_key, gaps_key, floor_key = base .. 'due', base .. 'late', base .. 'gaps', base .. 'floor'

local function parse(key, packed)
    local version, revision, created, created_ms, updated_ms, expires_ms, size, meta_bytes, kind =
        struct.unpack(HEAD, packed)
    local value_at = HEAD_BYTES + meta_bytes + 1
    return {
        key = key, version = version, revision = revision, created = created, created_ms = created_ms,
        updated_ms = updated_ms, expires_ms = expires_ms, size = size, kind = string.char(kind),
        meta = sub(packed, HEAD_BYTES + 1, value_at - 1), value = sub(packed, value_at),
    }
end

local function head(entry)
    return struct.pack(HEAD, entry.version, entry.revision, entry.created, entry.created_ms, entry.updated_ms,
        entry.expires_ms, entry.size, #entry.meta, string.byte(entry.kind)) .. entry.meta
end

local function save_tally()
    call('HSET', data_key, '', packed_tally())
end

local function find(family, key)
    local packed = call('HGET', base .. family, key)
    return packed and parse(key, packed)
end

local function live(entry, at_ms)
    return entry and (entry.expires_ms == 0 or entry.expires_ms > at_ms) and entry
end

-- The time of a call that only reads, taken once; and whether it saw something expire later than what is recorded.
local read_ms, has_tally, saw_expiry

local function reading_ms()
    if not read_ms then
        has_tally = load_tally()
        if not has_tally then
            new_tally('')
        end
        read_ms = time_ms()
    end
    return read_ms
end

local function is_over(expires_ms)
    if expires_ms == 0 or expires_ms > reading_ms() then
        return false
    end
    saw_expiry = saw_expiry or expires_ms > tally.at_ms
    return true
end

-- What a reader has seen expire must not come back when the clock is set back, so the time is recorded. Where nothing
-- can be written, because the user may only read or the memory is full, the answer is the same without it.
local function record_time()
    if saw_expiry and has_tally then
        tally.at_ms = read_ms
        redis.pcall('HSET', data_key, '', packed_tally())
    end
end

-- The fields of a record as one text: each name and each field after its length.
local function framed(fields)
    local parts = {}
    for i = 1, #fields do
        parts[2 * i - 1], parts[2 * i] = #fields[i] .. ':', fields[i]
    end
    return table.concat(parts)
end

-- Whether the caller of the batch that is decided has no use for the fields of records.
local is_brief = false

-- An entry whole, as a caller is shown it.
local function shown(entry)
    if entry.kind == 'r' then
        return head(entry) .. framed(entry.fields or call('HGETALL', prefix .. entry.key))
    end
    return head(entry) .. entry.value
end

-- An entry as a refusal tells it.
local function told_of(entry)
    if not entry then
        return false
    end
    return is_brief and entry.kind == 'r' and head(entry) or shown(entry)
end

-- What a field counts against the limits. A zero byte in front is ours.
local function field_size(field)
    return #field - (string.byte(field) == 0 and 1 or 0)
end

-- The unpacker of a batch knows text alone. In the place of other bytes stands which of those beside it they are.
local function bytes(item)
    return type(item) == 'number' and ARGV[6 + item] or item
end

local function bytes_of_all(items)
    for i = 1, #items do
        items[i] = bytes(items[i])
    end
    return items
end

-- Indexes ----------------------------------------------------------------------------------------------------
--
-- A field of a record is in one of two sorted sets: among the numbers by its value, or among the texts by the first
-- bytes of itself, a zero byte and the key. JSON is never looked into: objects are found by every search.

local indexes_key, objects_key = base .. 'indexes', base .. 'index:objects'
local TEXT_MAX, DIGITS_MAX = 64, 200
local indexed_fields

local function numbers_of(field)
    return base .. 'index:n:' .. field
end

local function texts_of(field)
    return base .. 'index:t:' .. field
end

local function number_in(wire)
    if string.byte(wire) == 0 then
        local text = sub(wire, 2)
        return match(text, '^%-?%d[%d%.eE+-]*$') and tonumber(text)
    end
    return #match(wire, '^%-?(%d*)') <= DIGITS_MAX and match(wire, '^%-?%d+$') and tonumber(wire)
end

local function index_field(field, key, is_there)
    -- What somebody else may have put in the place of a record has no fields.
    local wire = redis.pcall('HGET', prefix .. key, field)
    local number = type(wire) == 'string' and number_in(wire)
    if not is_there then
        call('ZREM', numbers_of(field), key)
        if type(wire) == 'string' and not number then
            call('ZREM', texts_of(field), sub(wire, 1, TEXT_MAX) .. '\0' .. key)
        end
    elseif number then
        call('ZADD', numbers_of(field), format('%.17g', number), key)
    elseif type(wire) == 'string' then
        call('ZADD', texts_of(field), 0, sub(wire, 1, TEXT_MAX) .. '\0' .. key)
    end
end

-- Bring an entry into the indexes, or take it out before anything of it changes.
local function index_entry(family, entry, is_there)
    if tally.indexed == 0 or family ~= 'data' then
        return
    end
    indexed_fields = indexed_fields or call('HKEYS', indexes_key)
    if entry.kind == 'r' then
        for i = 1, #indexed_fields do
            index_field(indexed_fields[i], entry.key, is_there)
        end
    elseif is_there and string.byte(entry.value) == 123 then
        call('ZADD', objects_key, 0, entry.key)
    elseif not is_there then
        call('ZREM', objects_key, entry.key)
    end
end

-- Guards -----------------------------------------------------------------------------------------------------

local function equals(entry, kind, value)
    if entry.kind ~= kind then
        return false
    elseif kind ~= 'r' then
        return entry.value == bytes(value)
    end
    bytes_of_all(value)
    local fields = call('HGETALL', prefix .. entry.key)
    if #fields ~= #value then
        return false
    end
    local held = {}
    for i = 1, #fields, 2 do
        held[fields[i]] = fields[i + 1]
    end
    for i = 1, #value, 2 do
        if held[value[i]] ~= value[i + 1] then
            return false
        end
    end
    return true
end

-- Whether a guard is met: true, false, or nil where that takes a look into a value.
local function holds(test, entry, operand, name)
    if not entry then
        return test == 'absent'
    elseif test == 'absent' then
        return false
    elseif test == 'present' then
        return true
    elseif test == 'revision' then
        return entry.revision == operand
    elseif test == 'version' then
        return entry.version == operand
    elseif test == 'held' then
        return entry.created == operand
    elseif test == 'equals' then
        return equals(entry, operand, name)
    elseif entry.kind == 'r' then
        return call('HGET', prefix .. entry.key, name) == bytes(operand)
    elseif entry.kind == 'j' then
        return nil
    end
    return operand == false
end

-- Writes -----------------------------------------------------------------------------------------------------

local KEEP, NEVER = -1, -2

local function refuse(reason, entry, needs, size)
    return nil, {'refused', reason, told_of(entry), needs or '', size or 0}
end

-- The entry that a value-making write leaves: kind, size and value come from the caller.
local function written(key, current, now, revision, ttl, meta)
    local entry = {key = key, revision = revision, updated_ms = now}
    if current then
        entry.version, entry.created, entry.created_ms = current.version + 1, current.created, current.created_ms
    else
        entry.version, entry.created, entry.created_ms = 1, revision, now
    end
    if ttl == KEEP then
        entry.expires_ms = current and current.expires_ms or 0
    else
        entry.expires_ms = ttl == NEVER and 0 or now + ttl
    end
    if meta == true then
        entry.meta = current and current.meta or ''
    else
        entry.meta = meta
    end
    return entry
end

-- Redis adds with 64 bits, where a number of this script has 53.
local function sum(text, by)
    local key = base .. 'sum'
    call('SET', key, text)
    local answer = redis.pcall('INCRBY', key, by)
    local total = type(answer) == 'number' and call('GET', key)
    call('DEL', key)
    return total
end

-- Each returns the entry after it, or nil and a refusal. w is a write: its op, family, key and the rest.
local make = {}

function make.put(w, current, now, revision)
    local entry = written(w[3], current, now, revision, w[7], w[8])
    entry.kind, entry.size = w[4], w[6]
    if entry.kind == 'r' then
        entry.fields, entry.value = bytes_of_all(w[5]), ''
    else
        entry.value = bytes(w[5])
    end
    return entry
end

function make.add(w, current, now, revision)
    local number = '0'
    if current then
        if current.kind ~= 'j' or not match(current.value, '^%-?%d+$') then
            return refuse('type', current, 'an integer')
        end
        number = current.value
    end
    local total = sum(number, w[4])
    if not total then
        return refuse('overflow', current)
    end
    local entry = written(w[3], current, now, revision, w[5], w[6])
    entry.kind, entry.value, entry.size = 'j', total, #total
    return entry
end

function make.patch(w, current, now, revision)
    local fields, unset, must_exist, most = bytes_of_all(w[4]), w[5], w[6], w[7]
    if not current then
        if must_exist then
            return refuse('missing', nil)
        end
    elseif current.kind ~= 'r' then
        return refuse('type', current, 'a record')
    end
    local hash, size = prefix .. w[3], current and current.size or 0
    local function forget(name)
        local old = current and call('HGET', hash, name)
        if old then
            size = size - #name - field_size(old)
        end
    end
    for i = 1, #unset do
        forget(unset[i])
    end
    for i = 1, #fields, 2 do
        forget(fields[i])
        size = size + #fields[i] + field_size(fields[i + 1])
    end
    if size > most then
        return refuse('size', current, '', size)
    end
    local entry = written(w[3], current, now, revision, w[8], w[9])
    entry.kind, entry.value, entry.size = 'r', '', size
    entry.patch, entry.unset = fields, unset
    return entry
end

-- Applying ---------------------------------------------------------------------------------------------------

-- HSET takes its arguments from the stack, which holds some thousands.
local function set_fields(hash, fields)
    for first = 1, #fields, 1000 do
        call('HSET', hash, unpack(fields, first, math.min(first + 999, #fields)))
    end
end

local function end_entry(family, entry)
    index_entry(family, entry, false)
    call('HDEL', base .. family, entry.key)
    call('ZREM', base .. family .. ':keys', entry.key)
    if entry.expires_ms > 0 then
        call('ZREM', due_key, family .. ':' .. entry.key)
    end
    if entry.kind == 'r' then
        call('DEL', prefix .. entry.key)
    end
    if family == 'data' then
        tally.keys, tally.bytes = tally.keys - 1, tally.bytes - #entry.key - entry.size
    end
end

local function set_entry(family, entry, stored)
    local key = entry.key
    if stored then
        index_entry(family, stored, false)
    end
    if entry.patch then
        if not stored then
            call('DEL', prefix .. key)
        end
        for i = 1, #entry.unset do
            call('HDEL', prefix .. key, entry.unset[i])
        end
        set_fields(prefix .. key, entry.patch)
    elseif entry.kind == 'r' and entry.fields then
        call('DEL', prefix .. key)
        set_fields(prefix .. key, entry.fields)
    elseif stored and stored.kind == 'r' and entry.kind ~= 'r' then
        call('DEL', prefix .. key)
    end
    call('HSET', base .. family, key, head(entry) .. entry.value)
    if not stored then
        call('ZADD', base .. family .. ':keys', 0, key)
    end
    if entry.expires_ms > 0 then
        call('ZADD', due_key, entry.expires_ms, family .. ':' .. key)
    elseif stored and stored.expires_ms > 0 then
        call('ZREM', due_key, family .. ':' .. key)
    end
    if family == 'data' then
        if stored then
            tally.keys, tally.bytes = tally.keys - 1, tally.bytes - #key - stored.size
        end
        tally.keys, tally.bytes = tally.keys + 1, tally.bytes + #key + entry.size
    end
    index_entry(family, entry, true)
end

-- What this call has to tell, until it is written.
local told, told_to = {}, 0

local function write_log(now)
    if #told > 0 then
        call('XADD', log_key, format('%d-0', told_to), 'at', now, unpack(told))
        told = {}
    end
end

local function tell(change, last, now)
    local cause, size = change.cause or '', #change.key + (change.size or 0)
    local label = format('%s %d %d %s %d ', change.op, change.revision, last, change.family, #cause)
    told[#told + 1] = label .. cause .. change.key
    told[#told + 1] = change.entry
    told_to = change.revision
    tally.changes, tally.log_bytes = tally.changes + 1, tally.log_bytes + size
    if #told >= 1000 then
        write_log(now)
    end
end

-- Items of the log after a revision, handed to see until it has seen enough.
local function each_told(after, see)
    local first = after == 0 and '-' or format('(%d-0', after)
    while true do
        local items = call('XRANGE', log_key, first, '+', 'COUNT', 50)
        for i = 1, #items do
            if see(items[i][2], tonumber(match(items[i][1], '^%d+'))) then
                return true
            end
        end
        if #items < 50 then
            return false
        end
        first = '(' .. items[#items][1]
    end
end

-- The changes of an item, handed to see until it has seen enough: label, entry, revision, cause, key and op. All of
-- them, or those from a place on.
local function each_change(item, last, see, place)
    local plain = item[3] == 'puts' and item[4]
    for i = place or plain and 5 or 3, #item, 2 do
        local label, entry = item[i], item[i + 1]
        local op, revision, cause, key
        if plain then
            op, key, cause = 'put', label, format('%s.%d', plain, (i - 3) / 2)
            revision = last - (#item - 1 - i) / 2
            label = format('put %d %d data %d ', revision, revision, #cause) .. cause .. key
        else
            local cause_bytes, at
            op, revision, cause_bytes, at = match(label, '^(%a+) (%d+) %d+ %a+ (%d+) ()')
            cause, key = sub(label, at, at + cause_bytes - 1), sub(label, at + cause_bytes)
        end
        if see(label, entry, tonumber(revision), cause, key, op) then
            return true
        end
    end
    return false
end

-- The change at a revision, or the last one before it: its label, its head and its time. Where the log has none, the
-- one at the floor, of which this much is kept.
local function told_at(revision)
    local found = false
    local function look(items)
        if #items > 0 then
            local item, last = items[1][2], tonumber(match(items[1][1], '^%d+'))
            each_change(item, last, function(label, entry, its_revision)
                if its_revision > revision then
                    return true
                end
                found = {label, sub(entry, 1, HEAD_BYTES), item[2]}
            end, last <= revision and #item - 1)
        end
    end
    -- The changes of one call are one item, which may begin before the revision and end after it.
    look(call('XRANGE', log_key, format('(%d-0', revision), '+', 'COUNT', 1))
    if not found then
        look(call('XREVRANGE', log_key, format('%d-0', revision), '-', 'COUNT', 1))
    end
    if not found then
        local kept = call('GET', floor_key)
        found = kept and cmsgpack.unpack(kept)
    end
    return found
end

-- Deciding ---------------------------------------------------------------------------------------------------

-- What a batch did when it was asked for the first time, by the name of its changes.
local function earlier(since, cause)
    local found = {}
    each_told(since, function(item, last)
        each_change(item, last, function(label, entry, _, its_cause)
            if its_cause == cause then
                found[#found + 1] = {label, entry, item[2]}
            end
        end)
    end)
    return found
end

-- A write that is accepted: what it makes, and the changes that tell of it.
local function decide(w, now, revision, cause, changes)
    local op, family, key = w[1], w[2], w[3]
    local stored = find(family, key)
    local current = live(stored, now)
    local step = {family = family, stored = stored}
    if current and current.kind == 'r' and (op == 'patch' or op == 'touch') then
        -- Whatever somebody else may have put in the place of a record, it must fail before anything is written.
        call('HLEN', prefix .. key)
    end
    local function change(of, kind, text, size, who)
        changes[#changes + 1] = {
            op = kind, family = family, key = key, revision = of, cause = who, entry = text, size = size,
        }
    end
    if make[op] then
        if stored and not current then
            revision = revision + 1
            change(revision, 'expire', head(stored), 0)
            step.ended = stored
        end
        revision = revision + 1
        local entry, refusal = make[op](w, current, now, revision)
        if not entry then
            return nil, refusal
        end
        -- A Redis key is ours as long as there is an entry of a record. Another program's must not be lost, and a
        -- value beside it would hide it from its owner.
        if not (stored and stored.kind == 'r') and (entry.kind == 'r' or family == 'data' and not stored) then
            local found = call('TYPE', prefix .. key).ok
            if found ~= 'none' then
                return nil, {'foreign', prefix .. key, found, key}
            end
        end
        step.after = entry
        change(revision, op == 'patch' and 'patch' or 'put', nil, entry.size, cause)
        step.change = changes[#changes]
    elseif op == 'touch' then
        if current then
            revision = revision + 1
            local after = {}
            for name, item in pairs(current) do
                after[name] = item
            end
            after.revision, after.expires_ms = revision, w[4] == NEVER and 0 or now + w[4]
            step.after = after
            change(revision, 'touch', head(after), after.size, cause)
        end
    elseif op == 'delete' then
        if current then
            revision = revision + 1
            step.before = w[4] and shown(current) or head(current)
            step.ended, step.is_taken = current, w[4]
            change(revision, w[4] and 'take' or 'delete', step.before, w[4] and current.size or 0, cause)
        end
    elseif stored and not current and stored.revision == w[4] then
        revision = revision + 1
        step.before, step.ended = head(stored), stored
        change(revision, 'expire', step.before, 0)
    end
    return step, revision
end

local function apply(step)
    if step.ended then
        end_entry(step.family, step.ended)
        step.stored = false
    end
    if step.after then
        set_entry(step.family, step.after, step.stored)
        step.text = shown(step.after)
        if step.change then
            step.change.entry = step.text
        end
    end
end

-- What is remembered of a request: its digest, when it was done, its revision, until when it is remembered, and
-- a key with an answer for each write. Redis may end it by itself, for nobody hears of that.
local function kept_receipt(key, now)
    local kept = call('LRANGE', key, 0, -1)
    return #kept > 0 and tonumber(kept[4]) > now and kept
end

local function keep_receipt(key, receipt_ms, digest, now, writes, answer)
    call('DEL', key)
    call('RPUSH', key, digest, now, answer[2], now + receipt_ms)
    for i = 1, #writes do
        call('RPUSH', key, writes[i][3], answer[i + 2])
    end
    call('PEXPIRE', key, receipt_ms)
end

-- One batch: the digest and the time of its receipt, its own name, the name of its changes, since when it may
-- have been done already and in which call, its guards, its writes, and whether its answer is to be brief.
local function commit(batch, now)
    local digest, receipt_ms, request, cause, since, group, guards, writes, brief = unpack(batch)
    is_brief = brief
    local receipt_key = base .. 'receipt:' .. request
    if since >= 0 then
        local found = earlier(since, cause)
        if #found > 0 then
            return {'again', unpack(found)}
        end
    end
    if receipt_ms > 0 then
        local kept = kept_receipt(receipt_key, now)
        if kept then
            return {'seen', unpack(kept)}
        end
    end
    if since >= 0 then
        -- It did nothing, and shall not do anything any more when its first call comes late.
        call('HSET', late_key, group, now)
        tally.late = 1
    end
    for i = 1, #guards do
        local family, key, test, operand, name = unpack(guards[i])
        local entry = live(find(family, key), now)
        local met = holds(test, entry, operand, name)
        if met == nil then
            return {'look', i, shown(entry)}
        elseif not met then
            return {'guard', i, told_of(entry)}
        end
    end
    local steps, changes, revision = {}, {}, tally.revision
    for i = 1, #writes do
        local step, after = decide(writes[i], now, revision, cause, changes)
        if not step then
            if after[1] == 'refused' then
                after[6] = i
            end
            return after
        end
        steps[i], revision = step, after
    end
    -- From here on nothing fails. Should it all the same, its revisions are not given out again.
    tally.revision = revision
    local answer = {'done', revision}
    for i = 1, #steps do
        apply(steps[i])
        local step = steps[i]
        if step.text and writes[i][1] == 'put' then
            -- Whoever puts knows what was put.
            answer[#answer + 1] = '=' .. head(step.after)
        elseif step.text then
            answer[#answer + 1] = '+' .. step.text
        else
            answer[#answer + 1] = step.before and (step.is_taken and '~' or '-') .. step.before or ''
        end
    end
    for i = 1, #changes do
        tell(changes[i], revision, now)
    end
    if receipt_ms > 0 then
        keep_receipt(receipt_key, receipt_ms, digest, now, writes, answer)
    end
    if brief then
        -- Not before now: a receipt is whole.
        for i = 1, #steps do
            local after = steps[i].after
            if after and after.kind == 'r' and writes[i][1] ~= 'put' then
                answer[i + 2] = '^' .. head(after)
            end
        end
    end
    return answer
end

-- The verbs --------------------------------------------------------------------------------------------------

local verb = {}

local function commit_all(batches, group)
    if tally.late > 0 then
        local names = {group}
        for i = 1, #batches do
            -- One with a receipt is known by that.
            names[i + 1] = batches[i][2] == 0 and batches[i][5] < 0 and batches[i][4] or group
        end
        for _, is_late in ipairs(call('HMGET', late_key, unpack(names))) do
            if is_late then
                return {'late'}
            end
        end
    end
    local answers = {}
    for i = 1, #batches do
        -- A batch that cannot be decided is its caller's trouble; the others are counted and go on.
        local ok, answer = pcall(commit, batches[i], tally.at_ms)
        answers[i] = ok and answer or {'failed', type(answer) == 'table' and answer.err or tostring(answer)}
    end
    write_log(tally.at_ms)
    save_tally()
    return {'ok', tally.at_ms, answers}
end

function verb.commit()
    -- Whatever somebody else may have put in the place of the log, it must fail before anything is written.
    call('XLEN', log_key)
    return begin(call('HGET', data_key, '')) or commit_all(cmsgpack.unpack(ARGV[6]), ARGV[5])
end

-- Another server, or one that forgot: nothing that was given out may be given out again.
function verb.mend()
    local server, seen = ARGV[3], tonumber(ARGV[4])
    if not load_tally() then
        new_tally(server)
    end
    if tally.server == server and tally.revision >= seen then
        return tally.revision
    end
    local survived = tally.revision
    tally.revision, tally.server = math.max(survived, seen) + 1000000, server
    -- Whoever stands in between saw what was lost. Whoever does not has missed nothing.
    call('ZADD', gaps_key, tally.revision, survived)
    save_tally()
    return tally.revision
end

-- A new epoch: leave out so many revisions, which somebody may have seen before the data was put back.
function verb.skip()
    if load_tally() then
        local survived = tally.revision
        tally.revision = survived + tonumber(ARGV[3])
        call('ZADD', gaps_key, tally.revision, survived)
        save_tally()
    end
end

function verb.read()
    local family, answer = ARGV[3], {}
    if family == 'receipt' then
        for i = 4, #ARGV do
            answer[i - 3] = kept_receipt(base .. 'receipt:' .. ARGV[i], reading_ms())
        end
        return answer
    end
    for first = 4, #ARGV, 1000 do
        local last = math.min(first + 999, #ARGV)
        local found = call('HMGET', base .. family, unpack(ARGV, first, last))
        for i = 1, last - first + 1 do
            local packed = found[i]
            if packed then
                local _, _, _, _, _, expires_ms, _, _, kind = struct.unpack(HEAD, packed)
                if is_over(expires_ms) then
                    packed = false
                elseif kind == RECORD then
                    local fields = redis.pcall('HGETALL', prefix .. ARGV[first + i - 1])
                    packed = fields.err and {fields.err} or packed .. framed(fields)
                end
            end
            answer[first + i - 4] = packed
        end
    end
    record_time()
    return answer
end

local function scan()
    local family, start, stop = ARGV[3], ARGV[4], ARGV[5]
    local limit, most, values = tonumber(ARGV[6]), tonumber(ARGV[7]), ARGV[8] == '1'
    local examined, size, answer, last = 0, 0, {}, false
    while true do
        local found = call('ZRANGEBYLEX', base .. family .. ':keys', start, stop, 'LIMIT', 0, 200)
        for i = 1, #found do
            local key = found[i]
            local entry = find(family, key)
            if entry and is_over(entry.expires_ms) then
                entry = false
            end
            -- One more than is asked for tells whether there is more.
            if size > most or examined >= 5000 or (entry and #answer == 2 * limit) then
                return {last, answer}
            end
            examined, last = examined + 1, key
            if entry then
                local text = values and shown(entry) or head(entry)
                size = size + #text
                answer[#answer + 1] = key
                answer[#answer + 1] = text
            end
        end
        if #found < 200 then
            return {false, answer}
        end
        start = '(' .. found[#found]
    end
end

function verb.scan()
    local answer = scan()
    record_time()
    return answer
end

function verb.feed()
    local after, limit, most = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
    if not load_tally() then
        return {0, 0, false, false, {}, false}
    end
    local gap = call('ZRANGEBYSCORE', gaps_key, format('(%d', after), '+inf', 'LIMIT', 0, 1)[1]
    local found, count, size = {}, 0, 0
    local more = each_told(after, function(item, last)
        found[#found + 1] = {last, item}
        count = count + #item / 2 - 1
        for i = 4, #item, 2 do
            size = size + #item[i]
        end
        return count >= limit or size > most
    end)
    gap = gap and tonumber(gap) < after and gap or false
    return {tally.revision, tally.floor, gap, more, found, told_at(after)}
end

-- Whoever commits from now on keeps the index; what was there before is brought into it piece by piece.
function verb.index()
    call('HSETNX', indexes_key, ARGV[3], 'building')
    if load_tally() then
        tally.indexed = 1
        save_tally()
    end
    return call('HGET', indexes_key, ARGV[3])
end

function verb.build()
    local field, after = ARGV[3], ARGV[4]
    local keys = call('ZRANGEBYLEX', base .. 'data:keys', after == '' and '-' or '(' .. after, '+', 'LIMIT', 0, 500)
    if call('HEXISTS', indexes_key, field) == 0 then
        return false
    end
    load_tally()
    indexed_fields = {field}
    for i = 1, #keys do
        local entry = find('data', keys[i])
        if entry then
            index_entry('data', entry, true)
        end
    end
    if #keys < 500 then
        call('HSET', indexes_key, field, 'ready')
        return false
    end
    return keys[#keys]
end

function verb.unindex()
    call('HDEL', indexes_key, ARGV[3])
    call('UNLINK', numbers_of(ARGV[3]), texts_of(ARGV[3]))
    if load_tally() and call('EXISTS', indexes_key) == 0 then
        call('UNLINK', objects_key)
        tally.indexed = 0
        save_tally()
    end
end

function verb.indexes()
    return call('HGETALL', indexes_key)
end

-- The keys that the best index finds of what is sought, if there is one and they are not too many. Each that is
-- sought is a field, the lowest and the highest number, whether all texts are sought, and how many which follow.
function verb.candidates()
    local most, at = tonumber(ARGV[3]), 4
    local best, best_count = nil, most + 1
    while at < #ARGV do
        local one = {
            field = ARGV[at], low = ARGV[at + 1], high = ARGV[at + 2], odd = ARGV[at + 3] == '1', texts = {},
        }
        for i = 1, tonumber(ARGV[at + 4]) do
            one.texts[i] = sub(ARGV[at + 4 + i], 1, TEXT_MAX)
        end
        at = at + 5 + #one.texts
        if call('HGET', indexes_key, one.field) == 'ready' then
            local count = call('ZCARD', objects_key) + call('ZCOUNT', numbers_of(one.field), one.low, one.high)
            if one.odd then
                count = count + call('ZCARD', texts_of(one.field))
            end
            for i = 1, #one.texts do
                local text = one.texts[i]
                count = count + call('ZLEXCOUNT', texts_of(one.field), '[' .. text .. '\0', '(' .. text .. '\1')
            end
            if count < best_count then
                best, best_count = one, count
            end
        end
    end
    if not best then
        return false
    end
    local found = {}
    local function take(members, is_text)
        for i = 1, #members do
            found[#found + 1] = is_text and match(members[i], '%z([^%z]*)$') or members[i]
        end
    end
    take(call('ZRANGE', objects_key, 0, -1))
    take(call('ZRANGEBYSCORE', numbers_of(best.field), best.low, best.high))
    if best.odd then
        take(call('ZRANGE', texts_of(best.field), 0, -1), true)
    end
    for i = 1, #best.texts do
        local text = best.texts[i]
        take(call('ZRANGEBYLEX', texts_of(best.field), '[' .. text .. '\0', '(' .. text .. '\1'), true)
    end
    return found
end

function verb.due()
    local found = call('ZRANGEBYSCORE', due_key, '-inf', reading_ms(), 'LIMIT', 0, tonumber(ARGV[3]))
    local answer = {}
    for i = 1, #found do
        local family, key = match(found[i], '^(%a+):(.*)$')
        local entry = find(family, key)
        if entry then
            answer[#answer + 1] = {family, key, entry.revision}
            is_over(entry.expires_ms)
        end
    end
    record_time()
    return answer
end

-- The oldest changes go while there are too many of them, too many bytes, or they are too old. An item of the log
-- goes when all of its changes are gone.
function verb.trim()
    local age_ms, changes = tonumber(ARGV[3]), tonumber(ARGV[4])
    local most, age_ms_min = tonumber(ARGV[5]), tonumber(ARGV[6])
    if not load_tally() then
        return 0
    end
    local now, dropped, was_late, floor = time_ms(), 0, tally.late, 0
    each_told(0, function(item, last)
        local age = now - item[2]
        return each_change(item, last, function(_, entry, revision, _, key, op)
            local over = tally.changes > changes or tally.log_bytes > most or age > age_ms
            if not over or age < age_ms_min or dropped >= 1000 then
                return true
            elseif revision > tally.floor then
                local _, _, _, _, _, _, size = struct.unpack(HEAD, entry)
                size = #key + ((op == 'delete' or op == 'expire') and 0 or size)
                tally.changes, tally.log_bytes = tally.changes - 1, tally.log_bytes - size
                dropped, floor = dropped + 1, revision
            end
        end)
    end)
    if dropped > 0 then
        call('SET', floor_key, cmsgpack.pack(told_at(floor)))
        call('XTRIM', log_key, 'MINID', format('%d-0', floor + 1))
        tally.floor = floor
        call('ZREMRANGEBYSCORE', gaps_key, '-inf', tally.floor)
    end
    if tally.late > 0 then
        local names = call('HGETALL', late_key)
        for i = 1, #names, 2 do
            if now - names[i + 1] > 3600000 then
                call('HDEL', late_key, names[i])
            end
        end
        tally.late = call('EXISTS', late_key)
    end
    if dropped > 0 or tally.late ~= was_late then
        save_tally()
    end
    return dropped
end

function verb.status()
    if not load_tally() then
        new_tally('')
    end
    return {tally.revision, tally.floor, tally.keys, tally.bytes, tally.changes, tally.log_bytes, time_ms(), now_ms()}
end

if plain_keys then
    local batches = {}
    for i = 1, #plain_keys do
        local write = {'put', 'data', plain_keys[i], 'j', plain_values[i], #plain_values[i], NEVER, ''}
        batches[i] = {'', 0, '', format('%s.%d', ARGV[5], i), -1, ARGV[5], {}, {write}, false}
    end
    return commit_all(batches, ARGV[5])
end
return verb[ARGV[1]]()
