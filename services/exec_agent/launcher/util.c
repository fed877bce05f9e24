/* Descriptors and signals. */
#define _GNU_SOURCE
#include "launcher.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { KERNEL_SIGNALS = 64, OLD_KERNEL_FDS = 4096 };

void close_from(unsigned first, unsigned last) {
  if (first > last || syscall(SYS_close_range, first, last, 0) == 0) return;
  for (unsigned fd = first; fd <= last && fd < OLD_KERNEL_FDS; fd++) close((int)fd);
}

/* Keeps 0, 1, 2 (opened if need be) and the given descriptors, and closes the rest. */
void keep_only(const int *kept, int count) {
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
void quiet_signals(void) {
  /* By the system call: the C library keeps its hands on 32 and 33. All zero is SIG_DFL without flags in the kernel's struct. */
  const unsigned long standard[8] = {0};
  for (int number = 1; number <= KERNEL_SIGNALS; number++) syscall(SYS_rt_sigaction, number, standard, NULL, KERNEL_SIGNALS / 8);
  sigset_t all;
  sigfillset(&all);
  sigprocmask(SIG_SETMASK, &all, NULL);
}

int child_signals(void) {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGCHLD);
  sigaddset(&set, SIGTERM);
  return signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
}
