/* Finds and signals every descendant of this process through /proc. */
#define _GNU_SOURCE
#include "launcher.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { MAX_PID = 1 << 22, MAX_PASSES = 64 };

struct entry { pid_t pid, ppid; };
struct list { struct entry *entries; size_t count, room; };

static int proc_fd = -1;

/* Keeps /proc open, so that nobody can unmount it from us. */
void open_proc(void) { proc_fd = open("/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC); }

static int marked(const uint8_t *bits, pid_t pid) { return bits[pid / 8] >> (pid % 8) & 1; }
static void mark(uint8_t *bits, pid_t pid) { bits[pid / 8] |= (uint8_t)(1 << (pid % 8)); }

/* Bits for all pids; only the pages that are used take memory. */
static uint8_t *new_bits(void) {
  void *bits = mmap(NULL, MAX_PID / 8, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return bits == MAP_FAILED ? NULL : bits;
}

static void append(struct list *list, pid_t pid, pid_t ppid) {
  if (list->count == list->room) {
    struct entry *grown = realloc(list->entries, (list->room * 2 + 256) * sizeof *grown);
    if (!grown) return; /* the caller looks again later */
    list->entries = grown;
    list->room = list->room * 2 + 256;
  }
  list->entries[list->count++] = (struct entry){pid, ppid};
}

/* Reads a small file of /proc; returns its size, or -1. */
static ssize_t read_proc(const char *path, char *text, size_t room) {
  int fd = openat(proc_fd, path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return -1;
  size_t size = 0;
  for (ssize_t got; size < room - 1 && (got = read(fd, text + size, room - 1 - size)) > 0;) size += (size_t)got;
  close(fd);
  text[size] = 0;
  return (ssize_t)size;
}

/* Parent of a process, or -1. */
static pid_t parent_of(pid_t pid) {
  char path[32], text[512];
  snprintf(path, sizeof path, "%d/stat", pid);
  if (read_proc(path, text, sizeof text) <= 0) return -1;
  char *after = strrchr(text, ')'); /* the name before it may hold anything */
  return after && strlen(after) > 4 ? (pid_t)strtol(after + 4, NULL, 10) : -1;
}

/* Opens a folder of /proc for listing. */
static DIR *list_proc(const char *path) {
  int fd = openat(proc_fd, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  DIR *directory = fd < 0 ? NULL : fdopendir(fd);
  if (!directory && fd >= 0) close(fd);
  return directory;
}

/* Appends the children of all threads of a process that are not in the tree yet; false if the kernel keeps no such lists. */
static int append_children(struct list *list, uint8_t *in_tree, pid_t pid) {
  static char text[65536];
  char path[64];
  snprintf(path, sizeof path, "%d/task", pid);
  DIR *threads = list_proc(path);
  if (!threads) return 1;
  int kept = 1;
  for (struct dirent *thread; (thread = readdir(threads));) {
    if (thread->d_name[0] == '.') continue;
    snprintf(path, sizeof path, "%d/task/%.16s/children", pid, thread->d_name);
    ssize_t size = read_proc(path, text, sizeof text);
    if (size < 0 && errno == ENOENT && pid == getpid()) kept = 0;
    char *next = text, *end;
    /* A number that the buffer cut has no space behind it. */
    for (pid_t child; size > 0 && (child = (pid_t)strtol(next, &end, 10)) > 0 && *end == ' '; next = end + 1) {
      if (child >= MAX_PID || marked(in_tree, child)) continue;
      mark(in_tree, child);
      append(list, child, pid);
    }
  }
  closedir(threads);
  return kept;
}

/* The same by the parent of every process there is. */
static void append_by_parents(struct list *list, uint8_t *in_tree) {
  struct list all = {0};
  DIR *processes = list_proc(".");
  if (!processes) return;
  for (struct dirent *found; (found = readdir(processes));) {
    pid_t pid = (pid_t)strtol(found->d_name, NULL, 10), parent;
    if (pid > 0 && pid < MAX_PID && (parent = parent_of(pid)) > 0 && parent < MAX_PID) append(&all, pid, parent);
  }
  closedir(processes);
  for (int again = 1; again;) { /* one round where parents stand before their children, as they mostly do */
    again = 0;
    for (size_t i = 0; i < all.count; i++) {
      struct entry e = all.entries[i];
      if (!marked(in_tree, e.ppid) || marked(in_tree, e.pid)) continue;
      mark(in_tree, e.pid);
      append(list, e.pid, e.ppid);
      again = 1;
    }
  }
  free(all.entries);
}

/* Lists the descendants of this process, each after its parent. */
static void list_tree(struct list *list) {
  list->count = 0;
  uint8_t *in_tree = new_bits();
  if (!in_tree) return;
  mark(in_tree, getpid());
  if (append_children(list, in_tree, getpid()))
    for (size_t i = 0; i < list->count; i++) append_children(list, in_tree, list->entries[i].pid);
  else
    append_by_parents(list, in_tree);
  munmap(in_tree, MAX_PID / 8);
}

/* Signals a listed process. Nobody else reaps our own children, so their numbers are theirs. The number of another one may have gone to a stranger
 * since: the descriptor pins it, then its parent must still be the same, or we if that has ended. */
static void signal_listed(struct entry e, int signo) {
  if (e.ppid == getpid()) {
    kill(e.pid, signo);
    return;
  }
  int fd = (int)syscall(SYS_pidfd_open, e.pid, 0), old_kernel = fd < 0 && errno == ENOSYS;
  pid_t parent = fd >= 0 || old_kernel ? parent_of(e.pid) : -1;
  if (parent == e.ppid || parent == getpid()) {
    if (old_kernel) kill(e.pid, signo);
    else syscall(SYS_pidfd_send_signal, fd, signo, NULL, 0);
  }
  if (fd >= 0) close(fd);
}

/* Signals every descendant once, looking again until no new one is found. With `cpu` they are first brought onto that processor. */
static void signal_all(int signo, pid_t leader, const cpu_set_t *cpu) {
  struct list list = {0};
  uint8_t *sent = new_bits();
  if (proc_fd < 0 || !sent) {
    if (leader > 0) kill(-leader, signo); /* without /proc the first group of its session is all that is known */
    return;
  }
  for (int pass = 0, fresh = 1; fresh && pass < MAX_PASSES; pass++) {
    fresh = 0;
    list_tree(&list);
    for (size_t i = 0; i < list.count; i++) {
      if (marked(sent, list.entries[i].pid)) continue;
      mark(sent, list.entries[i].pid);
      if (cpu) sched_setaffinity(list.entries[i].pid, sizeof *cpu, cpu);
      signal_listed(list.entries[i], signo);
      fresh = 1;
    }
  }
  free(list.entries);
  munmap(sent, MAX_PID / 8);
}

void signal_tree(int signo, pid_t leader) { signal_all(signo, leader, NULL); }

/* Stopped processes do not fork, so the second round finds them all. Processes that fork and end faster than a walk takes are brought onto our
 * own processor, which their children inherit: while we walk they stand still. The caller repeats until there are no children. */
void kill_tree(pid_t leader) {
  cpu_set_t own;
  CPU_ZERO(&own);
  int cpu = sched_getcpu();
  if (cpu >= 0) CPU_SET(cpu, &own);
  sched_setaffinity(0, sizeof own, &own);
  signal_all(SIGSTOP, leader, &own);
  signal_all(SIGKILL, leader, NULL);
}
