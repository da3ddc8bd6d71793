/* Many streams at once, for next to nothing, and how late their tokens come.
 *
 *   streams PORT STREAMS SECONDS [--tokens N] [--warm SECONDS] [--key KEY]
 *
 * Opens that many connections to 127.0.0.1:PORT, evenly over the time of warming up (5 s), and asks each for one
 * stream after another. Tokens carry the time at which bench/native/engine.c sent them; once warm, this counts for
 * SECONDS how long each was under way, and by how much the gap between two tokens of one stream was longer when they
 * came than when they were sent.
 *
 * Prints one JSON line: tokens, streams that ended, errors, percentiles in microseconds (`delay`, `gap`), the share of
 * one core that this process took (`cpu`).
 */
#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define LONGEST_US 2000000
#define KEPT 64
#define DIGITS 19
#define END "\r\n0\r\n\r\n"

typedef struct {
  char kept[KEPT]; /* the end of what came before */
  size_t kept_size;
  long sent, came; /* of the token before, ns; 0 before the first */
  char headed;     /* whether the reply's first bytes were seen */
} Stream;

typedef struct {
  unsigned *of; /* counts by microsecond */
  unsigned long all;
  long most;
} Histogram;

static Stream *streams;
static Histogram delays, gaps;
static unsigned long ended, errors;
static int poller, counting;
static char request[1024];
static size_t request_size;
static struct sockaddr_in there = {.sin_family = AF_INET};

static long now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000L + t.tv_nsec;
}

static double cpu(void) {
  struct rusage used;
  getrusage(RUSAGE_SELF, &used);
  return used.ru_utime.tv_sec + used.ru_stime.tv_sec + (used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6;
}

static void note(Histogram *h, long ns) {
  long us = ns < 0 ? 0 : ns / 1000;
  if (us > h->most) h->most = us;
  h->of[us < LONGEST_US ? us : LONGEST_US - 1]++;
  h->all++;
}

static long percentile(const Histogram *h, double share) {
  unsigned long want = h->all * share, seen = 0;
  for (long us = 0; us < LONGEST_US; us++)
    if ((seen += h->of[us]) > want) return us;
  return h->most;
}

static void print(const char *name, const Histogram *h) {
  printf("\"%s\":{\"p50\":%ld,\"p90\":%ld,\"p99\":%ld,\"p999\":%ld,\"max\":%ld},", name, percentile(h, .5), percentile(h, .9), percentile(h, .99), percentile(h, .999), h->most);
}

static void ask(int fd, Stream *s) {
  memset(s, 0, sizeof *s);
  if (send(fd, request, request_size, MSG_NOSIGNAL) != (ssize_t)request_size) errors++;
}

static int open_one(void) {
  int one = 1, fd = socket(AF_INET, SOCK_STREAM, 0);
  if (fd < 0 || connect(fd, (void *)&there, sizeof there)) return perror("streams"), -1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  return fd;
}

static void watch(int fd, int number) {
  struct epoll_event event = {.events = EPOLLIN, .data.u64 = (unsigned long)number << 32 | fd};
  epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event);
}

static void token(Stream *s, const char *digits, long at) {
  long sent = 0;
  for (int i = 0; i < DIGITS; i++) sent = sent * 10 + digits[i] - '0';
  if (counting) {
    note(&delays, at - sent);
    if (s->sent) note(&gaps, (at - s->came) - (sent - s->sent));
  }
  s->sent = sent, s->came = at;
}

static void again(int fd, int number) {
  errors++;
  close(fd);
  if ((fd = open_one()) < 0) exit(1);
  watch(fd, number);
  ask(fd, &streams[number]);
}

static void take(int fd, int number) {
  static char data[KEPT + 65536];
  Stream *s = &streams[number];
  memcpy(data, s->kept, s->kept_size);
  ssize_t got = recv(fd, data + s->kept_size, 65536, MSG_DONTWAIT);
  if (got < 0 && errno == EAGAIN) return;
  if (got <= 0) return again(fd, number);
  long at = now();
  char *from = data, *stop = data + s->kept_size + got, *mark;
  if (!s->headed && stop - data >= 12) {
    if (memcmp(data, "HTTP/1.1 200", 12)) return again(fd, number);
    s->headed = 1;
  }
  while ((mark = memchr(from, '@', stop - from)) && stop - mark > DIGITS) {
    token(s, mark + 1, at);
    from = mark + 1 + DIGITS;
  }
  size_t end = strlen(END);
  if (stop - data >= (ssize_t)end && !memcmp(stop - end, END, end)) {
    ended += counting;
    ask(fd, s);
    return;
  }
  s->kept_size = stop - from < KEPT ? stop - from : KEPT;
  memcpy(s->kept, stop - s->kept_size, s->kept_size);
}

static void run(long until) {
  struct epoll_event events[512];
  for (long left; (left = until - now()) > 0;) {
    int n = epoll_wait(poller, events, 512, left / 1000000 + 1);
    for (int i = 0; i < n; i++) take(events[i].data.u64 & 0xffffffff, events[i].data.u64 >> 32);
  }
}

int main(int count, char **args) {
  double warm = 5;
  int tokens = 500;
  const char *key = "";
  if (count < 4) return fprintf(stderr, "usage: streams PORT STREAMS SECONDS [--tokens N] [--warm SECONDS] [--key KEY]\n"), 2;
  int many = atoi(args[2]);
  double seconds = atof(args[3]);
  there.sin_port = htons(atoi(args[1]));
  there.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  for (int i = 4; i < count; i++) {
    if (i + 1 < count && !strcmp(args[i], "--tokens")) tokens = atoi(args[++i]);
    else if (i + 1 < count && !strcmp(args[i], "--warm")) warm = atof(args[++i]);
    else if (i + 1 < count && !strcmp(args[i], "--key")) key = args[++i];
    else return fprintf(stderr, "streams: %s is none of its options\n", args[i]), 2;
  }
  if (many < 1 || seconds <= 0) return fprintf(stderr, "streams: STREAMS and SECONDS must be above 0\n"), 2;
  signal(SIGPIPE, SIG_IGN);
  struct rlimit files;
  getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = files.rlim_max;
  setrlimit(RLIMIT_NOFILE, &files);
  char body[512];
  int size = sprintf(body, "{\"model\":\"smollm2\",\"messages\":[{\"role\":\"user\",\"content\":\"Summarise the plot of Hamlet in three sentences.\"}],\"max_tokens\":%d,\"stream\":true}", tokens);
  request_size = snprintf(request, sizeof request, "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\nauthorization: Bearer %s\r\ncontent-length: %d\r\n\r\n%s", key, size, body);
  if (request_size >= sizeof request) return fprintf(stderr, "streams: --key is too long\n"), 2;
  delays.of = calloc(LONGEST_US, sizeof *delays.of), gaps.of = calloc(LONGEST_US, sizeof *gaps.of);
  streams = calloc(many, sizeof *streams);
  if (!delays.of || !gaps.of || !streams) abort();
  poller = epoll_create1(0);
  long began = now(), ready = began + warm * 1e9;
  for (int i = 0; i < many; i++) {
    int fd = open_one();
    if (fd < 0) return 1;
    ask(fd, &streams[i]);
    watch(fd, i);
    run(began + (long)(warm * .6e9 * (i + 1) / many));
  }
  run(ready);
  errors = 0, counting = 1;
  long from = now();
  double used = cpu();
  run(from + (long)(seconds * 1e9));
  double took = (now() - from) / 1e9;
  printf("{\"streams\":%d,\"seconds\":%.3f,\"tokens\":%lu,\"ended\":%lu,\"errors\":%lu,", many, took, delays.all, ended, errors);
  print("delay", &delays), print("gap", &gaps);
  printf("\"cpu\":%.3f}\n", (cpu() - used) / took);
  return 0;
}
