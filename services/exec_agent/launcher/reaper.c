/* One command: starts it, follows it and all its descendants to their end, and obeys the agent meanwhile. */
#define _GNU_SOURCE
#include "launcher.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { OPEN_FILES = 65536, BIG_STACK = 64 << 20, RETRY_FIRST_MS = 2, RETRY_LAST_MS = 50 };
enum { SPEC_USER = 1, SPEC_MEMFD = 2, SPEC_BIG = 4, SPEC_TTY = 8 };
enum { EXIT_TREE_EMPTY = 1, EXIT_CHILD_KILLED = 2 };
enum { TARGET_TREE = 1, TARGET_LEADER };

/* From the agent. Followed by ngroups ids, then NUL-terminated strings: cwd, argc arguments, envc variables. */
struct spec { uint32_t size, flags, uid, gid, ngroups, argc, envc; };
struct order { uint32_t target; int32_t signo; };
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
  if (spec->flags & SPEC_TTY && ioctl(0, TIOCSCTTY, 0)) {
    *failure = (struct failure){STAGE_TTY, errno};
    return;
  }
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

/* Follows the command until no descendant is left. */
static void watch(struct job *job, int signals) {
  int wait_ms = RETRY_FIRST_MS;
  for (;;) {
    struct pollfd polled[2] = {{.fd = signals, .events = POLLIN}, {.fd = job->control, .events = POLLIN}};
    int ready = poll(polled, 2, job->killing ? wait_ms : -1);
    struct signalfd_siginfo info;
    while (read(signals, &info, sizeof info) == sizeof info) {}
    if (reap(job)) return;
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

/* Runs one command and what it leaves behind. */
int run_job(char *text, size_t size, const int *fds, int count, int signals) {
  struct job job = {.in = fds[0], .out = fds[1], .err = fds[2], .control = fds[FD_CONTROL]};
  volatile struct failure failure = {0, 0};
  int mapped = size >= sizeof(struct spec) && ((struct spec *)text)->flags & SPEC_MEMFD && count == FDS_MOST;
  if (mapped) {
    size = ((struct spec *)text)->size;
    text = mmap(NULL, size, PROT_READ, MAP_PRIVATE, fds[FD_MEMORY], 0);
  }
  if (text == MAP_FAILED || !read_spec(&job, text, size)) failure.stage = STAGE_SPEC, failure.error = EINVAL;
  else job.leader = start_command(&job, (struct failure *)&failure);
  for (int i = 0; i < count; i++)
    if (i != FD_CONTROL) close(fds[i]);
  free(job.argv);
  if (mapped && text != MAP_FAILED) munmap(text, size);
  if (failure.stage) {
    if (job.leader > 0) waitpid(job.leader, NULL, 0);
    report(&job, (struct event){.kind = EVENT_FAILED, .a = failure.stage, .b = failure.error});
  } else {
    report(&job, (struct event){.kind = EVENT_STARTED, .a = job.leader, .b = getpid()});
    watch(&job, signals);
  }
  if (job.control >= 0) close(job.control);
  return !job.killing; /* killing ties this process to one processor */
}
