/* Preloaded into a process: makes chosen calls of the C library fail as a system call would.
 *
 *   fail_calls(first, count, error)  from the first-th call on (0 is the next one), that many fail
 *   fail_calls_stop()                ends it; returns how many calls were made since it began
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

static atomic_long calls, first = -1, end = -1;
static atomic_int error;
static char last[64];

void fail_calls(long at, long count, int number) {
    error = number;
    calls = 0;
    first = at;
    end = at + count;
    last[0] = 0;
}

long fail_calls_stop(void) {
    first = end = -1;
    return calls;
}

/* Name of the call that failed last. */
const char *fail_calls_last(void) { return last; }

static int fails(const char *name) {
    if (first < 0) return 0;
    long number = calls++;
    if (number < first || number >= end) return 0;
    for (int i = 0; i < 63 && (last[i] = name[i]); i++) {}
    errno = error;
    return 1;
}

#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

#define WRAP(result, failed, name, parameters, arguments) \
    result name parameters { \
        REAL(name); \
        return fails(#name) ? (failed) : real arguments; \
    }

WRAP(ssize_t, -1, write, (int fd, const void *data, size_t size), (fd, data, size))
WRAP(ssize_t, -1, read, (int fd, void *data, size_t size), (fd, data, size))
WRAP(int, -1, fsync, (int fd), (fd))
WRAP(int, -1, rename, (const char *from, const char *to), (from, to))
WRAP(int, -1, mkdir, (const char *path, mode_t mode), (path, mode))
WRAP(int, -1, chmod, (const char *path, mode_t mode), (path, mode))
WRAP(int, -1, fchmod, (int fd, mode_t mode), (fd, mode))
WRAP(int, -1, flock, (int fd, int how), (fd, how))
WRAP(int, -1, unlink, (const char *path), (path))
WRAP(int, -1, unlinkat, (int fd, const char *path, int flags), (fd, path, flags))
WRAP(int, -1, rmdir, (const char *path), (path))
WRAP(int, -1, access, (const char *path, int mode), (path, mode))
WRAP(int, -1, stat64, (const char *path, struct stat64 *found), (path, found))
WRAP(int, -1, lstat64, (const char *path, struct stat64 *found), (path, found))
WRAP(int, -1, fstat64, (int fd, struct stat64 *found), (fd, found))
WRAP(int, -1, fstatat64, (int fd, const char *path, struct stat64 *found, int flags),
     (fd, path, found, flags))
typedef struct __dirstream DIR;
extern DIR *opendir(const char *), *fdopendir(int);
WRAP(DIR *, NULL, opendir, (const char *path), (path))
WRAP(DIR *, NULL, fdopendir, (int fd), (fd))
WRAP(int, -1, socket, (int family, int type, int protocol), (family, type, protocol))
WRAP(int, -1, socketpair, (int family, int type, int protocol, int pair[2]),
     (family, type, protocol, pair))
WRAP(int, -1, bind, (int fd, const struct sockaddr *name, socklen_t size), (fd, name, size))
WRAP(int, -1, listen, (int fd, int backlog), (fd, backlog))
WRAP(int, -1, setsockopt, (int fd, int level, int name, const void *value, socklen_t size),
     (fd, level, name, value, size))
WRAP(int, -1, getsockname, (int fd, struct sockaddr *name, socklen_t *size), (fd, name, size))
struct epoll_event;
extern int epoll_create1(int), epoll_ctl(int, int, int, struct epoll_event *);
WRAP(int, -1, epoll_create1, (int flags), (flags))
WRAP(int, -1, epoll_ctl, (int fd, int what, int other, struct epoll_event *event),
     (fd, what, other, event))
/* A thread that cannot be made returns its error. */
WRAP(int, (int)error, pthread_create,
     (pthread_t *made, const pthread_attr_t *how, void *(*run)(void *), void *data),
     (made, how, run, data))

#define WRAP_OPEN(name, parameters, arguments, before_mode) \
    int name parameters { \
        REAL(name); \
        va_list rest; \
        va_start(rest, before_mode); \
        mode_t mode = va_arg(rest, mode_t); \
        va_end(rest); \
        return fails(#name) ? -1 : real arguments; \
    }

extern int open64(const char *, int, ...), openat64(int, const char *, int, ...);
extern int open(const char *, int, ...), openat(int, const char *, int, ...);
WRAP_OPEN(open64, (const char *path, int flags, ...), (path, flags, mode), flags)
WRAP_OPEN(openat64, (int fd, const char *path, int flags, ...), (fd, path, flags, mode), flags)
WRAP_OPEN(open, (const char *path, int flags, ...), (path, flags, mode), flags)
WRAP_OPEN(openat, (int fd, const char *path, int flags, ...), (fd, path, flags, mode), flags)
