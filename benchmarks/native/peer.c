/* The processes around a router that is measured, which must not be what the figures show: instances that compute
   nothing, and clients.

       peer instance prefill|decode               serves HTTP until killed; prints its port
       peer load PORT CLIENTS ROUNDS SPACING_US TOKENS RATE
                                                  CLIENTS connections, each one request a round; in a round each begins
                                                  SPACING_US after the one before (0: all at once). TOKENS 0: whole
                                                  answers of 8 tokens, else streams of so many at RATE tokens a second.

   `load` prints for each request a line: microseconds to the answer's first piece of body, then between two pieces.
   One thread, epoll, HTTP/1.1 with Content-Length (requests) and chunks (streams), keep-alive. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define ROOM 65536
#define MOST_CONNECTIONS 4096
#define PATIENCE_US 60e6

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static double now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

typedef struct {
    int fd;
    int used;
    char in[ROOM];
    /* an instance's stream */
    int left, total, marked;
    double begun, gap;
    /* a client's request */
    int pieces, body_begun, chunked;
    double last;
    long body_left;
} Peer;

static Peer *peers[MOST_CONNECTIONS];

static void send_all(Peer *p, const char *data, size_t size) {
    while (size) {
        ssize_t sent = send(p->fd, data, size, MSG_NOSIGNAL);
        if (sent < 0 && (errno == EAGAIN || errno == EINTR)) {
            usleep(50);
            continue;
        }
        if (sent < 0)
            return; /* the reader will see the end */
        data += sent;
        size -= sent;
    }
}

static Peer *added(int epoll, int fd) {
    int one = 1;
    if (fd >= MOST_CONNECTIONS)
        fail("too many connections");
    fcntl(fd, F_SETFL, O_NONBLOCK);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    Peer *p = peers[fd] = calloc(1, sizeof *p);
    p->fd = fd;
    struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
    if (epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event))
        fail("epoll_ctl");
    return p;
}

static void dropped(Peer *p) {
    close(p->fd);
    peers[p->fd] = NULL;
    free(p);
}

/* 0: the other side has closed. */
static int filled(Peer *p) {
    ssize_t got = recv(p->fd, p->in + p->used, ROOM - 1 - p->used, 0);
    if (got < 0)
        return errno == EAGAIN || errno == EINTR;
    p->used += got;
    p->in[p->used] = 0;
    return got > 0;
}

static void consumed(Peer *p, size_t size) {
    memmove(p->in, p->in + size, p->used - size + 1);
    p->used -= size;
}

/* ---- an instance ---- */

static const char *EVENT = "data: {\"id\":\"cmpl-1\",\"object\":\"text_completion\",\"created\":1,\"model\":\"m\","
                           "\"choices\":[{\"index\":0,\"text\":\" word\"}]}\n\n";

static void answer(Peer *p, int status, const char *body) {
    char head[256];
    int size = snprintf(head, sizeof head,
                        "HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n", status,
                        strlen(body));
    char whole[4096];
    memcpy(whole, head, size);
    memcpy(whole + size, body, strlen(body));
    send_all(p, whole, size + strlen(body));
}

static void chunk(Peer *p, const char *format, ...) {
    char body[2048], whole[2200];
    va_list rest;
    va_start(rest, format);
    int size = vsnprintf(body, sizeof body, format, rest);
    va_end(rest);
    int all = snprintf(whole, sizeof whole, "%x\r\n%s\r\n", size, body);
    send_all(p, whole, all);
}

static const char *value_of(const char *body, const char *key) {
    char quoted[64];
    snprintf(quoted, sizeof quoted, "\"%s\":", key);
    const char *found = strstr(body, quoted);
    if (!found)
        return "";
    found += strlen(quoted);
    while (*found == ' ')
        found++;
    return found;
}

static void prefilled(Peer *p, const char *body) {
    char transfer[128] = "null", text[1024];
    const char *id = value_of(body, "transfer_id");
    if (*id == '"')
        sscanf(id, "%127[^,}]", transfer);
    snprintf(text, sizeof text,
             "{\"choices\":[{\"text\":\"x\"}],\"kv_transfer_params\":{\"do_remote_prefill\":true,"
             "\"do_remote_decode\":false,\"transfer_id\":%s,\"remote_engine_id\":\"engine-prefill\","
             "\"remote_block_ids\":[[1,2,3]],\"prefill_result\":{\"first_token\":7,\"seed\":%ld}}}",
             transfer, atol(value_of(body, "seed")));
    answer(p, 200, text);
}

static void decoded(Peer *p, const char *head, const char *body) {
    if (strncmp(value_of(body, "stream"), "true", 4)) {
        answer(p, 200,
               "{\"choices\":[{\"index\":0,\"text\":\"done\",\"finish_reason\":\"stop\"}],"
               "\"usage\":{\"total_tokens\":3}}");
        return;
    }
    p->marked = strcasestr(head, PROGRESS_HEADER ":") != NULL;
    p->total = p->left = atoi(value_of(body, "max_tokens"));
    p->gap = 1e6 / atof(value_of(body, "prompt") + 1);
    p->begun = now_us();
    char start[512];
    int size = snprintf(start, sizeof start,
                        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n%stransfer-encoding: chunked\r\n\r\n",
                        p->marked ? PROGRESS_HEADER ": 1\r\n" : "");
    send_all(p, start, size);
    chunk(p, "%s%s", p->marked ? ": {\"seed\":1234567890123,\"created\":1790000000,\"num_cached_tokens\":0}\n" : "",
          EVENT);
    p->left--;
}

static void streamed(Peer *p) {
    if (--p->left > 0) {
        chunk(p, "%s%s", p->marked ? ": {\"tokens\":[12345]}\n" : "", EVENT);
        return;
    }
    chunk(p, "%s%sdata: [DONE]\n\n", p->marked ? ": {\"tokens\":[2],\"last\":true}\n" : "", EVENT);
    send_all(p, "0\r\n\r\n", 5);
    p->total = 0;
}

static void asked(Peer *p, const char *role) {
    for (char *end; (end = strstr(p->in, "\r\n\r\n"));) {
        const char *length = strcasestr(p->in, "\r\ncontent-length:");
        long size = length && length < end ? atol(length + 17) : 0, head = end + 4 - p->in;
        if (p->used < head + size)
            return;
        *end = 0;
        const char *body = end + 4, *path = strchr(p->in, ' ');
        if (!path++ || !strncmp(p->in, "PRI ", 4)) { /* HTTP/2: sglang-router asks whether this speaks gRPC */
            p->used = 0;
            shutdown(p->fd, SHUT_RDWR);
            return;
        }
        char kept = p->in[head + size];
        p->in[head + size] = 0;
        char facts[1024];
        if (!strncmp(path, "/v1/completions", 15)) {
            if (*role == 'p')
                prefilled(p, body);
            else
                decoded(p, p->in, body);
        } else if (!strncmp(path, "/kvferry/instance ", 18)) {
            snprintf(facts, sizeof facts,
                     "{\"role\":\"%s\",\"engine_id\":\"engine-%s\",\"kv_host\":\"127.0.0.1\",\"kv_port\":4711,"
                     "\"kv_ranks\":null,\"kv_seal\":\"sealed\",\"connector\":\"P2pConnector\",\"layout\":\"f00d\","
                     "\"model_names\":[\"m\"]}",
                     role, role);
            answer(p, 200, facts);
        } else if (!strncmp(path, "/v1/models", 10))
            answer(p, 200, "{\"object\":\"list\",\"data\":[{\"id\":\"m\",\"object\":\"model\",\"owned_by\":\"kvferry\"}]}");
        else if (!strncmp(path, "/health", 7) || !strncmp(path, "/kvferry/release", 16))
            answer(p, 200, "{\"released\":true}");
        else
            answer(p, 404, "{}");
        p->in[head + size] = kept;
        consumed(p, head + size);
    }
}

static void instance(const char *role) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), epoll = epoll_create1(0);
    if (bind(listener, (void *)&address, size) || listen(listener, 4096))
        fail("listen");
    getsockname(listener, (void *)&address, &size);
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    struct epoll_event event = {.events = EPOLLIN, .data.fd = listener}, ready[256];
    epoll_ctl(epoll, EPOLL_CTL_ADD, listener, &event);
    for (;;) {
        double next = 1e18, now = now_us();
        for (int fd = 0; fd < MOST_CONNECTIONS; fd++) {
            Peer *p = peers[fd];
            while (p && p->total && p->begun + (p->total - p->left) * p->gap <= now)
                streamed(p);
            if (p && p->total && p->begun + (p->total - p->left) * p->gap < next)
                next = p->begun + (p->total - p->left) * p->gap;
        }
        struct timespec wait = {0};
        double left = next - now_us();
        if (left > 0 && next < 1e18) {
            wait.tv_sec = left / 1e6;
            wait.tv_nsec = (left - wait.tv_sec * 1e6) * 1e3;
        }
        int number = epoll_pwait2(epoll, ready, 256, next < 1e18 ? &wait : NULL, NULL);
        for (int at = 0; at < number; at++) {
            int fd = ready[at].data.fd;
            if (fd == listener) {
                while ((fd = accept(listener, NULL, NULL)) >= 0)
                    added(epoll, fd);
            } else if (filled(peers[fd]))
                asked(peers[fd], role);
            else
                dropped(peers[fd]);
        }
    }
}

/* ---- clients ---- */

/* What is to be printed of each client's request. */
static char *kept[MOST_CONNECTIONS];
static size_t kept_size[MOST_CONNECTIONS];

static void noted(Peer *p) {
    double now = now_us();
    char text[32];
    int size = snprintf(text, sizeof text, p->pieces++ ? " %.0f" : "%.0f", now - p->last);
    kept[p->fd] = realloc(kept[p->fd], kept_size[p->fd] + size + 1);
    memcpy(kept[p->fd] + kept_size[p->fd], text, size + 1);
    kept_size[p->fd] += size;
    p->last = now;
}

/* 1: the answer has ended. */
static int read_answer(Peer *p) {
    if (!p->body_begun) {
        char *end = strstr(p->in, "\r\n\r\n");
        if (!end)
            return 0;
        if (strncmp(p->in + 9, "200", 3)) {
            fprintf(stderr, "%.300s\n", p->in);
            exit(1);
        }
        *end = 0;
        const char *length = strcasestr(p->in, "\r\ncontent-length:");
        p->chunked = !length;
        p->body_left = length ? atol(length + 17) : 0;
        p->body_begun = 1;
        consumed(p, end + 4 - p->in);
    }
    if (!p->chunked) {
        if (p->used < p->body_left)
            return 0;
        noted(p);
        consumed(p, p->body_left);
        return 1;
    }
    for (char *end; (end = strstr(p->in, "\r\n"));) {
        long size = strtol(p->in, NULL, 16), whole = end + 2 - p->in + size + 2;
        if (p->used < whole)
            return 0;
        int last = size == 0;
        if (!last)
            noted(p);
        consumed(p, whole);
        if (last)
            return 1;
    }
    return 0;
}

static void load(int port, int clients, int rounds, double spacing, int tokens, double rate) {
    int epoll = epoll_create1(0);
    Peer **all = calloc(clients, sizeof *all);
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK), .sin_port = htons(port)};
    char words[1024] = "", body[2048], request[4096];
    for (int at = 0; at < 200; at++)
        strcat(words, "a ");
    snprintf(body, sizeof body, "{\"model\":\"m\",\"prompt\":\"%g %s\",\"max_tokens\":%d%s}", rate, words,
             tokens ? tokens : 8, tokens ? ",\"stream\":true" : "");
    int size = snprintf(request, sizeof request,
                        "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:%d\r\ncontent-type: application/json\r\n"
                        "content-length: %zu\r\n\r\n%s",
                        port, strlen(body), body);
    for (int at = 0; at < clients; at++) {
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(fd, (void *)&address, sizeof address))
            fail("connect");
        all[at] = added(epoll, fd);
    }
    struct epoll_event ready[256];
    for (int round = 0; round < rounds; round++) {
        int begun = 0, done = 0;
        double first = now_us() + 1000;
        while (done < clients) {
            double now = now_us();
            for (; begun < clients && first + begun * spacing <= now; begun++) {
                Peer *p = all[begun];
                p->pieces = p->body_begun = 0;
                p->last = now_us();
                send_all(p, request, size);
            }
            double left = begun < clients ? first + begun * spacing - now_us() : PATIENCE_US;
            struct timespec wait = {0};
            if (left > 0) {
                wait.tv_sec = left / 1e6;
                wait.tv_nsec = (left - wait.tv_sec * 1e6) * 1e3;
            }
            int number = epoll_pwait2(epoll, ready, 256, &wait, NULL);
            if (!number && begun == clients && left >= PATIENCE_US) {
                fprintf(stderr, "no answer came for too long\n");
                exit(1);
            }
            for (int at = 0; at < number; at++) {
                Peer *p = peers[ready[at].data.fd];
                if (!filled(p)) {
                    fprintf(stderr, "the connection was closed\n");
                    exit(1);
                }
                done += read_answer(p);
            }
        }
        for (int at = 0; at < clients; at++) {
            puts(kept[all[at]->fd]);
            kept_size[all[at]->fd] = 0;
        }
    }
}

int main(int argc, char **argv) {
    if (argc == 3 && !strcmp(argv[1], "instance"))
        instance(argv[2]);
    else if (argc == 8 && !strcmp(argv[1], "load"))
        load(atoi(argv[2]), atoi(argv[3]), atoi(argv[4]), atof(argv[5]), atoi(argv[6]), atof(argv[7]));
    else
        return fprintf(stderr, "usage: peer instance ROLE | peer load PORT CLIENTS ROUNDS SPACING_US TOKENS RATE\n"), 2;
    return 0;
}
