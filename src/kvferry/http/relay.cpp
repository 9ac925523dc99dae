// Passes chunks that nobody has to read from one socket to another without Python. The caller owns a `Relay` for each
// stream, and calls `relay_step` when its source has become readable. What is not passed on (chunks that do not fit the
// pattern, parts of chunks, the end, what the target does not take) is handed to the caller, to which everything goes
// from then on, until it sets a pattern again. relay.py declares the same structures.

#include <sys/socket.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace {

constexpr size_t READ_BYTES = 64 * 1024;
constexpr size_t KEPT_BYTES = 16 * 1024;
constexpr int MOST_DIGITS = 8;

enum Keep : int32_t { KEEP_NOTHING, KEEP_FIRST_LINE, KEEP_ALL };

struct Pattern {
    const char* prefix;
    const char* const* stops;
    int32_t num_stops;
    int32_t keep;
};

struct Relay {
    const Pattern* pattern;  // null: everything goes to the caller
    int32_t source, target;  // non-blocking sockets
    uint64_t received;       // bytes from the source that were passed on, framed; the caller sets these two to 0
    uint64_t sent;           // bytes of payload in them
    const char* unsent;      // valid until the next step of any stream: to be sent to the target first,
    int64_t unsent_bytes;
    const char* unread;  // then to be read as if it had come from the source
    int64_t unread_bytes;
    int64_t kept_bytes;  // what was kept; the caller sets it to 0
    int32_t ended;       // the source is at its end, or broken
    char last[4];        // what the payload ended with
    char kept[KEPT_BYTES];
};

thread_local char read_bytes[READ_BYTES], written[READ_BYTES];

// The chunk that `data` begins with, if all of it is there and its size is written as nearly all write it (lower case,
// no zeros before it, no extension). Its payload, and its length with the framing; 0 if it is another.
size_t whole_chunk(std::string_view data, std::string_view* payload) {
    size_t size = 0, place = 0;
    for (; place < data.size() && place < MOST_DIGITS; place++) {
        char digit = data[place];
        int value = digit >= '0' && digit <= '9' ? digit - '0' : digit >= 'a' && digit <= 'f' ? digit - 'a' + 10 : -1;
        if (value < 0) break;
        if (place == 0 && value == 0) return 0;
        size = size << 4 | static_cast<size_t>(value);
    }
    if (place == 0 || data.size() < place + size + 4) return 0;
    if (data.compare(place, 2, "\r\n") != 0 || data.compare(place + 2 + size, 2, "\r\n") != 0) return 0;
    *payload = data.substr(place + 2, size);
    return place + size + 4;
}

// Whether a chunk's payload may be passed on: any, or where something is kept, exactly one event.
bool fits(const Pattern& pattern, std::string_view payload) {
    std::string_view prefix = pattern.prefix;
    if (payload.substr(0, prefix.size()) != prefix) return false;
    if (pattern.keep != KEEP_NOTHING) {
        const void* end = memmem(payload.data(), payload.size(), "\n\n", 2);
        if (end == nullptr || static_cast<const char*>(end) + 2 != payload.data() + payload.size()) return false;
    }
    if (pattern.keep == KEEP_FIRST_LINE) payload = payload.substr(0, payload.find('\n'));
    for (int32_t place = 0; place < pattern.num_stops; place++) {
        const char* stop = pattern.stops[place];
        if (memmem(payload.data(), payload.size(), stop, strlen(stop)) != nullptr) return false;
    }
    return true;
}

size_t framed(char* to, std::string_view payload) {
    constexpr char DIGITS[] = "0123456789abcdef";
    size_t place = 0;
    int shift = 0;
    while (payload.size() >> shift > 15) shift += 4;
    for (; shift >= 0; shift -= 4) to[place++] = DIGITS[payload.size() >> shift & 15];
    memcpy(to + place, "\r\n", 2);
    memcpy(to + place + 2, payload.data(), payload.size());
    memcpy(to + place + 2 + payload.size(), "\r\n", 2);
    return place + payload.size() + 4;
}

void note_end(Relay* relay, std::string_view payload) {
    size_t size = sizeof relay->last, num = payload.size() < size ? payload.size() : size;
    memmove(relay->last, relay->last + num, size - num);
    memcpy(relay->last + size - num, payload.data() + payload.size() - num, num);
}

// Takes the chunks that fit from the beginning of `data`. Returns how many bytes those are; `out` is what to send.
size_t take(Relay* relay, std::string_view data, std::string_view* out) {
    const Pattern& pattern = *relay->pattern;
    size_t place = 0, num_written = 0;
    std::string_view payload;
    while (place < data.size()) {
        size_t length = whole_chunk(data.substr(place), &payload);
        if (length == 0 || !fits(pattern, payload)) break;
        size_t num_kept = pattern.keep == KEEP_NOTHING    ? 0
                          : pattern.keep == KEEP_ALL ? payload.size()
                                                     : payload.find('\n') + 1;
        if (relay->kept_bytes + num_kept > KEPT_BYTES) break;
        memcpy(relay->kept + relay->kept_bytes, payload.data(), num_kept);
        relay->kept_bytes += static_cast<int64_t>(num_kept);
        if (pattern.keep == KEEP_FIRST_LINE) {
            payload.remove_prefix(num_kept);
            num_written += framed(written + num_written, payload);  // shorter than it came
        }
        relay->sent += payload.size();
        note_end(relay, payload);
        place += length;
    }
    *out = pattern.keep == KEEP_FIRST_LINE ? std::string_view(written, num_written) : data.substr(0, place);
    return place;
}

}  // namespace

extern "C" {

// Reads once from the source. Whether there is something to do for the caller.
int32_t relay_step(Relay* relay) {
    relay->unsent_bytes = relay->unread_bytes = 0;
    ssize_t num = recv(relay->source, read_bytes, READ_BYTES, MSG_DONTWAIT);
    if (num < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return 0;
    if (num <= 0) return relay->ended = 1;
    std::string_view data(read_bytes, static_cast<size_t>(num)), out;
    size_t taken = 0;
    if (relay->pattern != nullptr) {
        taken = take(relay, data, &out);
        relay->received += taken;
        ssize_t sent = out.empty() ? 0 : send(relay->target, out.data(), out.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
        out.remove_prefix(sent > 0 ? static_cast<size_t>(sent) : 0);  // an error is found by who sends the rest
    }
    if (out.empty() && taken == data.size()) return 0;
    relay->pattern = nullptr;
    relay->unsent = out.data(), relay->unsent_bytes = static_cast<int64_t>(out.size());
    relay->unread = data.data() + taken, relay->unread_bytes = static_cast<int64_t>(data.size() - taken);
    return 1;
}

}  // extern "C"
