/* `init copy FOLDER`: the payload copies itself into a volume, for clusters that cannot mount an image. */
#define _GNU_SOURCE
#include "launcher.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MOST_DEPTH = 32 };

/* Its parts. The folder may be the root of a container, which holds other things too. */
static const char *const parts[] = {"init", "runtime"};

static int failed(const char *name) {
  fprintf(stderr, "orchard init: copying %s: %s\n", name, strerror(errno));
  return 0;
}

static int copy_bytes(int from, int to) {
  static char block[1 << 18];
  for (ssize_t size; (size = read(from, block, sizeof block)) != 0;) {
    if (size < 0) return 0;
    for (ssize_t done = 0, more; done < size; done += more)
      if ((more = write(to, block + done, (size_t)(size - done))) < 0) return 0;
  }
  return 1;
}

static int copy_file(int from_folder, int to_folder, const char *name, mode_t mode) {
  int from = openat(from_folder, name, O_RDONLY | O_CLOEXEC);
  int to = from < 0 ? -1 : openat(to_folder, name, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  int done = to >= 0 && copy_bytes(from, to) && fchmod(to, mode & 0777) == 0;
  int error = errno;
  if (from >= 0) close(from);
  if (to >= 0 && close(to) < 0) done = 0;
  else errno = error;
  return done || failed(name);
}

static int copy_entry(int from, int to, const char *name, int depth);

/* Closes both. */
static int copy_content(int from, int to, const char *name, int depth) {
  DIR *directory = from >= 0 && to >= 0 ? fdopendir(from) : NULL;
  int done = directory != NULL || failed(name);
  for (struct dirent *entry; done && (entry = readdir(directory));)
    if (strcmp(entry->d_name, ".") && strcmp(entry->d_name, "..")) done = copy_entry(from, to, entry->d_name, depth);
  if (directory) closedir(directory);
  else if (from >= 0) close(from);
  if (to >= 0) close(to);
  return done;
}

static int copy_entry(int from, int to, const char *name, int depth) {
  struct stat status;
  if (fstatat(from, name, &status, AT_SYMLINK_NOFOLLOW)) return failed(name);
  if (S_ISREG(status.st_mode)) return copy_file(from, to, name, status.st_mode);
  if (!S_ISDIR(status.st_mode) || depth == 0) return errno = EINVAL, failed(name);
  if (mkdirat(to, name, 0755) && errno != EEXIST) return failed(name);
  int flags = O_RDONLY | O_DIRECTORY | O_CLOEXEC;
  return copy_content(openat(from, name, flags), openat(to, name, flags), name, depth - 1);
}

int copy_payload(const char *folder, const char *target) {
  if (!*folder) folder = "/"; /* the payload's own image */
  int from = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC), to = open(target, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (from < 0 || to < 0) return failed(from < 0 ? folder : target), 1;
  for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
    if (!copy_entry(from, to, parts[i], MOST_DEPTH)) return 1;
  return 0;
}
