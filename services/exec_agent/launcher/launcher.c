/*
 * The launcher: the only native code in a sandbox. Static, so that it needs nothing of the image.
 *
 *   launcher init LIFELINE_FD             PID 1: reaps every zombie, ends with the lifeline or on a SIGTERM from outside.
 *   launcher serve SOCKET_FD [CGROUP_FD]  fork server of one agent: for each command a reaper, and below it the command.
 *
 * A reaper is the child subreaper of its command, so every descendant is known and reaped without a cgroup, also those that called setsid
 * or forked twice. It is forked, never executed: a command costs one small fork, one vfork and one exec.
 * The structs below and their Python half (process.py) belong together.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { INLINE_SPEC = 65536, MAX_PID = 1 << 22, KERNEL_SIGNALS = 64, MAX_PASSES = 64 };
enum { OPEN_FILES = 65536, BIG_STACK = 64 << 20, RETRY_FIRST_MS = 2, RETRY_LAST_MS = 50 };
enum { SPEC_USER = 1, SPEC_MEMFD = 2, SPEC_BIG = 4 };
enum { EVENT_STARTED = 1, EVENT_FAILED, EVENT_EXITED, EVENT_EMPTY };
enum { EXIT_TREE_EMPTY = 1, EXIT_CHILD_KILLED = 2 };
enum { STAGE_FORK = 1, STAGE_SPEC, STAGE_USER, STAGE_CWD, STAGE_EXEC, STAGE_INTERPRETER };
enum { TARGET_TREE = 1, TARGET_LEADER };

/* Followed by ngroups ids, then NUL-terminated strings: cwd, argc arguments, envc variables. */
struct spec { uint32_t size, flags, uid, gid, ngroups, argc, envc; };
struct event { uint32_t kind; int32_t a, b; uint32_t flags; uint64_t user_us, system_us, peak_kb; };
struct order { uint32_t target; int32_t signo; };
struct entry { pid_t pid, ppid; };
struct failure { int stage, error; };

/* What a reaper knows of its command. */
struct job {
  struct spec *spec;
  char **argv, **envp;
  const char *cwd;
  int in, out, err, control;
  pid_t leader;
  int leader_done, killing, child_killed;
};

static int proc_fd = -1;

static void close_from(unsigned first, unsigned last) {
  if (first > last || syscall(SYS_close_range, first, last, 0) == 0) return;
  for (unsigned fd = first; fd <= last && fd < 4096; fd++) close((int)fd);
}

/* Keeps 0, 1, 2 (opened if need be) and the given descriptors, and closes the rest. */
static void keep_only(const int *kept, int count) {
  int null = open("/dev/null", O_RDWR | O_CLOEXEC);
  while (null >= 0 && null <= 2) null = open("/dev/null", O_RDWR | O_CLOEXEC);
  if (null > 2) close(null);
  unsigned next = 3;
  for (;;) {
    unsigned lowest = ~0U;
    for (int i = 0; i < count; i++)
      if ((unsigned)kept[i] >= next && (unsigned)kept[i] < lowest) lowest = (unsigned)kept[i];
    if (lowest == ~0U) break;
    close_from(next, lowest - 1);
    next = lowest + 1;
  }
  close_from(next, ~0U);
}

/* Every disposition to its default, every signal blocked: only SIGKILL and SIGSTOP of user code reach us. */
static void quiet_signals(void) {
  struct sigaction standard = {.sa_handler = SIG_DFL};
  for (int number = 1; number <= KERNEL_SIGNALS; number++) sigaction(number, &standard, NULL);
  sigset_t all;
  sigfillset(&all);
  sigprocmask(SIG_SETMASK, &all, NULL);
}

static int child_signals(void) {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGCHLD);
  sigaddset(&set, SIGTERM);
  return signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
}

/* ---------------------------------------------------------------- init */

static int run_init(int lifeline) {
  prctl(PR_SET_DUMPABLE, 0);
  quiet_signals();
  keep_only(&lifeline, 1);
  int signals = child_signals();
  struct pollfd polled[2] = {{.fd = signals, .events = POLLIN}, {.fd = lifeline, .events = POLLIN}};
  char scratch[256];
  for (;;) {
    if (poll(polled, 2, -1) < 0 && errno != EINTR) return 1;
    struct signalfd_siginfo info;
    while (read(signals, &info, sizeof info) == sizeof info)
      /* As PID 1 of a namespace, senders inside it are ignored; one outside has no pid here. */
      if (info.ssi_signo == SIGTERM && (getpid() != 1 || info.ssi_pid == 0)) return 0;
    while (waitpid(-1, NULL, WNOHANG) > 0) {}
    if (polled[1].revents && read(lifeline, scratch, sizeof scratch) <= 0) return 0;
  }
}

/* ---------------------------------------------------------------- the tree of a command */

/* Parent of a process, or -1. */
static pid_t parent_of(pid_t pid) {
  char path[32], text[512];
  snprintf(path, sizeof path, "%d/stat", pid);
  int fd = openat(proc_fd, path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return -1;
  ssize_t size = read(fd, text, sizeof text - 1);
  close(fd);
  if (size <= 0) return -1;
  text[size] = 0;
  char *after = strrchr(text, ')'); /* the name before it may hold anything */
  return after && strlen(after) > 4 ? (pid_t)strtol(after + 4, NULL, 10) : -1;
}

static int marked(const uint8_t *bits, pid_t pid) { return pid > 0 && pid < MAX_PID && bits[pid / 8] >> (pid % 8) & 1; }
static void mark(uint8_t *bits, pid_t pid) { if (pid > 0 && pid < MAX_PID) bits[pid / 8] |= (uint8_t)(1 << (pid % 8)); }

static uint8_t *new_bits(void) {
  void *bits = mmap(NULL, MAX_PID / 8, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return bits == MAP_FAILED ? NULL : bits;
}

/* Lists every process with its parent; returns how many. */
static size_t list_processes(struct entry **entries, size_t *room) {
  int fd = openat(proc_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  DIR *directory = fd < 0 ? NULL : fdopendir(fd);
  if (!directory) return 0;
  size_t count = 0;
  for (struct dirent *found; (found = readdir(directory));) {
    pid_t pid = (pid_t)strtol(found->d_name, NULL, 10), parent;
    if (pid <= 0 || (parent = parent_of(pid)) < 0) continue;
    if (count == *room) {
      struct entry *grown = realloc(*entries, (*room * 2 + 256) * sizeof **entries);
      if (!grown) break;
      *entries = grown;
      *room = *room * 2 + 256;
    }
    (*entries)[count++] = (struct entry){pid, parent};
  }
  closedir(directory);
  return count;
}

/* Leaves in `entries` the descendants of this process; returns how many. */
static size_t list_tree(struct entry **entries, size_t *room) {
  size_t count = list_processes(entries, room), kept = 0;
  uint8_t *in_tree = new_bits();
  if (!in_tree) return 0;
  mark(in_tree, getpid());
  for (int again = 1; again;) { /* one pass where parents stand before their children, as they mostly do */
    again = 0;
    for (size_t i = 0; i < count; i++) {
      struct entry *e = &(*entries)[i];
      if (marked(in_tree, e->ppid) && !marked(in_tree, e->pid)) mark(in_tree, e->pid), again = 1;
    }
  }
  for (size_t i = 0; i < count; i++)
    if (marked(in_tree, (*entries)[i].ppid)) (*entries)[kept++] = (*entries)[i];
  munmap(in_tree, MAX_PID / 8);
  return kept;
}

/* Signals a listed process. Its number may have gone to another one since: the descriptor pins it, then its parent must still be the same. */
static void signal_listed(struct entry e, int signo) {
  int fd = (int)syscall(SYS_pidfd_open, e.pid, 0);
  if (fd < 0) {
    if (errno == ENOSYS && parent_of(e.pid) == e.ppid) kill(e.pid, signo);
    return;
  }
  if (parent_of(e.pid) == e.ppid) syscall(SYS_pidfd_send_signal, fd, signo, NULL, 0);
  close(fd);
}

/* Signals every descendant once, looking again until no new one is found. */
static void signal_tree(int signo, pid_t leader) {
  struct entry *entries = NULL;
  size_t room = 0;
  uint8_t *sent = new_bits();
  if (proc_fd < 0 || !sent) {
    if (leader > 0) kill(-leader, signo); /* without /proc its session's first group is all that is known */
    return;
  }
  for (int pass = 0, fresh = 1; fresh && pass < MAX_PASSES; pass++) {
    fresh = 0;
    size_t count = list_tree(&entries, &room);
    for (size_t i = 0; i < count; i++) {
      if (marked(sent, entries[i].pid)) continue;
      mark(sent, entries[i].pid);
      signal_listed(entries[i], signo);
      fresh = 1;
    }
  }
  free(entries);
  munmap(sent, MAX_PID / 8);
}

/* Stopped processes do not fork, so the second round finds them all. The caller repeats until there are no children. */
static void kill_tree(pid_t leader) {
  signal_tree(SIGSTOP, leader);
  signal_tree(SIGKILL, leader);
}

/* ---------------------------------------------------------------- the command */

/* execvpe over the command's own PATH, which also tells a missing program from a missing interpreter. */
static void search_and_exec(struct job *job, struct failure *failure) {
  const char *name = job->argv[0], *path = "/usr/local/bin:/usr/bin:/bin";
  char candidate[4096 + 256];
  int denied = 0;
  for (char **e = job->envp; *e; e++)
    if (strncmp(*e, "PATH=", 5) == 0) path = *e + 5;
  if (strchr(name, '/')) path = NULL;
  for (const char *start = path;; start = strchr(start, ':') + 1) {
    if (path) {
      int width = (int)strcspn(start, ":");
      int length = snprintf(candidate, sizeof candidate, "%.*s%s%s", width, start, width ? "/" : "", name);
      if (length < 0 || (size_t)length >= sizeof candidate) candidate[0] = 0;
    }
    const char *program = path ? candidate : name;
    execve(program, job->argv, job->envp);
    int error = errno;
    struct stat status;
    if (error == ENOENT && *program && stat(program, &status) == 0) {
      *failure = (struct failure){STAGE_INTERPRETER, error};
      return;
    }
    if (error == EACCES) denied = 1;
    else if (error != ENOENT && error != ENOTDIR && error != ENAMETOOLONG && error != ELOOP) denied = error;
    if (!path || denied > 1 || !strchr(start, ':')) {
      *failure = (struct failure){STAGE_EXEC, denied > 1 || !path ? error : denied ? EACCES : ENOENT};
      return;
    }
  }
}

static void limit(int which, rlim_t soft, int lower_hard) {
  struct rlimit now;
  if (getrlimit(which, &now)) return;
  if (lower_hard) now.rlim_max = soft;
  now.rlim_cur = soft < now.rlim_max ? soft : now.rlim_max;
  setrlimit(which, &now);
}

/* Runs in the vforked child: shares the reaper's memory, so it only makes system calls. Returns if something failed. */
static void become_command(struct job *job, pid_t reaper, struct failure *failure) {
  const struct spec *spec = job->spec;
  setsid();
  if (dup2(job->in, 0) < 0 || dup2(job->out, 1) < 0 || dup2(job->err, 2) < 0) {
    *failure = (struct failure){STAGE_SPEC, errno};
    return;
  }
  close_from(3, ~0U);
  umask(022);
  limit(RLIMIT_CORE, 0, 1);
  limit(RLIMIT_NOFILE, OPEN_FILES, 0);
  if (spec->flags & SPEC_BIG) limit(RLIMIT_STACK, BIG_STACK, 0); /* the kernel gives arguments a quarter of it */
  if (spec->flags & SPEC_USER) {
    const gid_t *groups = (const gid_t *)(spec + 1);
    if (syscall(SYS_setgroups, spec->ngroups, groups) || syscall(SYS_setresgid, spec->gid, spec->gid, spec->gid) ||
        syscall(SYS_setresuid, spec->uid, spec->uid, spec->uid)) {
      *failure = (struct failure){STAGE_USER, errno};
      return;
    }
  }
  if (chdir(job->cwd)) {
    *failure = (struct failure){STAGE_CWD, errno};
    return;
  }
  /* If somebody kills the reaper, its command does not go on unwatched. */
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != reaper) return;
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, NULL);
  search_and_exec(job, failure);
}

static __attribute__((noinline)) pid_t start_command(struct job *job, struct failure *failure) {
  pid_t reaper = getpid();
  pid_t pid = vfork();
  if (pid == 0) {
    become_command(job, reaper, failure);
    _exit(127);
  }
  if (pid < 0) *failure = (struct failure){STAGE_FORK, errno};
  return pid;
}

/* ---------------------------------------------------------------- the reaper */

static void report(const struct job *job, struct event event) {
  if (job->control >= 0) send(job->control, &event, sizeof event, MSG_NOSIGNAL);
}

/* Reaps what has ended; true when no child is left. */
static int reap(struct job *job) {
  int status, ended = 0, empty = 0;
  struct rusage usage;
  struct event event = {.kind = EVENT_EXITED};
  for (;;) {
    pid_t pid = wait4(-1, &status, WNOHANG, &usage);
    if (pid < 0 && errno == EINTR) continue;
    if (pid < 0) empty = 1;
    if (pid <= 0) break;
    if (pid == job->leader && !job->leader_done) {
      ended = job->leader_done = 1;
      event.a = status;
      event.user_us = (uint64_t)usage.ru_utime.tv_sec * 1000000 + (uint64_t)usage.ru_utime.tv_usec;
      event.system_us = (uint64_t)usage.ru_stime.tv_sec * 1000000 + (uint64_t)usage.ru_stime.tv_usec;
      event.peak_kb = (uint64_t)usage.ru_maxrss;
    } else if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL && !job->killing) {
      job->child_killed = 1;
    }
  }
  if (ended) {
    event.flags = (empty ? EXIT_TREE_EMPTY : 0) | (job->child_killed ? EXIT_CHILD_KILLED : 0);
    report(job, event);
  } else if (empty) {
    report(job, (struct event){.kind = EVENT_EMPTY});
  }
  return empty;
}

/* Obeys the agent's orders; without an agent a command that still runs is killed, what it left behind lives on. */
static void obey(struct job *job) {
  struct order order;
  for (;;) {
    ssize_t size = recv(job->control, &order, sizeof order, MSG_DONTWAIT);
    if (size < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (size != sizeof order) {
      close(job->control);
      job->control = -1;
      if (!job->leader_done) job->killing = 1;
      return;
    }
    if (order.target == TARGET_LEADER) {
      if (!job->leader_done) kill(job->leader, order.signo);
    } else if (order.signo == SIGKILL) {
      job->killing = 1;
    } else {
      signal_tree(order.signo, job->leader_done ? 0 : job->leader);
    }
  }
}

static _Noreturn void watch(struct job *job) {
  int signals = child_signals(), wait_ms = RETRY_FIRST_MS;
  for (;;) {
    struct pollfd polled[2] = {{.fd = signals, .events = POLLIN}, {.fd = job->control, .events = POLLIN}};
    int ready = poll(polled, 2, job->killing ? wait_ms : -1);
    struct signalfd_siginfo info;
    while (read(signals, &info, sizeof info) == sizeof info) {}
    if (reap(job)) _exit(0);
    int was_killing = job->killing;
    if (ready > 0 && polled[1].revents) obey(job);
    if (!job->killing) continue;
    if (was_killing && ready == 0) wait_ms = wait_ms * 2 < RETRY_LAST_MS ? wait_ms * 2 : RETRY_LAST_MS;
    kill_tree(job->leader_done ? 0 : job->leader);
  }
}

/* Points argv, envp and cwd into the spec; false if it is malformed. */
static int read_spec(struct job *job, char *text, size_t size) {
  struct spec *spec = job->spec = (struct spec *)text;
  if (size < sizeof *spec || spec->size != size || text[size - 1] != 0) return 0;
  if (spec->ngroups > 65536 || spec->argc < 1 || spec->argc > 65536 || spec->envc > 65536) return 0;
  char *next = text + sizeof *spec + spec->ngroups * sizeof(uint32_t), *end = text + size;
  char **pointers = calloc((size_t)spec->argc + spec->envc + 2, sizeof *pointers);
  if (!pointers || next >= end) return 0;
  job->cwd = next;
  job->argv = pointers;
  job->envp = pointers + spec->argc + 1;
  next += strlen(next) + 1;
  for (uint32_t i = 0; i < spec->argc + spec->envc; i++) {
    if (next >= end) return 0;
    (i < spec->argc ? job->argv : job->envp - spec->argc)[i] = next;
    next += strlen(next) + 1;
  }
  return next == end;
}

static _Noreturn void run_reaper(char *text, size_t size, const int *fds, int count) {
  struct job job = {.in = fds[0], .out = fds[1], .err = fds[2], .control = fds[3]};
  volatile struct failure failure = {0, 0};
  struct sigaction standard = {.sa_handler = SIG_DFL};
  sigaction(SIGCHLD, &standard, NULL);
  prctl(PR_SET_CHILD_SUBREAPER, 1);
  setsid();
  if (size >= sizeof(struct spec) && ((struct spec *)text)->flags & SPEC_MEMFD && count == 5) {
    size = ((struct spec *)text)->size;
    text = mmap(NULL, size, PROT_READ, MAP_PRIVATE, fds[4], 0);
  }
  if (text == MAP_FAILED || !read_spec(&job, text, size)) failure.stage = STAGE_SPEC, failure.error = EINVAL;
  else job.leader = start_command(&job, (struct failure *)&failure);
  for (int i = 0; i < count; i++)
    if (i != 3) close(fds[i]);
  if (failure.stage) {
    if (job.leader > 0) waitpid(job.leader, NULL, 0);
    report(&job, (struct event){.kind = EVENT_FAILED, .a = failure.stage, .b = failure.error});
    _exit(0);
  }
  report(&job, (struct event){.kind = EVENT_STARTED, .a = job.leader, .b = getpid()});
  free(job.argv);
  if (count == 5) munmap(text, size);
  watch(&job);
}

/* ---------------------------------------------------------------- the fork server */

static int run_server(int sock, int cgroups, char **cgroup_fds) {
  for (int i = 0; i < cgroups; i++) /* from here on this process and all below it are inside the limits */
    if (write(atoi(cgroup_fds[i]), "0", 1) < 0) return 3;
  prctl(PR_SET_DUMPABLE, 0);
  quiet_signals();
  struct sigaction reap_by_kernel = {.sa_handler = SIG_IGN};
  sigaction(SIGCHLD, &reap_by_kernel, NULL);
  setsid();
  keep_only(&sock, 1);
  fcntl(sock, F_SETFD, FD_CLOEXEC);
  proc_fd = open("/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  static _Alignas(16) char text[INLINE_SPEC];
  for (;;) {
    _Alignas(struct cmsghdr) char ancillary[CMSG_SPACE(5 * sizeof(int))];
    struct iovec vector = {text, sizeof text};
    struct msghdr message = {.msg_iov = &vector, .msg_iovlen = 1, .msg_control = ancillary, .msg_controllen = sizeof ancillary};
    ssize_t size = recvmsg(sock, &message, MSG_CMSG_CLOEXEC);
    if (size < 0 && errno == EINTR) continue;
    if (size <= 0) return 0;
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    int count = header && header->cmsg_type == SCM_RIGHTS ? (int)((header->cmsg_len - CMSG_LEN(0)) / sizeof(int)) : 0;
    int fds[5] = {-1, -1, -1, -1, -1};
    if (count > 0) memcpy(fds, CMSG_DATA(header), (size_t)count * sizeof(int));
    pid_t pid = count < 4 ? 0 : fork();
    if (pid == 0 && count >= 4) {
      close(sock);
      run_reaper(text, (size_t)size, fds, count);
    }
    if (pid < 0) {
      struct event failed = {.kind = EVENT_FAILED, .a = STAGE_FORK, .b = errno};
      send(fds[3], &failed, sizeof failed, MSG_NOSIGNAL);
    }
    for (int i = 0; i < count; i++) close(fds[i]);
  }
}

int main(int argc, char **argv) {
  if (argc == 3 && strcmp(argv[1], "init") == 0) return run_init(atoi(argv[2]));
  if (argc >= 3 && strcmp(argv[1], "serve") == 0) return run_server(atoi(argv[2]), argc - 3, argv + 3);
  fputs("usage: launcher init LIFELINE_FD | launcher serve SOCKET_FD [CGROUP_PROCS_FD ...]\n", stderr);
  return 2;
}
