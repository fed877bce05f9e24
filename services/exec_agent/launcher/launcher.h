/* What the launcher's files share. The structs and their Python half (process.py) belong together. */
#ifndef ORCHARD_LAUNCHER_H
#define ORCHARD_LAUNCHER_H

#include <stdint.h>
#include <sys/types.h>

enum { EVENT_STARTED = 1, EVENT_FAILED, EVENT_EXITED, EVENT_EMPTY };
enum { STAGE_FORK = 1, STAGE_SPEC, STAGE_USER, STAGE_CWD, STAGE_EXEC, STAGE_INTERPRETER, STAGE_TTY };

/* Descriptors that come with a spec: stdin, stdout, stderr, control, and the spec itself in memory if it is a large one. */
enum { FDS_LEAST = 4, FDS_MOST = 5, FD_CONTROL = 3, FD_MEMORY = 4 };

/* From a reaper to the agent. */
struct event { uint32_t kind; int32_t a, b; uint32_t flags; uint64_t user_us, system_us, peak_kb; };

/* util.c */
void close_from(unsigned first, unsigned last);
void keep_only(const int *kept, int count);
void quiet_signals(void);
int child_signals(void);

/* tree.c: the descendants of this process. `leader` is a child whose session is signalled where there is no /proc; zero if none. */
void open_proc(void);
void signal_tree(int signo, pid_t leader);
void kill_tree(pid_t leader);

/* reaper.c: runs one command and returns when it and all it left behind have ended; false if this process should not run another. */
int run_job(char *text, size_t size, const int *fds, int count, int signals);

/* pod.c and copy.c: PID 1 of a Pod's container, and the payload that copies itself. Return the exit code. */
int run_pod(int argc, char **argv);
int copy_payload(const char *folder, const char *target);

#endif
