// The fast path of streamed answers: chunks that nobody has to read go from one socket to another without Python.
//
// One `FastPath` serves an event loop, which watches its epoll descriptor and calls `fast_path_run` when something has
// come. A stream is a pair of non-blocking sockets and a pattern: what a chunk must look like to be passed on here.
// Everything else (other chunks, parts of chunks, the end, a client that does not keep up) is handed to Python, and
// from then on all of the stream is, until Python says `fast_path_quick` again. Not thread-safe; the caller holds the
// GIL. fast_path.py declares the functions and structures.

#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace {

constexpr size_t READ_BYTES = 64 * 1024;
constexpr size_t KEPT_BYTES = 16 * 1024;
constexpr int BATCH = 64;
constexpr int MOST_DIGITS = 8;

enum Keep : int32_t { KEEP_NOTHING, KEEP_FIRST_LINE, KEEP_ALL };

struct Pattern {
    std::string prefix;
    int32_t keep;
    std::vector<std::string> stops;
};

// Read by Python while the stream runs.
struct Counters {
    uint64_t received;  // bytes from the instance, framed
    uint64_t sent;      // bytes of payload to the client
    char last[4];       // what the payload ended with
};

struct Stream {
    Counters counters{};
    int from, to;
    uint32_t generation;
    const Pattern* pattern = nullptr;  // null: everything goes to Python
    bool used = true, watched = false;
    std::string kept, taken;
};

// What Python has to do; in this order.
struct Event {
    int64_t stream;
    const char* unsent;  // to be sent to the client first
    int64_t unsent_bytes;
    const char* unread;  // to be read as if it had come from the instance's socket
    int64_t unread_bytes;
    int32_t kept_much;   // what was kept should be taken
    int32_t ended;       // the instance's socket is at its end, or broken
};

struct FastPath {
    int epoll;
    std::vector<std::unique_ptr<Stream>> streams;
    std::vector<uint32_t> free_places;
    std::vector<std::unique_ptr<Pattern>> patterns;
    epoll_event events[BATCH];
    int num_events = 0, next_event = 0;
    bool in_batch = false;
    char read[READ_BYTES];
    char written[READ_BYTES];
};

uint64_t name_of(uint32_t place, const Stream& stream) { return uint64_t{stream.generation} << 32 | place; }

Stream* find(FastPath* path, uint64_t name) {
    uint32_t place = static_cast<uint32_t>(name);
    if (place >= path->streams.size()) return nullptr;
    Stream* stream = path->streams[place].get();
    return stream->used && stream->generation == name >> 32 ? stream : nullptr;
}

void watch(FastPath* path, uint64_t name, Stream* stream, bool on) {
    if (stream->watched == on) return;
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = name;
    if (epoll_ctl(path->epoll, on ? EPOLL_CTL_ADD : EPOLL_CTL_DEL, stream->from, &event) == 0 || !on)
        stream->watched = on;
}

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

bool contains_stop(const Pattern& pattern, std::string_view text) {
    for (const std::string& stop : pattern.stops)
        if (memmem(text.data(), text.size(), stop.data(), stop.size()) != nullptr) return true;
    return false;
}

// Whether a chunk's payload may be passed on: any, or where something is kept, exactly one event.
bool fits(const Pattern& pattern, std::string_view payload) {
    if (payload.substr(0, pattern.prefix.size()) != pattern.prefix) return false;
    if (pattern.keep != KEEP_NOTHING) {
        const void* end = memmem(payload.data(), payload.size(), "\n\n", 2);
        if (end == nullptr || static_cast<const char*>(end) + 2 != payload.data() + payload.size()) return false;
    }
    if (pattern.keep == KEEP_FIRST_LINE) payload = payload.substr(0, payload.find('\n'));
    return !contains_stop(pattern, payload);
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

void note_end(Counters& counters, std::string_view payload) {
    size_t num = payload.size() < sizeof counters.last ? payload.size() : sizeof counters.last;
    memmove(counters.last, counters.last + num, sizeof counters.last - num);
    memcpy(counters.last + sizeof counters.last - num, payload.data() + payload.size() - num, num);
}

// Takes the chunks that fit from the beginning of `data`. Returns how many bytes those are; `out` is what to send.
size_t take(FastPath* path, Stream* stream, std::string_view data, std::string_view* out) {
    const Pattern& pattern = *stream->pattern;
    size_t place = 0, num_written = 0;
    std::string_view payload;
    while (place < data.size()) {
        size_t length = whole_chunk(data.substr(place), &payload);
        if (length == 0 || !fits(pattern, payload)) break;
        if (pattern.keep == KEEP_FIRST_LINE) {
            size_t line = payload.find('\n') + 1;
            stream->kept.append(payload.substr(0, line));
            payload.remove_prefix(line);
            num_written += framed(path->written + num_written, payload);  // shorter than it came
        } else if (pattern.keep == KEEP_ALL) {
            stream->kept.append(payload);
        }
        stream->counters.sent += payload.size();
        note_end(stream->counters, payload);
        place += length;
    }
    *out = pattern.keep == KEEP_FIRST_LINE ? std::string_view(path->written, num_written) : data.substr(0, place);
    return place;
}

// What has come on one stream. Whether Python has to do something.
bool step(FastPath* path, uint64_t name, Stream* stream, Event* event) {
    *event = Event{static_cast<int64_t>(name), nullptr, 0, nullptr, 0, 0, 0};
    ssize_t num = recv(stream->from, path->read, READ_BYTES, MSG_DONTWAIT);
    if (num < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return false;
    if (num <= 0) {
        watch(path, name, stream, false);
        event->ended = 1;
        return true;
    }
    std::string_view data(path->read, static_cast<size_t>(num)), out;
    size_t taken = 0;
    if (stream->pattern != nullptr) {
        taken = take(path, stream, data, &out);
        stream->counters.received += taken;
        ssize_t sent = out.empty() ? 0 : send(stream->to, out.data(), out.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
        out.remove_prefix(sent > 0 ? static_cast<size_t>(sent) : 0);  // an error is found by who sends the rest
    }
    if (!out.empty() || taken < data.size()) stream->pattern = nullptr;
    event->unsent = out.data(), event->unsent_bytes = static_cast<int64_t>(out.size());
    event->unread = data.data() + taken, event->unread_bytes = static_cast<int64_t>(data.size() - taken);
    event->kept_much = stream->kept.size() > KEPT_BYTES;
    return stream->pattern == nullptr || event->kept_much;
}

}  // namespace

extern "C" {

// Null if there is no descriptor left.
FastPath* fast_path_open() {
    int epoll = epoll_create1(EPOLL_CLOEXEC);
    if (epoll < 0) return nullptr;
    FastPath* path = new FastPath;
    path->epoll = epoll;
    return path;
}

int fast_path_fd(FastPath* path) { return path->epoll; }

void fast_path_close(FastPath* path) {
    close(path->epoll);
    delete path;
}

const Pattern* fast_path_pattern(FastPath* path, const char* prefix, int32_t keep, const char** stops, int32_t num_stops) {
    auto pattern = std::make_unique<Pattern>(Pattern{prefix, keep, {}});
    for (int32_t place = 0; place < num_stops; place++) pattern->stops.emplace_back(stops[place]);
    path->patterns.push_back(std::move(pattern));
    return path->patterns.back().get();
}

// The stream's name; -1 if it cannot be watched.
int64_t fast_path_add(FastPath* path, int from, int to, Counters** counters) {
    uint32_t place;
    if (path->free_places.empty()) {
        place = static_cast<uint32_t>(path->streams.size());
        path->streams.push_back(std::make_unique<Stream>());
        path->streams[place]->generation = 0;
    } else {
        place = path->free_places.back();
        path->free_places.pop_back();
        uint32_t generation = path->streams[place]->generation;
        path->streams[place] = std::make_unique<Stream>();
        path->streams[place]->generation = (generation + 1) & 0x7fffffff;
    }
    Stream* stream = path->streams[place].get();
    stream->from = from, stream->to = to;
    *counters = &stream->counters;
    uint64_t name = name_of(place, *stream);
    watch(path, name, stream, true);
    if (stream->watched) return static_cast<int64_t>(name);
    stream->used = false;
    path->free_places.push_back(place);
    return -1;
}

// Whether it is watched now.
int32_t fast_path_watch(FastPath* path, int64_t name, int32_t on) {
    Stream* stream = find(path, static_cast<uint64_t>(name));
    if (stream == nullptr) return 0;
    watch(path, static_cast<uint64_t>(name), stream, on);
    return stream->watched;
}

void fast_path_quick(FastPath* path, int64_t name, const Pattern* pattern) {
    if (Stream* stream = find(path, static_cast<uint64_t>(name))) stream->pattern = pattern;
}

// What was kept since it was last taken; valid until the next call for this stream.
int64_t fast_path_kept(FastPath* path, int64_t name, const char** kept) {
    Stream* stream = find(path, static_cast<uint64_t>(name));
    if (stream == nullptr) return 0;
    stream->taken.swap(stream->kept);
    stream->kept.clear();
    *kept = stream->taken.data();
    return static_cast<int64_t>(stream->taken.size());
}

// Before either socket is closed.
void fast_path_remove(FastPath* path, int64_t name) {
    Stream* stream = find(path, static_cast<uint64_t>(name));
    if (stream == nullptr) return;
    watch(path, static_cast<uint64_t>(name), stream, false);
    stream->used = false;
    stream->kept = stream->taken = std::string();
    path->free_places.push_back(static_cast<uint32_t>(name));
}

// 1: there is something to do for Python, which calls again; 0: that was all for this turn of the event loop, in which
// each stream is read once at most, so that a stream that never pauses does not keep the loop from all else.
int32_t fast_path_run(FastPath* path, Event* event) {
    if (!path->in_batch) {
        int num = epoll_wait(path->epoll, path->events, BATCH, 0);
        path->num_events = num > 0 ? num : 0, path->next_event = 0;
        path->in_batch = true;
    }
    while (path->next_event < path->num_events) {
        uint64_t name = path->events[path->next_event++].data.u64;
        Stream* stream = find(path, name);
        if (stream != nullptr && stream->watched && step(path, name, stream, event)) return 1;
    }
    path->in_batch = false;
    return 0;
}

}  // extern "C"
