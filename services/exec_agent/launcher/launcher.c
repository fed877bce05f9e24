/*
 * The launcher: the only native code in a sandbox. Static, so that it needs nothing of the image.
 *
 *   launcher init LIFELINE_FD             PID 1: reaps every zombie, ends with the lifeline or on a SIGTERM from outside.
 *   launcher serve SOCKET_FD [CGROUP_FD]  fork server of one agent: for each command a reaper, and below it the command.
 * Under the name `init`:
 *   init [ARGUMENT ...]                   PID 1 of a Pod's container: runs the agent that is beside this program.
 *   init copy FOLDER                      copies itself, the agent and all that it needs.
 *   init check                            does nothing: proof that it can be run.
 *
 * A reaper is the child subreaper of its command, so every descendant is known and reaped without a cgroup, also those that called setsid
 * or forked twice. Reapers are forked ahead of need and used again once their tree is empty: a command costs one vfork and one exec.
 */
#define _GNU_SOURCE
#include "launcher.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { INLINE_SPEC = 65536, MAX_REAPERS = 8192, MAX_IDLE = 4, FORK_RETRY_MS = 20 };
enum { SLOT_FREE, SLOT_IDLE, SLOT_BUSY };

/* Shared by the fork server and its reapers. */
struct pool {
  _Atomic int idle;
  struct { pid_t pid; _Atomic int state; } slots[MAX_REAPERS];
};

static char text[INLINE_SPEC] __attribute__((aligned(16)));

/* ---------------------------------------------------------------- init */

/* A byte is no end, nor is one that another reader of the same pipe was quicker to take. */
static int has_ended(int lifeline) {
  char scratch[256];
  ssize_t size = read(lifeline, scratch, sizeof scratch);
  return size == 0 || (size < 0 && errno != EAGAIN && errno != EINTR);
}

static int run_init(int lifeline) {
  prctl(PR_SET_DUMPABLE, 0);
  quiet_signals();
  keep_only(&lifeline, 1);
  int signals = child_signals();
  struct pollfd polled[2] = {{.fd = signals, .events = POLLIN}, {.fd = lifeline, .events = POLLIN}};
  for (;;) {
    if (poll(polled, 2, -1) < 0) {
      if (errno == EINTR) continue;
      return 1;
    }
    struct signalfd_siginfo info;
    while (read(signals, &info, sizeof info) == sizeof info)
      /* As PID 1 of a namespace, senders inside it are ignored; one outside has no pid here. */
      if (info.ssi_signo == SIGTERM && (getpid() != 1 || info.ssi_pid == 0)) return 0;
    while (waitpid(-1, NULL, WNOHANG) > 0) {}
    if (polled[1].revents && has_ended(lifeline)) return 0;
  }
}

/* ---------------------------------------------------------------- the fork server */

/* Takes one message; returns the number of descriptors that came with it, or -1 when the agent is gone. */
static int receive(int sock, int flags, int *fds, ssize_t *size) {
  _Alignas(struct cmsghdr) char ancillary[CMSG_SPACE(FDS_MOST * sizeof(int))];
  struct iovec vector = {text, sizeof text};
  struct msghdr message = {.msg_iov = &vector, .msg_iovlen = 1, .msg_control = ancillary, .msg_controllen = sizeof ancillary};
  do *size = recvmsg(sock, &message, MSG_CMSG_CLOEXEC | flags);
  while (*size < 0 && errno == EINTR);
  if (*size <= 0) return *size < 0 && errno == EAGAIN ? 0 : -1;
  struct cmsghdr *header = CMSG_FIRSTHDR(&message);
  if (!header || header->cmsg_type != SCM_RIGHTS) return 0;
  int count = (int)((header->cmsg_len - CMSG_LEN(0)) / sizeof(int));
  memcpy(fds, CMSG_DATA(header), (size_t)count * sizeof(int));
  return count;
}

static _Noreturn void run_reaper(struct pool *pool, int slot, int sock, int wanted) {
  prctl(PR_SET_CHILD_SUBREAPER, 1);
  setsid();
  int signals = child_signals(), fds[FDS_MOST];
  for (;;) {
    ssize_t size;
    int count = receive(sock, 0, fds, &size);
    if (count < 0) _exit(0);
    pool->slots[slot].state = SLOT_BUSY;
    if (--pool->idle == 0) eventfd_write(wanted, 1);
    if (count >= FDS_LEAST && !run_job(text, (size_t)size, fds, count, signals)) _exit(0);
    if (pool->idle >= MAX_IDLE) _exit(0);
    pool->slots[slot].state = SLOT_IDLE;
    pool->idle++;
  }
}

/* Forks a reaper; false if there is no room for one more process. */
static int add_reaper(struct pool *pool, int sock, int wanted) {
  int slot = 0;
  while (slot < MAX_REAPERS && pool->slots[slot].state != SLOT_FREE) slot++;
  if (slot == MAX_REAPERS) return errno = EAGAIN, 0;
  pool->slots[slot].state = SLOT_IDLE;
  pool->idle++;
  pid_t pid = fork();
  if (pid == 0) run_reaper(pool, slot, sock, wanted);
  pool->slots[slot].pid = pid;
  if (pid > 0) return 1;
  pool->slots[slot].state = SLOT_FREE;
  pool->idle--;
  return 0;
}

/* Buries reapers that have ended or that user code has killed. */
static void bury_reapers(struct pool *pool) {
  for (pid_t pid; (pid = waitpid(-1, NULL, WNOHANG)) > 0;)
    for (int slot = 0; slot < MAX_REAPERS; slot++)
      if (pool->slots[slot].pid == pid && pool->slots[slot].state != SLOT_FREE) {
        if (pool->slots[slot].state == SLOT_IDLE) pool->idle--;
        pool->slots[slot].state = SLOT_FREE;
        break;
      }
}

/* No process can be made: tell whoever asks, instead of leaving it waiting. */
static int refuse(int sock, int error) {
  struct pollfd polled = {.fd = sock, .events = POLLIN};
  poll(&polled, 1, FORK_RETRY_MS);
  int fds[FDS_MOST];
  ssize_t size;
  int count = receive(sock, MSG_DONTWAIT, fds, &size);
  struct event failed = {.kind = EVENT_FAILED, .a = STAGE_FORK, .b = error};
  if (count >= FDS_LEAST) send(fds[FD_CONTROL], &failed, sizeof failed, MSG_NOSIGNAL);
  for (int i = 0; i < count; i++) close(fds[i]);
  return count;
}

static int run_server(int sock, int cgroups, char **cgroup_fds) {
  for (int i = 0; i < cgroups; i++) /* from here on this process and all below it are inside the limits */
    if (write(atoi(cgroup_fds[i]), "0", 1) < 0) return 3;
  prctl(PR_SET_DUMPABLE, 0);
  quiet_signals();
  setsid();
  keep_only(&sock, 1);
  fcntl(sock, F_SETFD, FD_CLOEXEC);
  open_proc();
  int wanted = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), signals = child_signals();
  struct pool *pool = mmap(NULL, sizeof *pool, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (pool == MAP_FAILED || wanted < 0 || signals < 0) return 4;
  for (;;) {
    if (pool->idle <= 0 && !add_reaper(pool, sock, wanted) && refuse(sock, errno) < 0) return 0;
    struct pollfd polled[3] = {{.fd = wanted, .events = POLLIN}, {.fd = signals, .events = POLLIN}, {.fd = sock}};
    poll(polled, 3, pool->idle > 0 ? -1 : 0);
    eventfd_t ignored;
    eventfd_read(wanted, &ignored);
    struct signalfd_siginfo info;
    while (read(signals, &info, sizeof info) == sizeof info) {}
    if (polled[1].revents || pool->idle <= 0) bury_reapers(pool);
    if (polled[2].revents) return 0;
  }
}

int main(int argc, char **argv) {
  const char *name = argc > 0 ? strrchr(argv[0], '/') : NULL;
  if (name && strcmp(name, "/init") == 0) return run_pod(argc, argv);
  if (argc == 3 && strcmp(argv[1], "init") == 0) return run_init(atoi(argv[2]));
  if (argc >= 3 && strcmp(argv[1], "serve") == 0) return run_server(atoi(argv[2]), argc - 3, argv + 3);
  fputs("usage: launcher init LIFELINE_FD | launcher serve SOCKET_FD [CGROUP_PROCS_FD ...]\n", stderr);
  return 2;
}
