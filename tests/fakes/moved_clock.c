/* A wall clock that a test moves: preloaded, it adds the seconds in the file SK_WALL_OFFSET to every
 * reading of the time of day. Monotonic clocks, and so everything that is waited for, stay as they are.
 *
 * What waits until a time of day gets the moved time and waits by the kernel's: such deadlines are
 * moved back. They are told from monotonic ones by their size. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define A_TIME_OF_DAY 1000000000L

static long offset_s(void) {
  const char *path = getenv("SK_WALL_OFFSET");
  char text[32];
  int file;
  ssize_t length;
  if (path == NULL || (file = open(path, O_RDONLY | O_CLOEXEC)) < 0) return 0;
  length = read(file, text, sizeof text - 1);
  close(file);
  if (length <= 0) return 0;
  text[length] = 0;
  return atol(text);
}

static void *real(const char *name) { return dlsym(RTLD_NEXT, name); }

static struct timespec by_the_kernel(const struct timespec *deadline) {
  struct timespec moved = *deadline;
  if (moved.tv_sec > A_TIME_OF_DAY) moved.tv_sec -= offset_s();
  return moved;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  static int (*next)(clockid_t, struct timespec *);
  if (next == NULL) next = real("clock_gettime");
  int result = next(clock, now);
  if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
    now->tv_sec += offset_s();
  return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  static int (*next)(struct timeval *, void *);
  if (next == NULL) next = real("gettimeofday");
  int result = next(now, zone);
  if (result == 0) now->tv_sec += offset_s();
  return result;
}

time_t time(time_t *now) {
  struct timespec read;
  clock_gettime(CLOCK_REALTIME, &read);
  if (now != NULL) *now = read.tv_sec;
  return read.tv_sec;
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict deadline) {
  static int (*next)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
  if (next == NULL) next = real("pthread_cond_timedwait");
  struct timespec moved = by_the_kernel(deadline);
  return next(condition, mutex, &moved);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict deadline) {
  static int (*next)(sem_t *, const struct timespec *);
  if (next == NULL) next = real("sem_timedwait");
  struct timespec moved = by_the_kernel(deadline);
  return next(semaphore, &moved);
}
