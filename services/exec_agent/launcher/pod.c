/*
 * `init`: PID 1 of a Pod's container. It starts the agent of the folder that it is in, with the C library, the loader and the Python of that
 * folder, so that nothing of the image is used; starts it again when it dies; and reaps what nobody else does.
 */
#define _GNU_SOURCE
#include "launcher.h"

#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__)
#define LOADER "ld-linux-x86-64.so.2"
#elif defined(__aarch64__)
#define LOADER "ld-linux-aarch64.so.1"
#endif

enum { EXIT_CONFIGURATION = 78 }; /* of an agent that no restart helps */
/* As of a program that a signal ended. With 0 the Pod would have succeeded, and the kubelet forgets why it ended it: evicted, say, or at its
 * deadline (kubelet_pods.go, generateAPIPodStatus: the reason stays only with the phase Failed). */
enum { EXIT_STOPPED = 128 + SIGTERM };
enum { FIRST_DELAY_MS = 50, LAST_DELAY_MS = 5000, STEADY_MS = 10000, STOP_MS = 3000, SWEEP_MS = 50, SWEEPS = 100 };

struct supervisor {
  const char *folder;
  char **arguments;
  int environ_fd, restarts;
  pid_t agent;
  long long started_ms, due_ms; /* of the agent that runs; of the next start, or of the end of patience while stopping */
  int delay_ms, stopping;
};

static long long now_ms(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000LL + now.tv_nsec / 1000000;
}

/* The container's environment is for commands: the agent gets it as a file, since LD_PRELOAD and its like would change the agent itself. So would
 * the image's configuration of OpenSSL. */
static int save_environment(void) {
  int fd = memfd_create("orchard-environment", 0);
  for (char **e = environ; fd >= 0 && *e; e++) {
    size_t size = strlen(*e) + 1, done = 0;
    for (ssize_t got; done < size; done += (size_t)got)
      if ((got = write(fd, *e + done, size - done)) < 0) return -1;
  }
  return fd;
}

/* Runs in the child. */
static _Noreturn void become_agent(const struct supervisor *self) {
  char loader[PATH_MAX], libraries[PATH_MAX], program[PATH_MAX], code[PATH_MAX], restarts[64], environment[64], launcher[PATH_MAX];
  snprintf(loader, sizeof loader, "%s/runtime/lib/" LOADER, self->folder);
  snprintf(libraries, sizeof libraries, "%s/runtime/lib", self->folder);
  snprintf(program, sizeof program, "%s/runtime/bin/agent", self->folder);
  snprintf(code, sizeof code, "%s/runtime/app", self->folder);
  snprintf(launcher, sizeof launcher, "ORCHARD_LAUNCHER=%s/init", self->folder);
  snprintf(restarts, sizeof restarts, "ORCHARD_RESTARTS=%d", self->restarts);
  snprintf(environment, sizeof environment, "ORCHARD_ENVIRON_FD=%d", self->environ_fd);
  char *fixed[] = {program, "--inhibit-cache", "--library-path", libraries, program, "-I", "-S", "-B", "-X", "utf8", code};
  enum { FIXED = sizeof fixed / sizeof *fixed, MOST = FIXED + 8 };
  char *argv[MOST + 1] = {0}, *envp[] = {launcher, restarts, environment, "OPENSSL_CONF=/dev/null", NULL};
  memcpy(argv, fixed, sizeof fixed);
  for (int i = 0; i + FIXED < MOST && self->arguments[i]; i++) argv[FIXED + i] = self->arguments[i];
  setsid();
  umask(022);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, NULL);
  execve(loader, argv, envp);
  fprintf(stderr, "orchard init: %s: %s\n", loader, strerror(errno));
  _exit(127);
}

static void wait_longer(struct supervisor *self) {
  self->due_ms = now_ms() + self->delay_ms;
  self->delay_ms = self->delay_ms * 2 < LAST_DELAY_MS ? self->delay_ms * 2 : LAST_DELAY_MS;
}

static void start_agent(struct supervisor *self) {
  self->started_ms = now_ms();
  self->agent = fork();
  if (self->agent == 0) become_agent(self);
  if (self->agent < 0) { /* commands have taken the last process there may be */
    fprintf(stderr, "orchard init: cannot start the agent: %s\n", strerror(errno));
    wait_longer(self);
  }
}

/* The agent has ended; returns the exit code if that is the end of the container too, else -1. */
static int bury_agent(struct supervisor *self, int status) {
  self->agent = 0;
  if (self->stopping) return EXIT_STOPPED;
  if (WIFEXITED(status) && WEXITSTATUS(status) == EXIT_CONFIGURATION) return EXIT_CONFIGURATION;
  fprintf(stderr, "orchard init: the agent ended with %s %d and is started again\n", WIFEXITED(status) ? "code" : "signal",
          WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status));
  self->restarts++;
  if (now_ms() - self->started_ms >= STEADY_MS) self->delay_ms = FIRST_DELAY_MS;
  wait_longer(self);
  return -1;
}

static void stop(struct supervisor *self) {
  if (self->stopping) return;
  self->stopping = 1;
  self->due_ms = now_ms() + STOP_MS;
  if (self->agent > 0) kill(self->agent, SIGTERM);
}

/* What is due now: a start, or the end of an agent that does not stop. */
static void act_on_time(struct supervisor *self) {
  if (now_ms() < self->due_ms) return;
  if (self->stopping) {
    kill(self->agent, SIGKILL);
    self->due_ms = now_ms() + STOP_MS; /* one that the kernel holds may take its time */
  }
  else if (self->agent <= 0) start_agent(self);
}

static int wait_ms(const struct supervisor *self) {
  if (self->agent > 0 && !self->stopping) return -1;
  long long left = self->due_ms - now_ms();
  return left < 0 ? 0 : (int)left;
}

/* Follows the agent, and the next one, to the end of the container; returns its exit code. */
static int supervise(struct supervisor *self, int signals) {
  for (;;) {
    act_on_time(self);
    struct pollfd polled = {.fd = signals, .events = POLLIN};
    if (poll(&polled, 1, wait_ms(self)) < 0 && errno != EINTR) return 1;
    struct signalfd_siginfo info;
    while (read(signals, &info, sizeof info) == sizeof info)
      if (info.ssi_signo == SIGTERM && (getpid() != 1 || info.ssi_pid == 0)) stop(self);
    if (self->stopping && self->agent <= 0) return EXIT_STOPPED;
    int status, code;
    for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;)
      if (pid == self->agent && (code = bury_agent(self, status)) >= 0) return code;
  }
}

/* As PID 1 our own end is the end of everything; elsewhere it has to be brought about. */
static void end_everything(void) {
  if (getpid() == 1) return;
  for (int sweep = 0; sweep < SWEEPS; sweep++) {
    kill_tree(0);
    pid_t pid;
    while ((pid = waitpid(-1, NULL, WNOHANG)) > 0) {}
    if (pid < 0) return;
    poll(NULL, 0, SWEEP_MS);
  }
}

/* The folder of this program, without a slash at its end, so empty for the root. */
static char *own_folder(void) {
  static char path[PATH_MAX];
  ssize_t size = readlink("/proc/self/exe", path, sizeof path - 1);
  char *end = size > 0 ? strrchr(path, '/') : NULL;
  if (!end) return NULL;
  *end = 0;
  return path;
}

int run_pod(int argc, char **argv) {
  char *folder = own_folder();
  if (!folder) {
    fprintf(stderr, "orchard init: /proc/self/exe: %s\n", strerror(errno));
    return 1;
  }
  if (argc > 1 && strcmp(argv[1], "copy") == 0) return argc == 3 ? copy_payload(folder, argv[2]) : 2;
  if (argc > 1 && strcmp(argv[1], "check") == 0) return 0;
  prctl(PR_SET_DUMPABLE, 0);
  prctl(PR_SET_CHILD_SUBREAPER, 1);
  quiet_signals();
  open_proc();
  struct supervisor self = {.folder = folder, .arguments = argv + 1, .environ_fd = save_environment(), .delay_ms = FIRST_DELAY_MS};
  keep_only(&self.environ_fd, self.environ_fd >= 0);
  int signals = child_signals();
  if (signals < 0 || self.environ_fd < 0) return 1;
  int code = supervise(&self, signals);
  end_everything();
  return code;
}
