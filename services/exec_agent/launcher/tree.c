/* Finds and signals every descendant of this process through /proc. */
#define _GNU_SOURCE
#include "launcher.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { MAX_PID = 1 << 22, MAX_PASSES = 64 };

struct entry { pid_t pid, ppid; };

static int proc_fd = -1;

/* Keeps /proc open, so that nobody can unmount it from us. */
void open_proc(void) { proc_fd = open("/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC); }

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
void signal_tree(int signo, pid_t leader) {
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
void kill_tree(pid_t leader) {
  signal_tree(SIGSTOP, leader);
  signal_tree(SIGKILL, leader);
}
