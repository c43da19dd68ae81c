-- The server side of the Redis engine. It is one script with several verbs, so that verbs that decide and verbs
-- that read agree on the layout of an entry.
--
-- KEYS[1] is the hash of a namespace's entries; the names of the namespace's other keys begin as it does. ARGV is the
-- verb, the prefix of the keys that hold records, and the parameters of the verb.
--
-- The verb apply writes what a caller has planned, if what the plan has read is still the same. The verb write is a
-- shorter way for usual writes, which are decided here: it does what limpet.transition.plan does, and a test holds it
-- to that. The script copies the bytes of values and never decodes them.
--
-- An entry is its head, its meta and its value. The head is version, revision, created_revision, created_ms,
-- updated_ms and expires_ms (0 for never) as numbers of eight bytes, size as one of four, the length of the meta
-- as one of two, and a letter: j for JSON, b for bytes, r for a record. The fields of a record are in a hash of their
-- own, so that HGETALL shows them.
--
-- The counters of a namespace are in the field of the same hash that has an empty name: revision, floor, time of the
-- last commit, keys and their bytes, changes in the log and their bytes as numbers of eight bytes, two bytes that say
-- whether there are marks of superseded requests and whether there are indexes, and the replication id of the server.
--
-- The log is a stream. The changes of one call are one item of it, whose id is the revision of the last change. It
-- begins with the time. Then come pairs: a label and an entry for each change, where a label is
--     op revision commit_revision family cause_bytes cause key
-- without the last space, because a cause may contain spaces. Single puts and adds have a shorter form: the word puts
-- with the name of their call, then a key and an entry for each. Their revisions and causes count up to those of the
-- last.
--
-- A server runs the whole script from its first line at each call. So the most frequent verb is served first, before
-- the functions for the others are made.

local call = redis.call
local format, match, sub = string.format, string.match, string.sub
local HEAD, HEAD_BYTES = '>I8I8I8I8I8I8I4I2B', 55
local JSON, RECORD, BYTES = 106, 114, 98
local COUNTERS, COUNTERS_BYTES = '>I8I8I8I8I8I8I8BB', 58
local data_key, base = KEYS[1], sub(KEYS[1], 1, -5)
local prefix = ARGV[2]
local log_key = base .. 'log'

local function now_ms()
    -- test clock: begin
    -- This block is in the script only with ?clock=test.
    local set = call('GET', 'limpet:test-clock')
    if set then
        return tonumber(set)
    end
    -- test clock: end
    local time = call('TIME')
    return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- The counters --------------------------------------------------------------------------------------------------
--
-- The time of a namespace is the server's clock, or the latest time that was recorded there if that is later. Reads
-- and commits both use it. So after the clock is set back, time stands still, and an expired entry stays expired.

local counters = {}

local function unpack_counters(packed)
    if not packed then
        return false
    end
    counters.revision, counters.floor, counters.at_ms, counters.keys, counters.bytes, counters.changes,
        counters.log_bytes, counters.superseded, counters.indexed = struct.unpack(COUNTERS, packed)
    counters.server = sub(packed, COUNTERS_BYTES + 1)
    return true
end

local function load_counters()
    return unpack_counters(call('HGET', data_key, ''))
end

local function new_counters(server)
    counters.revision, counters.floor, counters.at_ms, counters.keys, counters.bytes = 0, 0, 0, 0, 0
    counters.changes, counters.log_bytes, counters.superseded, counters.server = 0, 0, 0, server
    counters.indexed = call('EXISTS', base .. 'indexes')
end

local function pack_counters()
    return struct.pack(COUNTERS, counters.revision, counters.floor, counters.at_ms, counters.keys, counters.bytes,
        counters.changes, counters.log_bytes, counters.superseded, counters.indexed) .. counters.server
end

local function time_ms()
    return math.max(counters.at_ms, now_ms())
end

-- Load the counters for a commit. Returns a reply if this call cannot commit: the server is not the one that the
-- caller knows, or its counter is behind what the caller has seen.
local function prepare(packed)
    local server, seen = ARGV[3], tonumber(ARGV[4])
    if not unpack_counters(packed) then
        new_counters(server)
    end
    if counters.server ~= server or counters.revision < seen then
        return {'counter_lost', counters.revision}
    end
    counters.at_ms = time_ms()
end

-- The size of a field, as the limits count it. A zero byte in front is ours.
local function field_bytes(field)
    return #field - (string.byte(field) == 0 and 1 or 0)
end

-- The fields of a record as one text: each name and each field after its length. Lua takes long to print a number, so
-- the lengths are kept.
local lengths = {}

local function join_fields(fields)
    local parts = {}
    for i = 1, #fields do
        local field = fields[i]
        local length = lengths[#field]
        if not length then
            length = #field .. ':'
            lengths[#field] = length
        end
        parts[2 * i - 1], parts[2 * i] = length, field
    end
    return table.concat(parts)
end

-- The short way of usual writes ------------------------------------------------------------------------------
--
-- An item is a batch of one write of data: a put of a JSON value (a text) that never expires, an add (a number), or a
-- patch (a table). A put may expect the revision of the entry that it replaces, 0 for none; in a table, if it keeps the
-- expiry and the meta of the entry. A patch may expect a field: its name and what it holds, or the name alone if it must
-- not be there. A batch of several puts that expect nothing is several items: all are written, as one commit, or all are
-- left.
--
-- Only the usual case is decided here, and in one round trip, whatever the caller knows. If what an item expects does not
-- hold, it is refused, and the caller gets what was found. An item that meets anything else is left and nothing is
-- written for it: an entry that has expired, that a put would keep from expiring, or of another kind; a number or a
-- record that becomes too large; a Redis key that is not ours. So are later items on its key. The caller commits what is
-- left. In a namespace with indexes or marks of superseded requests all are left.
--
-- Items may have writers: the names as JSON strings, false for none. The meta of an entry with a writer is an array of
-- the name and the meta itself, and the origin of its change ends with the name.

local left = {}

-- A key without an entry is left if it belongs to another program.
local function leave_foreign(keys, found)
    local fresh = {}
    for i = 1, #keys do
        if not found[i + 1] then
            fresh[#fresh + 1] = prefix .. keys[i]
        end
    end
    if #fresh > 0 and call('EXISTS', unpack(fresh)) > 0 then
        for i = 1, #keys do
            left[keys[i]] = not found[i + 1] and call('EXISTS', prefix .. keys[i]) > 0
        end
    end
end

-- The number after an add. With 15 digits at most, Lua adds exactly.
local function add_short(old, kind, value_at, by)
    local number = '0'
    if old then
        number = kind == JSON and match(old, '^%-?%d+$', value_at)
    end
    return number and #number <= 15 and format('%d', tonumber(number) + by)
end

-- The records that were patched in this call: names and fields in turn, and the place of each name. They are read once,
-- and written after all items were decided.
local records = {}

local function load_record(key, old)
    local record = records[key]
    if not record then
        record = old and redis.pcall('HGETALL', prefix .. key) or {}
        record.places = {}
        for i = 1, #record, 2 do
            record.places[record[i]] = i
        end
        records[key] = record
    end
    -- If another program has replaced the hash, there is an error in place of the fields.
    return not record.err and record
end

-- The size of a record after a patch, and its fields as one text; or, in the third place, what was found instead of what
-- the patch expects: without the fields if its caller does not need them.
local function patch_short(key, old, kind, size, patch, expected)
    local fields, must_exist, most, is_brief = unpack(patch)
    if not old and expected then
        return nil, nil, ''
    elseif old and kind ~= RECORD or not old and must_exist then
        return nil
    end
    local record = load_record(key, old)
    if not record then
        return nil
    end
    local places = record.places
    if expected then
        local at = places[expected[1]]
        if expected[2] ~= (at and record[at + 1]) then
            return nil, nil, is_brief and old or old .. join_fields(record)
        end
    end
    for i = 1, #fields, 2 do
        local at = places[fields[i]]
        size = size + field_bytes(fields[i + 1]) + (at and -field_bytes(record[at + 1]) or #fields[i])
    end
    if size > most then
        return nil
    end
    for i = 1, #fields, 2 do
        local at = places[fields[i]] or #record + 1
        places[fields[i]], record[at], record[at + 1] = at, fields[i], fields[i + 1]
    end
    return size, join_fields(record)
end

-- Write the fields that patches set. The data has only the head of a record.
local function write_fields(patched, keys, values)
    -- If another program has replaced the key of the log, fail before anything is written.
    call('XLEN', log_key)
    for i = 1, #patched do
        local fields = values[patched[i]][1]
        if #fields > 0 then
            call('HSET', prefix .. keys[patched[i]], unpack(fields))
        end
    end
end

-- A meta without the name of its writer.
local function drop_writer(meta)
    if sub(meta, 1, 1) ~= '[' then
        return meta
    end
    -- The name ends with a quote that has no backslash before it. Behind it come a comma and the meta, or the bracket.
    local at = string.find(meta, '[\\"]', 3)
    while sub(meta, at, at) == '\\' do
        at = string.find(meta, '[\\"]', at + 2)
    end
    return sub(meta, at + 2, -2)
end

local function add_writer(meta, writer)
    return meta == '' and '[' .. writer .. ']' or '[' .. writer .. ',' .. meta .. ']'
end

-- The end of an origin that names a writer.
local function origin_end(writer)
    return writer and '\31' .. string.gsub(sub(writer, 2, -2), '\\(.)', '%1') or ''
end

-- Leave all items of a batch of several if one of them is not a usual put.
local function leave_batch(keys, found, latest, first, last)
    local is_left = false
    for i = first, last do
        local old, expires_ms, kind, _ = latest[keys[i]] or found[i + 1], 0, JSON, nil
        if old then
            _, _, _, _, _, expires_ms, _, _, kind = struct.unpack(HEAD, old)
        end
        is_left = is_left or left[keys[i]] or expires_ms > 0 or kind == RECORD
    end
    for i = first, is_left and last or 0 do
        left[keys[i]] = true
    end
end

-- Write the log: keys and entries in turn, of the items with these numbers; of those in batches of several, with the
-- number of the batch and of the items that follow in it. If there are patches, batches or writers among them, or items
-- were left, each gets a label in place of its key.
local function log_items(logged, numbers, values, batches, following, writers, group, has_labels)
    local id, at = format('%d-0', counters.revision), format('%d', counters.at_ms)
    if not has_labels then
        call('XADD', log_key, id, 'at', at, 'puts', group, unpack(logged))
        return
    end
    local items = {}
    for i = 1, #numbers do
        local op, revision = type(values[numbers[i]]) == 'table' and 'patch' or 'put', counters.revision - #numbers + i
        local cause = format('%s.%d', group, batches[i] or numbers[i]) .. origin_end(writers and writers[numbers[i]])
        local label = format('%s %d %d data %d ', op, revision, revision + (following[i] or 0), #cause)
        items[2 * i - 1], items[2 * i] = label .. cause .. logged[2 * i - 1], logged[2 * i]
    end
    call('XADD', log_key, id, 'at', at, unpack(items))
end

local function write_items(keys, values, expected, sizes, writers, found, group)
    local first, now, latest = counters.revision, counters.at_ms, {}
    -- What is stored and what is logged: the same, but of a patched record only the head is stored.
    local entries, logged, patched = {}, nil, {}
    local reply, texts, numbers, fresh = {}, {}, {}, {}
    local count, added_bytes, logged_bytes = 0, 0, 0
    -- With batches of several: the batch of each item that is written, and how many items of it follow.
    local batches, following, batch, batch_end = {}, {}, 0, 0
    leave_foreign(keys, found)
    for i = 1, #keys do
        if sizes and i > batch_end then
            batch = batch + 1
            batch_end = batch_end + sizes[batch]
            if batch_end > i then
                leave_batch(keys, found, latest, i, batch_end)
            end
        end
        local key, value, wanted = keys[i], values[i], expected and expected[i]
        local old, form = latest[key] or found[i + 1], type(value)
        local version, old_revision, created, created_ms, expires_ms, old_size = 0, 0, first + count + 1, now, 0, 0
        local meta_bytes, kind, _ = 0, JSON, nil
        if old then
            version, old_revision, created, created_ms, _, expires_ms, old_size, meta_bytes, kind =
                struct.unpack(HEAD, old)
        end
        local size, text, other, keeps
        if left[key] or expires_ms > 0 and expires_ms <= now then
            size = nil
        elseif form == 'string' then
            keeps = type(wanted) == 'table'
            if keeps then
                wanted = wanted[1]
            end
            if kind ~= RECORD and wanted and wanted ~= old_revision then
                other = old or ''
            elseif kind ~= RECORD and (keeps or expires_ms == 0) then
                size, text = #value, value
            end
        elseif form == 'number' then
            text = add_short(old, kind, HEAD_BYTES + meta_bytes + 1, value)
            size = text and #text
        else
            size, text, other = patch_short(key, old, kind, old_size, value, wanted)
        end
        if other then
            texts[#texts + 1] = other
            reply[3 * i - 2], reply[3 * i - 1], reply[3 * i] = 0, 1, 0
        elseif not size then
            left[key] = true
            reply[3 * i - 2], reply[3 * i - 1], reply[3 * i] = 0, 0, 0
        else
            count = count + 1
            if sizes then
                batches[count], following[count] = batch, batch_end - i
            end
            local is_patch, meta = form == 'table', ''
            if meta_bytes > 0 and (keeps or form ~= 'string') then
                meta = drop_writer(sub(old, HEAD_BYTES + 1, HEAD_BYTES + meta_bytes))
            end
            if writers and writers[i] then
                meta = add_writer(meta, writers[i])
            end
            local head = struct.pack(HEAD, version + 1, first + count, created, created_ms, now, expires_ms, size,
                #meta, is_patch and RECORD or JSON)
            if meta ~= '' then
                head = head .. meta
            end
            local entry = head .. text
            if form ~= 'string' or keeps then
                -- The caller knows the value that it has put. The last part of a patch says whether its caller does not
                -- need the record.
                texts[#texts + 1] = (keeps or is_patch and value[4]) and head or entry
            end
            if is_patch then
                logged, patched[#patched + 1] = logged or {unpack(entries)}, i
            end
            if logged then
                logged[2 * count - 1], logged[2 * count] = key, entry
            end
            local stored = is_patch and head or entry
            numbers[count], latest[key], entries[2 * count - 1], entries[2 * count] = i, stored, key, stored
            reply[3 * i - 2], reply[3 * i - 1], reply[3 * i] = version + 1, created, created_ms
            added_bytes, logged_bytes = added_bytes + size - old_size, logged_bytes + #key + size
            if not old then
                fresh[#fresh + 1] = 0
                fresh[#fresh + 1] = key
                added_bytes = added_bytes + #key
            end
        end
    end
    if count > 0 then
        counters.revision = first + count
        counters.keys, counters.bytes = counters.keys + #fresh / 2, counters.bytes + added_bytes
        counters.changes, counters.log_bytes = counters.changes + count, counters.log_bytes + logged_bytes
        if #patched > 0 then
            write_fields(patched, keys, values)
        end
        local has_labels = sizes or writers or #patched > 0 or count < #keys
        log_items(logged or entries, numbers, values, batches, following, writers, group, has_labels)
        call('HSET', data_key, '', pack_counters(), unpack(entries))
        if #fresh > 0 then
            call('ZADD', base .. 'data:keys', unpack(fresh))
        end
    end
    return {'written', now, first, cmsgpack.pack(reply), texts}
end

local superseded_key = base .. 'late'

if ARGV[1] == 'write' then
    local keys, values, expected, sizes, writers = unpack(cmsgpack.unpack(ARGV[6]))
    local found = call('HMGET', data_key, '', unpack(keys))
    local lost = prepare(found[1])
    if lost then
        return lost
    elseif counters.superseded > 0 and call('HGET', superseded_key, ARGV[5]) then
        return {'superseded'}
    elseif counters.superseded + counters.indexed > 0 then
        return {'left'}
    end
    return write_items(keys, values, expected, sizes, writers, found, ARGV[5])
end

-- Entries ----------------------------------------------------------------------------------------------------

local due_key, gaps_key, floor_key = base .. 'due', base .. 'gaps', base .. 'floor'

local function decode(key, packed)
    local version, revision, created, created_ms, updated_ms, expires_ms, size, meta_bytes, kind =
        struct.unpack(HEAD, packed)
    local value_at = HEAD_BYTES + meta_bytes + 1
    return {
        key = key, version = version, revision = revision, created = created, created_ms = created_ms,
        updated_ms = updated_ms, expires_ms = expires_ms, size = size, kind = string.char(kind),
        meta = sub(packed, HEAD_BYTES + 1, value_at - 1), value = sub(packed, value_at),
    }
end

local function encode_head(entry)
    return struct.pack(HEAD, entry.version, entry.revision, entry.created, entry.created_ms, entry.updated_ms,
        entry.expires_ms, entry.size, #entry.meta, string.byte(entry.kind)) .. entry.meta
end

local function save_counters()
    call('HSET', data_key, '', pack_counters())
end

local function load_entry(family, key)
    local packed = call('HGET', base .. family, key)
    return packed and decode(key, packed)
end

-- The time of a call that only reads, taken once; and whether it saw an entry expired that expires after the recorded
-- time.
local read_ms, has_counters, saw_expiry

local function load_read_ms()
    if not read_ms then
        has_counters = load_counters()
        if not has_counters then
            new_counters('')
        end
        read_ms = time_ms()
    end
    return read_ms
end

local function has_expired(expires_ms)
    if expires_ms == 0 or expires_ms > load_read_ms() then
        return false
    end
    saw_expiry = saw_expiry or expires_ms > counters.at_ms
    return true
end

-- An entry that a reader has seen expired must not come back when the clock is set back, so the time is recorded. Where
-- nothing can be written, because the user may only read or the memory is full, the reply is the same without it.
local function record_time()
    if saw_expiry and has_counters then
        counters.at_ms = read_ms
        redis.pcall('HSET', data_key, '', pack_counters())
    end
end

-- A whole entry, as it is sent to the caller.
local function encode(entry)
    if entry.kind == 'r' then
        return encode_head(entry) .. join_fields(entry.fields or call('HGETALL', prefix .. entry.key))
    end
    return encode_head(entry) .. entry.value
end

-- Indexes ----------------------------------------------------------------------------------------------------
--
-- A field of a record is in one of two sorted sets: among the numbers by its value, or among the texts by the first
-- bytes of itself, a zero byte and the key. JSON is never decoded: objects are found by every search.

local indexes_key, objects_key = base .. 'indexes', base .. 'index:objects'
local TEXT_MAX, DIGITS_MAX = 64, 200
local indexed_fields

local function numbers_key(field)
    return base .. 'index:n:' .. field
end

local function texts_key(field)
    return base .. 'index:t:' .. field
end

local function parse_number(wire)
    if string.byte(wire) == 0 then
        local text = sub(wire, 2)
        return match(text, '^%-?%d[%d%.eE+-]*$') and tonumber(text)
    end
    return #match(wire, '^%-?(%d*)') <= DIGITS_MAX and match(wire, '^%-?%d+$') and tonumber(wire)
end

local function index_field(field, key, is_present)
    -- If another program has replaced the hash of a record, there are no fields.
    local wire = redis.pcall('HGET', prefix .. key, field)
    local number = type(wire) == 'string' and parse_number(wire)
    if not is_present then
        call('ZREM', numbers_key(field), key)
        if type(wire) == 'string' and not number then
            call('ZREM', texts_key(field), sub(wire, 1, TEXT_MAX) .. '\0' .. key)
        end
    elseif number then
        call('ZADD', numbers_key(field), format('%.17g', number), key)
    elseif type(wire) == 'string' then
        call('ZADD', texts_key(field), 0, sub(wire, 1, TEXT_MAX) .. '\0' .. key)
    end
end

-- Add an entry to the indexes, or remove it before it changes.
local function index_entry(family, entry, is_present)
    if counters.indexed == 0 or family ~= 'data' then
        return
    end
    indexed_fields = indexed_fields or call('HKEYS', indexes_key)
    if entry.kind == 'r' then
        for i = 1, #indexed_fields do
            index_field(indexed_fields[i], entry.key, is_present)
        end
    elseif is_present and string.byte(entry.value) == 123 then
        call('ZADD', objects_key, 0, entry.key)
    elseif not is_present then
        call('ZREM', objects_key, entry.key)
    end
end

-- Applying ---------------------------------------------------------------------------------------------------

-- Redis takes arguments from the stack, which holds some thousands.
local function call_in_parts(command, key, items)
    for first = 1, #items, 1000 do
        call(command, key, unpack(items, first, math.min(first + 999, #items)))
    end
end

-- The changes of this call that are not in the log yet, and the revision of the last.
local log_buffer, last_logged = {}, 0

local function write_log(now)
    if #log_buffer > 0 then
        call('XADD', log_key, format('%d-0', last_logged), 'at', now, unpack(log_buffer))
        log_buffer = {}
    end
end

local function append_change(label, text, revision, now)
    log_buffer[#log_buffer + 1] = label
    log_buffer[#log_buffer + 1] = text
    last_logged = revision
    if #log_buffer >= 1000 then
        write_log(now)
    end
end

-- Call visit with each item of the log after a revision, until it returns true.
local function each_log_item(after, visit)
    local first = after == 0 and '-' or format('(%d-0', after)
    -- An item may have 256 changes with large values, and the first one is often enough: begin with few.
    local count = 1
    while true do
        local items = call('XRANGE', log_key, first, '+', 'COUNT', count)
        for i = 1, #items do
            if visit(items[i][2], tonumber(match(items[i][1], '^%d+'))) then
                return true
            end
        end
        if #items < count then
            return false
        end
        first, count = '(' .. items[#items][1], math.min(2 * count, 50)
    end
end

-- Call visit with each change of an item, until it returns true: label, entry, revision, cause, key and op. It begins
-- with the first change, or with the one at index start.
local function each_change(item, last, visit, start)
    local plain = item[3] == 'puts' and item[4]
    for i = start or plain and 5 or 3, #item, 2 do
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
        if visit(label, entry, tonumber(revision), cause, key, op) then
            return true
        end
    end
    return false
end

-- The change at a revision, or the last one before it: its label, its head and its time. Where the log has none, the
-- change at the floor, of which these three are kept.
local function find_change_at(revision)
    local found = false
    local function search(items)
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
    search(call('XRANGE', log_key, format('(%d-0', revision), '+', 'COUNT', 1))
    if not found then
        search(call('XREVRANGE', log_key, format('%d-0', revision), '-', 'COUNT', 1))
    end
    if not found then
        local kept = call('GET', floor_key)
        found = kept and cmsgpack.unpack(kept)
    end
    return found
end

-- Units ------------------------------------------------------------------------------------------------------
--
-- A unit is what a plan has read and what it writes: see limpet.commit.committer. It is compared with what is here,
-- and written if all of it is the same. A revision of a plan is negative where it counts from the latest one, and so is
-- a time that counts from now: -1 is the latest revision, or now.

-- Values up to this size are returned with what was found, others only if the plan needs them.
local SMALL_BYTES = 2048

local function resolve_revision(planned, first)
    return planned >= 0 and planned or first - planned - 1
end

local function resolve_time(planned, now)
    return planned >= 0 and planned or now - planned - 1
end

-- A receipt is a key of its own. Redis may expire it by itself, because a receipt leaves no change.
local function load_packed(family, key)
    if family == 'receipt' then
        return call('GET', base .. 'receipt:' .. key)
    end
    return call('HGET', base .. family, key)
end

-- What a unit has found, by family and key: each entry as it is packed, or false. Data is read by one command.
local function load_found(read)
    local keys, data = {}, {}
    for i = 1, #read do
        if read[i][1] == 'data' then
            keys[#keys + 1] = read[i][2]
        end
    end
    for first = 1, #keys, 1000 do
        local last = math.min(first + 999, #keys)
        local packed = call('HMGET', data_key, unpack(keys, first, last))
        for i = first, last do
            data[keys[i]] = packed[i - first + 1]
        end
    end
    return {data = data}
end

local function of_family(entries, family)
    local own = entries[family]
    if not own then
        own = {}
        entries[family] = own
    end
    return own
end

local function find(found, family, key)
    local own = of_family(found, family)
    if own[key] == nil then
        own[key] = load_packed(family, key)
    end
    return own[key]
end

-- When an entry expires and what kind it is, as it is packed; 0 and nil if there is none.
local function expiry_and_kind(packed)
    if not packed then
        return 0
    end
    local _, _, _, _, _, expires_ms, _, _, kind = struct.unpack(HEAD, packed)
    return expires_ms, kind
end

-- What is under a key: false, or the entry after a sign that says whether its value follows.
local function show(found, family, key, needs_value)
    if family == 'superseded' then
        return call('HGET', superseded_key, key)
    end
    local packed = find(found, family, key)
    if not packed then
        return false
    end
    local _, _, _, _, _, _, size, meta_bytes, kind = struct.unpack(HEAD, packed)
    if not needs_value and size > SMALL_BYTES then
        return '-' .. sub(packed, 1, HEAD_BYTES + meta_bytes)
    elseif kind ~= RECORD then
        return '+' .. packed
    end
    -- If another program has replaced the hash, that concerns only a plan that needs the fields.
    local fields = (needs_value and call or redis.pcall)('HGETALL', prefix .. key)
    return fields.err and '-' .. packed or '+' .. packed .. join_fields(fields)
end

local function is_as_read(found, family, key, revision, is_expired, now)
    if family == 'superseded' then
        local mark = counters.superseded > 0 and call('HGET', superseded_key, key)
        return revision == (mark and tonumber(mark:match('%d+$')) or -1)
    end
    local packed = find(found, family, key)
    if not packed then
        return revision == -1
    end
    local _, its_revision, _, _, _, expires_ms = struct.unpack(HEAD, packed)
    return its_revision == revision and (expires_ms > 0 and expires_ms <= now) == is_expired
end

local function find_stale(read, found, now)
    local is_stale = false
    for i = 1, #read do
        local family, key, revision, is_expired = unpack(read[i])
        is_stale = is_stale or not is_as_read(found, family, key, revision, is_expired, now)
    end
    if not is_stale then
        return nil
    end
    local reply = {'stale'}
    for i = 1, #read do
        reply[i + 1] = show(found, read[i][1], read[i][2], read[i][5])
    end
    return reply
end

-- A Redis key is ours only while it has an entry of a record. A key of another program must not be lost, and a value
-- of the same name would hide it from its owner.
local function find_foreign(rows, found)
    for i = 1, #rows do
        local op, family, key, kind = rows[i][1], rows[i][2], rows[i][3], rows[i][14]
        local packed = find(found, family, key)
        local is_record = select(2, expiry_and_kind(packed)) == RECORD
        if is_record and (op == 'patch' or op == 'touch') then
            -- If another program has replaced the hash of a record, fail before anything is written.
            call('HLEN', prefix .. key)
        elseif kind and not is_record and (kind == 'r' or family == 'data' and not packed) then
            local type_found = call('TYPE', prefix .. key).ok
            if type_found ~= 'none' then
                return {'foreign', prefix .. key, type_found, key}
            end
        end
    end
end

-- The entry that a row leaves, false if it ends it, and the text of the change for the log. The fields of a record are
-- kept in `fields`: the entry has only its head.
local function make_entry(row, before, fields, first, now)
    local op, key = row[1], row[3]
    if op == 'put' or op == 'patch' then
        local meta, kind, value = row[13], row[14], row[15]
        local head = struct.pack(HEAD, row[7], resolve_revision(row[4], first), resolve_revision(row[8], first),
            resolve_time(row[9], now), resolve_time(row[10], now), resolve_time(row[11], now), row[12], #meta,
            string.byte(kind)) .. meta
        if kind == 'r' then
            fields[key] = value
            return head, head .. join_fields(value)
        end
        return head .. value, head .. value
    end
    local version, _, created, created_ms, updated_ms, _, size, meta_bytes, kind = struct.unpack(HEAD, before)
    if op == 'touch' then
        local after = struct.pack(HEAD, version, resolve_revision(row[4], first), created, created_ms, updated_ms,
            resolve_time(row[11], now), size, meta_bytes, kind) .. sub(before, HEAD_BYTES + 1)
        return after, sub(after, 1, HEAD_BYTES + meta_bytes)
    elseif op ~= 'take' then
        return false, sub(before, 1, HEAD_BYTES + meta_bytes)
    elseif kind == RECORD then
        return false, before .. join_fields(fields[key] or call('HGETALL', prefix .. key))
    end
    return false, before
end

-- Write what a unit leaves of an entry: the fields of a record, the index and the expiry. The rest is collected, so that
-- all entries of a family are written by one command.
local function store_entry(family, key, before, after, fields, writes)
    local expired_ms, old_kind = expiry_and_kind(before)
    local expires_ms, new_kind = expiry_and_kind(after)
    local is_indexed = counters.indexed > 0 and family == 'data'
    if before and is_indexed then
        index_entry(family, decode(key, before), false)
    end
    if new_kind == RECORD and fields[key] then
        call('DEL', prefix .. key)
        call_in_parts('HSET', prefix .. key, fields[key])
    elseif old_kind == RECORD and new_kind ~= RECORD then
        call('DEL', prefix .. key)
    end
    if after then
        local set, fresh = writes.set, writes.fresh
        set[#set + 1] = key
        set[#set + 1] = after
        if not before then
            fresh[#fresh + 1] = 0
            fresh[#fresh + 1] = key
        end
    elseif before then
        writes.ended[#writes.ended + 1] = key
    end
    if expires_ms > 0 then
        call('ZADD', due_key, expires_ms, family .. ':' .. key)
    elseif expired_ms > 0 then
        call('ZREM', due_key, family .. ':' .. key)
    end
    if after and is_indexed then
        index_entry(family, decode(key, after), true)
    end
end

local function store_family(family, found, left, fields)
    local writes = {set = {}, fresh = {}, ended = {}}
    for key, after in pairs(left) do
        store_entry(family, key, found[key], after, fields, writes)
    end
    -- The keys first: if another program has replaced their set, this fails before an entry is written.
    call_in_parts('ZADD', base .. family .. ':keys', writes.fresh)
    call_in_parts('HSET', base .. family, writes.set)
    call_in_parts('HDEL', base .. family, writes.ended)
    call_in_parts('ZREM', base .. family .. ':keys', writes.ended)
end

-- Store a receipt, or the mark of a superseded request. A mark has its time, and the latest revision: it is another one
-- whenever a retry of the request has made a change.
local function keep(kept, first, now)
    local family, key, revision, expires_ms, body = unpack(kept)
    if family == 'superseded' then
        call('HSET', superseded_key, key, format('%d %d', now, counters.revision))
        counters.superseded = 1
        return
    end
    revision, expires_ms = resolve_revision(revision, first), resolve_time(expires_ms, now)
    local head = struct.pack(HEAD, 1, revision, revision, now, now, expires_ms, #body, 0, BYTES)
    call('SET', base .. 'receipt:' .. key, head .. body, 'PX', math.max(1, expires_ms - now))
end

local function apply_unit(unit, now)
    local read, rows, kept, added = unpack(unit)
    local found = load_found(read)
    local other = find_stale(read, found, now) or find_foreign(rows, found)
    if other then
        return other
    end
    local first, left, fields, labels, texts = counters.revision, {}, {}, {}, {}
    for i = 1, #rows do
        local op, family, key, revision, last, cause = unpack(rows[i], 1, 6)
        revision, last = resolve_revision(revision, first), resolve_revision(last, first)
        labels[i] = format('%s %d %d %s %d ', op, revision, last, family, #cause) .. cause .. key
        local own = of_family(left, family)
        local before = own[key]
        if before == nil then
            before = found[family][key]
        end
        own[key], texts[i] = make_entry(rows[i], before, fields, first, now)
    end
    -- From here on nothing should fail. If it does, these revisions are not used again.
    counters.revision = first + added[1]
    for family, own in pairs(left) do
        store_family(family, found[family], own, fields)
    end
    for i = 1, #kept do
        keep(kept[i], first, now)
    end
    for i = 1, #rows do
        append_change(labels[i], texts[i], resolve_revision(rows[i][4], first), now)
    end
    counters.changes, counters.log_bytes = counters.changes + added[1], counters.log_bytes + added[4]
    counters.keys, counters.bytes = counters.keys + added[2], counters.bytes + added[3]
    return {'done', first}
end

-- The verbs --------------------------------------------------------------------------------------------------

local verb = {}

function verb.apply()
    -- If another program has replaced the key of the log, fail before anything is written.
    call('XLEN', log_key)
    local lost = prepare(call('HGET', data_key, ''))
    if lost then
        return lost
    elseif counters.superseded > 0 and call('HEXISTS', superseded_key, ARGV[5]) == 1 then
        return {'superseded'}
    end
    local units, replies = cmsgpack.unpack(ARGV[6]), {}
    for i = 1, #units do
        -- An error in one unit fails only its own callers; the others go on.
        local ok, reply = pcall(apply_unit, units[i], counters.at_ms)
        replies[i] = ok and reply or {'failed', type(reply) == 'table' and reply.err or tostring(reply)}
    end
    write_log(counters.at_ms)
    save_counters()
    return {'ok', counters.at_ms, replies}
end

-- The changes after a revision that a request made, found by their cause: label, entry and time of each.
function verb.find()
    local since, cause, found = tonumber(ARGV[3]), ARGV[4], {}
    each_log_item(since, function(item, last)
        each_change(item, last, function(label, entry, _, its_cause)
            if its_cause == cause then
                found[#found + 1] = {label, entry, item[2]}
            end
        end)
    end)
    return found
end

-- After a failover, or on a server that lost writes: no revision may be used twice.
function verb.reseed_counter()
    local server, seen = ARGV[3], tonumber(ARGV[4])
    if not load_counters() then
        new_counters(server)
    end
    if counters.server == server and counters.revision >= seen then
        return counters.revision
    end
    local survived = counters.revision
    counters.revision, counters.server = math.max(survived, seen) + 1000000, server
    -- A watcher at a revision in this gap has seen changes that were lost. Others have missed nothing.
    call('ZADD', gaps_key, counters.revision, survived)
    save_counters()
    return counters.revision
end

-- A new epoch: skip so many revisions, which clients may have seen before the data was restored.
function verb.skip()
    if load_counters() then
        local survived = counters.revision
        counters.revision = survived + tonumber(ARGV[3])
        call('ZADD', gaps_key, counters.revision, survived)
        save_counters()
    end
end

function verb.read()
    local family, reply = ARGV[3], {}
    if family == 'receipt' then
        for i = 4, #ARGV do
            local packed = load_packed(family, ARGV[i])
            local expires_ms = packed and select(6, struct.unpack(HEAD, packed))
            reply[i - 3] = packed and expires_ms > load_read_ms() and packed
        end
        return reply
    end
    for first = 4, #ARGV, 1000 do
        local last = math.min(first + 999, #ARGV)
        local found = call('HMGET', base .. family, unpack(ARGV, first, last))
        for i = 1, last - first + 1 do
            local packed = found[i]
            if packed then
                local _, _, _, _, _, expires_ms, _, _, kind = struct.unpack(HEAD, packed)
                if has_expired(expires_ms) then
                    packed = false
                elseif kind == RECORD then
                    local fields = redis.pcall('HGETALL', prefix .. ARGV[first + i - 1])
                    packed = fields.err and {fields.err} or packed .. join_fields(fields)
                end
            end
            reply[first + i - 4] = packed
        end
    end
    record_time()
    return reply
end

local function scan()
    local family, start, stop = ARGV[3], ARGV[4], ARGV[5]
    local limit, most, values = tonumber(ARGV[6]), tonumber(ARGV[7]), ARGV[8] == '1'
    -- In reverse, the upper bound comes first.
    local range = ARGV[9] == '1' and 'ZREVRANGEBYLEX' or 'ZRANGEBYLEX'
    local examined, size, reply, last = 0, 0, {}, false
    while true do
        local found = call(range, base .. family .. ':keys', start, stop, 'LIMIT', 0, 200)
        for i = 1, #found do
            local key = found[i]
            local entry = load_entry(family, key)
            if entry and has_expired(entry.expires_ms) then
                entry = false
            end
            -- An entry beyond the limit shows that there is another page.
            if size > most or examined >= 5000 or (entry and #reply == 2 * limit) then
                return {last, reply}
            end
            examined, last = examined + 1, key
            if entry then
                local text = values and encode(entry) or encode_head(entry)
                size = size + #text
                reply[#reply + 1] = key
                reply[#reply + 1] = text
            end
        end
        if #found < 200 then
            return {false, reply}
        end
        start = '(' .. found[#found]
    end
end

function verb.scan()
    local reply = scan()
    record_time()
    return reply
end

-- Beside the count, the keys that have expired and are in it, if they are in its span: the caller compares them.
function verb.count()
    local family, expired = ARGV[3], {}
    local total = call('ZLEXCOUNT', base .. family .. ':keys', ARGV[4], ARGV[5])
    local due = call('ZRANGEBYSCORE', due_key, '-inf', load_read_ms(), 'WITHSCORES')
    for i = 1, #due, 2 do
        has_expired(tonumber(due[i + 1]))
        local owner, key = match(due[i], '^(%a+):(.*)$')
        if owner == family then
            expired[#expired + 1] = key
        end
    end
    record_time()
    return {total, expired}
end

function verb.changes()
    local after, limit, most = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
    if not load_counters() then
        return {0, 0, false, false, {}, false}
    end
    local gap = call('ZRANGEBYSCORE', gaps_key, format('(%d', after), '+inf', 'LIMIT', 0, 1)[1]
    local found, count, size = {}, 0, 0
    local more = each_log_item(after, function(item, last)
        found[#found + 1] = {last, item}
        count = count + #item / 2 - 1
        for i = 4, #item, 2 do
            size = size + #item[i]
        end
        return count >= limit or size > most
    end)
    gap = gap and tonumber(gap) < after and gap or false
    return {counters.revision, counters.floor, gap, more, found, find_change_at(after)}
end

-- Commits maintain the index from now on; the verb build adds the entries that were there before, page by page.
function verb.index()
    call('HSETNX', indexes_key, ARGV[3], 'building')
    if load_counters() then
        counters.indexed = 1
        save_counters()
    end
    return call('HGET', indexes_key, ARGV[3])
end

function verb.build()
    local field, after = ARGV[3], ARGV[4]
    local keys = call('ZRANGEBYLEX', base .. 'data:keys', after == '' and '-' or '(' .. after, '+', 'LIMIT', 0, 500)
    if call('HEXISTS', indexes_key, field) == 0 then
        return false
    end
    load_counters()
    indexed_fields = {field}
    for i = 1, #keys do
        local entry = load_entry('data', keys[i])
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
    call('UNLINK', numbers_key(ARGV[3]), texts_key(ARGV[3]))
    if load_counters() and call('EXISTS', indexes_key) == 0 then
        call('UNLINK', objects_key)
        counters.indexed = 0
        save_counters()
    end
end

function verb.indexes()
    return call('HGETALL', indexes_key)
end

-- The keys that the best index finds for the given probes, if there is an index and they are not too many. A probe is
-- a field, the lowest and the highest number, whether it wants all texts, and the count of the texts that follow.
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
            local count = call('ZCARD', objects_key) + call('ZCOUNT', numbers_key(one.field), one.low, one.high)
            if one.odd then
                count = count + call('ZCARD', texts_key(one.field))
            end
            for i = 1, #one.texts do
                local text = one.texts[i]
                count = count + call('ZLEXCOUNT', texts_key(one.field), '[' .. text .. '\0', '(' .. text .. '\1')
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
    take(call('ZRANGEBYSCORE', numbers_key(best.field), best.low, best.high))
    if best.odd then
        take(call('ZRANGE', texts_key(best.field), 0, -1), true)
    end
    for i = 1, #best.texts do
        local text = best.texts[i]
        take(call('ZRANGEBYLEX', texts_key(best.field), '[' .. text .. '\0', '(' .. text .. '\1'), true)
    end
    return found
end

function verb.due()
    local found = call('ZRANGEBYSCORE', due_key, '-inf', load_read_ms(), 'LIMIT', 0, tonumber(ARGV[3]))
    local reply = {}
    for i = 1, #found do
        local family, key = match(found[i], '^(%a+):(.*)$')
        local entry = load_entry(family, key)
        if entry then
            reply[#reply + 1] = {family, key, entry.revision}
            has_expired(entry.expires_ms)
        end
    end
    record_time()
    return reply
end

-- Drop the oldest changes while there are too many of them, too many bytes, or they are too old. An item of the log is
-- dropped when all of its changes are.
function verb.trim()
    local age_ms, changes = tonumber(ARGV[3]), tonumber(ARGV[4])
    local most, age_ms_min = tonumber(ARGV[5]), tonumber(ARGV[6])
    if not load_counters() then
        return 0
    end
    local now, dropped, was_superseded, floor = time_ms(), 0, counters.superseded, 0
    each_log_item(0, function(item, last)
        local age = now - item[2]
        return each_change(item, last, function(_, entry, revision, _, key, op)
            local over = counters.changes > changes or counters.log_bytes > most or age > age_ms
            if not over or age < age_ms_min or dropped >= 1000 then
                return true
            elseif revision > counters.floor then
                local _, _, _, _, _, _, size = struct.unpack(HEAD, entry)
                size = #key + ((op == 'delete' or op == 'expire') and 0 or size)
                counters.changes, counters.log_bytes = counters.changes - 1, counters.log_bytes - size
                dropped, floor = dropped + 1, revision
            end
        end)
    end)
    if dropped > 0 then
        call('SET', floor_key, cmsgpack.pack(find_change_at(floor)))
        call('XTRIM', log_key, 'MINID', format('%d-0', floor + 1))
        counters.floor = floor
        call('ZREMRANGEBYSCORE', gaps_key, '-inf', counters.floor)
    end
    if counters.superseded > 0 then
        local names = call('HGETALL', superseded_key)
        for i = 1, #names, 2 do
            if now - names[i + 1]:match('^%d+') > 3600000 then
                call('HDEL', superseded_key, names[i])
            end
        end
        counters.superseded = call('EXISTS', superseded_key)
    end
    if dropped > 0 or counters.superseded ~= was_superseded then
        save_counters()
    end
    return dropped
end

function verb.status()
    if not load_counters() then
        new_counters('')
    end
    return {
        counters.revision, counters.floor, counters.keys, counters.bytes, counters.changes, counters.log_bytes,
        time_ms(), now_ms(),
    }
end

return verb[ARGV[1]]()
