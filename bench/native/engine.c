/* An engine that costs next to nothing: the gateway before it is what gets measured.
 *
 *   engine PORT [--tokens N] [--gap US] [--first US] [--step]
 *
 * One thread, epoll, HTTP/1.1 with keep-alive on 127.0.0.1. A POST whose body holds "stream":true is answered by N
 * events of one token each (or as many as the body's max_tokens asks for), any other by a whole JSON reply. Without
 * --gap a stream is one burst; with it, tokens are so many microseconds apart, the first one --first (else the gap)
 * after the request, and a JSON reply comes when its last token would. Each stream keeps its own phase; with --step
 * all streams get their tokens at the same instants, as the sequences of one batch do. A request that holds "[at once]"
 * is answered at once all the same; in a message, since there are gateways that drop fields.
 *
 * A token's text is "@" and the CLOCK_MONOTONIC nanoseconds at which it was handed to the kernel, 19 digits, so that
 * whoever reads it on this machine knows how long it took.
 *
 * GET /stats: requests, tokens, aborted (clients that left before the end), active, cpu_us of this process.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#define CONNECTIONS 32768
#define TICK_NS 500000L
#define HEAD "\"id\":\"chatcmpl-0123456789abcdef0123456789abcdef\",\"object\":\"chat.completion%s\",\"created\":1790000000,\"model\":\"smollm2\""
#define MARK '@'
#define DIGITS 19

typedef struct {
  char *in, *out;
  size_t in_size, in_room, out_size, out_room;
  long due;  /* of the next token, ns */
  int left;  /* tokens to come */
  int asked; /* tokens of this reply */
  int place; /* in `busy`, -1 where it waits for nothing */
  char stream, usage, writing;
} Connection;

static Connection *all[CONNECTIONS];
static int busy[CONNECTIONS], busy_count;
static int poller, timer, step, tokens = 64;
static long gap, first = -1;
static unsigned long requests, emitted, aborted;
static char chunk[1024], opening[1024];
static size_t chunk_size, chunk_mark, opening_size;

static long now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000L + t.tv_nsec;
}

static void watch(int fd, int operation, unsigned events) {
  struct epoll_event event = {.events = events, .data.fd = fd};
  epoll_ctl(poller, operation, fd, &event);
}

static void ticking(int on) {
  struct itimerspec every = {0};
  if (on) every.it_interval.tv_nsec = every.it_value.tv_nsec = TICK_NS;
  timerfd_settime(timer, 0, &every, NULL);
}

static void room(char **buffer, size_t *have, size_t want) {
  if (*have >= want) return;
  *have = want * 2;
  if (!(*buffer = realloc(*buffer, *have))) abort();
}

static void put(int fd, const char *data, size_t size) {
  Connection *c = all[fd];
  if (!c->writing) {
    ssize_t sent = send(fd, data, size, MSG_NOSIGNAL);
    if (sent < 0) sent = 0;
    if ((size_t)sent == size) return;
    data += sent, size -= sent;
    c->writing = 1;
    watch(fd, EPOLL_CTL_MOD, EPOLLIN | EPOLLOUT | EPOLLRDHUP);
  }
  room(&c->out, &c->out_room, c->out_size + size);
  memcpy(c->out + c->out_size, data, size);
  c->out_size += size;
}

static void put_on(int fd) {
  Connection *c = all[fd];
  ssize_t sent = send(fd, c->out, c->out_size, MSG_NOSIGNAL);
  if (sent <= 0) return;
  memmove(c->out, c->out + sent, c->out_size -= sent);
  if (c->out_size) return;
  c->writing = 0;
  watch(fd, EPOLL_CTL_MOD, EPOLLIN | EPOLLRDHUP);
}

static void begin(int fd, long due) {
  Connection *c = all[fd];
  c->due = due;
  c->place = busy_count;
  if (!busy_count) ticking(1);
  busy[busy_count++] = fd;
}

static void finish(int fd) {
  Connection *c = all[fd];
  int last = busy[--busy_count];
  busy[c->place] = last;
  all[last]->place = c->place;
  c->place = -1;
  if (!busy_count) ticking(0);
}

static size_t framed(char *to, const char *data) { return sprintf(to, "%zx\r\n%s\r\n", strlen(data), data); }

static size_t token(char *to, long at) {
  memcpy(to, chunk, chunk_size);
  for (int i = DIGITS; i--; at /= 10) to[chunk_mark + 1 + i] = '0' + at % 10;
  return chunk_size;
}

static size_t ending(char *to, const Connection *c) {
  char event[400];
  char *at = to;
  sprintf(event, "data: {" HEAD ",\"choices\":[{\"index\":0,\"delta\":{},\"logprobs\":null,\"finish_reason\":\"length\"}]}\n\n", ".chunk");
  at += framed(at, event);
  if (c->usage) {
    sprintf(event, "data: {" HEAD ",\"choices\":[],\"usage\":{\"prompt_tokens\":24,\"total_tokens\":%d,\"completion_tokens\":%d}}\n\n", ".chunk", 24 + c->asked, c->asked);
    at += framed(at, event);
  }
  at += framed(at, "data: [DONE]\n\n");
  return at - to + sprintf(at, "0\r\n\r\n");
}

static void whole(int fd, const char *type, const char *body) {
  char reply[4096];
  put(fd, reply, snprintf(reply, sizeof reply, "HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %zu\r\n\r\n%s", type, strlen(body), body));
}

static void completion(int fd) {
  char body[2048];
  int asked = all[fd]->asked;
  snprintf(body, sizeof body,
           "{" HEAD ",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"The prince of Denmark learns that his uncle killed his "
           "father, hesitates, and takes his revenge too late to live.\",\"refusal\":null,\"annotations\":null,\"audio\":null,\"function_call\":null,"
           "\"tool_calls\":[],\"reasoning\":null},\"logprobs\":null,\"finish_reason\":\"stop\",\"stop_reason\":null,\"token_ids\":null}],"
           "\"service_tier\":null,\"system_fingerprint\":null,\"usage\":{\"prompt_tokens\":24,\"total_tokens\":%d,\"completion_tokens\":%d,"
           "\"prompt_tokens_details\":null},\"prompt_logprobs\":null,\"prompt_token_ids\":null,\"kv_transfer_params\":null}",
           "", 24 + asked, asked);
  emitted += asked;
  whole(fd, "application/json", body);
}

static void burst(int fd) {
  Connection *c = all[fd];
  char *data = malloc(c->asked * chunk_size + 2048), *at = data;
  if (!data) abort();
  long at_once = now();
  for (int i = 0; i < c->asked; i++) at += token(at, at_once);
  at += ending(at, c);
  emitted += c->asked;
  put(fd, data, at - data);
  free(data);
}

static void ask(int fd, const char *body, size_t size) {
  Connection *c = all[fd];
  const char *limit = memmem(body, size, "\"max_tokens\":", 13), *newer = memmem(body, size, "\"max_completion_tokens\":", 24);
  c->asked = limit ? atoi(limit + 13) : newer ? atoi(newer + 24) : tokens;
  if (c->asked < 1) c->asked = 1;
  c->stream = memmem(body, size, "\"stream\":true", 13) || memmem(body, size, "\"stream\": true", 14);
  c->usage = memmem(body, size, "include_usage\":true", 19) || memmem(body, size, "include_usage\": true", 20);
  requests++;
  if (c->stream) put(fd, opening, opening_size);
  if (gap && !memmem(body, size, "[at once]", 9)) {
    long due = now() + (first >= 0 ? first : gap);
    c->left = c->stream ? c->asked : 1;
    if (!c->stream) due += gap * (c->asked - 1);
    begin(fd, step ? (due / gap + 1) * gap : due);
  } else if (c->stream)
    burst(fd);
  else
    completion(fd);
}

static void get(int fd, const char *target) {
  char body[1024];
  if (!strncmp(target, "/v1/models ", 11))
    whole(fd, "application/json", "{\"object\":\"list\",\"data\":[{\"id\":\"smollm2\",\"object\":\"model\",\"created\":1790000000,\"owned_by\":\"vllm\",\"root\":\"smollm2\",\"max_model_len\":8192}]}");
  else if (!strncmp(target, "/metrics ", 9)) {
    snprintf(body, sizeof body, "vllm:num_requests_running{model_name=\"smollm2\"} %d\nvllm:num_requests_waiting{model_name=\"smollm2\"} 0\nvllm:kv_cache_usage_perc{model_name=\"smollm2\"} 0.1\nvllm:generation_tokens_total{model_name=\"smollm2\"} %lu\n", busy_count, emitted);
    whole(fd, "text/plain; version=0.0.4", body);
  } else if (!strncmp(target, "/stats ", 7)) {
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    long cpu = (used.ru_utime.tv_sec + used.ru_stime.tv_sec) * 1000000L + used.ru_utime.tv_usec + used.ru_stime.tv_usec;
    snprintf(body, sizeof body, "{\"requests\":%lu,\"tokens\":%lu,\"aborted\":%lu,\"active\":%d,\"cpu_us\":%ld}", requests, emitted, aborted, busy_count, cpu);
    whole(fd, "application/json", body);
  } else
    whole(fd, "application/json", "{}");
}

/* Answers one whole request of what has come, if there is one and none is being answered. */
static int next(int fd) {
  Connection *c = all[fd];
  char *end, *body, *chunks_end;
  size_t size = 0;
  if (c->place >= 0 || !(end = memmem(c->in, c->in_size, "\r\n\r\n", 4))) return 0;
  body = end + 4;
  int chunked = 0;
  for (char *line = c->in; line < end;) {
    char *stop = memmem(line, end + 2 - line, "\r\n", 2);
    if (!strncasecmp(line, "content-length:", 15)) size = strtoul(line + 15, NULL, 10);
    if (!strncasecmp(line, "transfer-encoding:", 18)) chunked = 1;
    line = stop + 2;
  }
  size_t have = c->in + c->in_size - body;
  if (chunked) {
    if (have < 5 || !(chunks_end = memmem(body, have, "\r\n0\r\n\r\n", 7))) return 0;
    size = chunks_end + 7 - body;
  }
  if (have < size) return 0;
  if (!strncmp(c->in, "GET ", 4))
    get(fd, c->in + 4);
  else
    ask(fd, body, size);
  memmove(c->in, body + size, c->in_size = have - size);
  return 1;
}

static void drop(int fd) {
  Connection *c = all[fd];
  if (c->place >= 0) aborted++, finish(fd);
  free(c->in), free(c->out), free(c);
  all[fd] = NULL;
  close(fd);
}

static void tick(void) {
  unsigned long long times;
  char data[2048];
  if (read(timer, &times, sizeof times) < 0) return;
  long at = now();
  for (int i = busy_count; i-- > 0;) {
    int fd = busy[i];
    Connection *c = all[fd];
    if (c->due > at) continue;
    if (!c->stream) {
      finish(fd), completion(fd);
    } else {
      while (c->left && c->due <= at) {
        put(fd, data, token(data, now()));
        c->left--, c->due += gap, emitted++;
      }
      if (c->left) continue;
      finish(fd), put(fd, data, ending(data, c));
    }
    while (next(fd)) {}
  }
}

static void come(int listener) {
  int fd, one = 1;
  while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
    if (fd >= CONNECTIONS) { close(fd); continue; }
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (!(all[fd] = calloc(1, sizeof(Connection)))) abort();
    all[fd]->place = -1;
    watch(fd, EPOLL_CTL_ADD, EPOLLIN | EPOLLRDHUP);
  }
}

static void take(int fd) {
  Connection *c = all[fd];
  for (;;) {
    room(&c->in, &c->in_room, c->in_size + 4096);
    ssize_t got = recv(fd, c->in + c->in_size, c->in_room - c->in_size, 0);
    if (got > 0) { c->in_size += got; continue; }
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) break;
    drop(fd);
    return;
  }
  while (next(fd)) {}
}

int main(int count, char **args) {
  if (count < 2 || atoi(args[1]) < 1) return fprintf(stderr, "usage: engine PORT [--tokens N] [--gap US] [--first US] [--step]\n"), 2;
  for (int i = 2; i < count; i++) {
    if (!strcmp(args[i], "--step")) step = 1;
    else if (i + 1 < count && !strcmp(args[i], "--tokens")) tokens = atoi(args[++i]);
    else if (i + 1 < count && !strcmp(args[i], "--gap")) gap = atol(args[++i]) * 1000;
    else if (i + 1 < count && !strcmp(args[i], "--first")) first = atol(args[++i]) * 1000;
    else return fprintf(stderr, "engine: %s is none of its options\n", args[i]), 2;
  }
  if (step && !gap) return fprintf(stderr, "engine: --step needs a --gap\n"), 2;
  signal(SIGPIPE, SIG_IGN);
  struct rlimit files;
  getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = files.rlim_max;
  setrlimit(RLIMIT_NOFILE, &files);

  char event[400];
  sprintf(event, "data: {" HEAD ",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"%c%019d\"},\"logprobs\":null,\"finish_reason\":null}]}\n\n", ".chunk", MARK, 0);
  chunk_size = framed(chunk, event);
  chunk_mark = strchr(chunk, MARK) - chunk;
  sprintf(event, "data: {" HEAD ",\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,\"finish_reason\":null}]}\n\n", ".chunk");
  opening_size = sprintf(opening, "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n");
  opening_size += framed(opening + opening_size, event);

  int one = 1, listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
  setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  struct sockaddr_in here = {.sin_family = AF_INET, .sin_port = htons(atoi(args[1])), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  if (bind(listener, (void *)&here, sizeof here) || listen(listener, 4096)) return perror("engine"), 1;
  poller = epoll_create1(0);
  timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
  watch(listener, EPOLL_CTL_ADD, EPOLLIN);
  watch(timer, EPOLL_CTL_ADD, EPOLLIN);
  for (struct epoll_event events[512];;) {
    int n = epoll_wait(poller, events, 512, -1);
    for (int i = 0; i < n; i++) {
      int fd = events[i].data.fd;
      if (fd == listener) come(fd);
      else if (fd == timer) tick();
      else {
        if (all[fd] && events[i].events & EPOLLOUT) put_on(fd);
        if (all[fd] && events[i].events & ~EPOLLOUT) take(fd);
      }
    }
  }
}
