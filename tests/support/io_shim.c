/* Preloaded into a process: makes file operations below a folder fail, or records them.
 *
 * shim_fault(folder, call, errno, nth, count, part): from the nth call on (counted from 1, of files whose path holds
 * `part`), `count` calls fail with errno; errno 0 makes a write short (half of it), -1 one of nothing.
 * shim_trace(folder, path): appends a record of each operation that changes something.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char folder[PATH_MAX], wanted[32], part[PATH_MAX];
static int fault_errno, fault_nth, fault_count, fault_seen, trace_fd = -1;

void shim_fault(const char *below, const char *call, int error, int nth, int count, const char *name) {
    snprintf(folder, sizeof folder, "%s", below);
    snprintf(wanted, sizeof wanted, "%s", call);
    snprintf(part, sizeof part, "%s", name);
    fault_errno = error, fault_nth = nth, fault_count = count, fault_seen = 0;
}

void shim_trace(const char *below, const char *path) {
    snprintf(folder, sizeof folder, "%s", below);
    trace_fd = syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
}

static int below(const char *path) {
    return folder[0] && strncmp(path, folder, strlen(folder)) == 0;
}

static int path_of(int fd, char *out) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, out, PATH_MAX - 1);
    if (size < 0) return 0;
    out[size] = 0;
    return below(out);
}

static int at(int dir, const char *name, char *out) {
    char base[PATH_MAX / 2];
    if (name[0] == '/') snprintf(out, PATH_MAX, "%s", name);
    else if (dir == AT_FDCWD) { if (!getcwd(base, sizeof base)) return 0; snprintf(out, PATH_MAX, "%s/%.2000s", base, name); }
    else { char above[PATH_MAX]; path_of(dir, above); snprintf(out, PATH_MAX, "%.2000s/%.2000s", above, name); }
    return below(out);
}

/* Whether this call is to fail. */
static int hit(const char *call, const char *path) {
    if (strcmp(call, wanted) || !below(path) || !strstr(path, part)) return 0;
    pthread_mutex_lock(&lock);
    int number = ++fault_seen;
    pthread_mutex_unlock(&lock);
    return number >= fault_nth && number < fault_nth + fault_count;
}

static void record(char op, const char *path, const char *other, uint64_t offset, uint64_t length, const void *data) {
    if (trace_fd < 0) return;
    uint32_t sizes[2] = {strlen(path), strlen(other)};
    uint64_t payload = data ? length : 0, head[3] = {offset, length, payload};
    size_t total = 1 + sizeof sizes + sizeof head + sizes[0] + sizes[1] + payload, position = 0;
    char *out = malloc(total);
    out[position++] = op;
    memcpy(out + position, sizes, sizeof sizes), position += sizeof sizes;
    memcpy(out + position, head, sizeof head), position += sizeof head;
    memcpy(out + position, path, sizes[0]), position += sizes[0];
    memcpy(out + position, other, sizes[1]), position += sizes[1];
    if (payload) memcpy(out + position, data, payload);
    pthread_mutex_lock(&lock);
    if (syscall(SYS_write, trace_fd, out, total) != (ssize_t)total) abort();
    pthread_mutex_unlock(&lock);
    free(out);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static ssize_t put(int fd, const void *data, size_t size, off_t offset, const char *call) {
    char path[PATH_MAX];
    if (!path_of(fd, path)) return -2;
    if (hit(call, path)) {
        if (fault_errno > 0) { errno = fault_errno; return -1; }
        size = fault_errno ? 0 : (size + 1) / 2;
    }
    ssize_t done = syscall(SYS_pwrite64, fd, data, size, offset);
    if (done > 0) record('w', path, "", offset, done, data);
    return done;
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) {
    ssize_t done = put(fd, data, size, offset, "pwrite");
    return done == -2 ? syscall(SYS_pwrite64, fd, data, size, offset) : done;
}
ssize_t pwrite64(int fd, const void *data, size_t size, off_t offset) { return pwrite(fd, data, size, offset); }

ssize_t write(int fd, const void *data, size_t size) {
    off_t offset = syscall(SYS_lseek, fd, 0, SEEK_CUR);
    char path[PATH_MAX];
    ssize_t done = syscall(SYS_write, fd, data, size);
    if (done > 0 && offset >= 0 && trace_fd >= 0 && fd != trace_fd && path_of(fd, path)) record('w', path, "", offset, done, data);
    return done;
}

#define SYNC(name) \
    int name(int fd) { \
        char path[PATH_MAX]; \
        if (path_of(fd, path)) { \
            if (hit(#name, path)) { errno = fault_errno; return -1; } \
            record('s', path, "", 0, 0, 0); \
        } \
        return REAL(name)(fd); \
    }
SYNC(fsync)
SYNC(fdatasync)

int close(int fd) {
    char path[PATH_MAX];
    if (wanted[0] == 'c' && path_of(fd, path) && hit("close", path)) {
        syscall(SYS_close, fd); /* as Linux does it: the descriptor is gone all the same */
        errno = fault_errno;
        return -1;
    }
    return syscall(SYS_close, fd);
}

static int opened(int fd, int flags) {
    char path[PATH_MAX];
    if (fd >= 0 && (flags & O_CREAT) && trace_fd >= 0 && path_of(fd, path)) record('c', path, "", flags & O_TRUNC ? 1 : 0, 0, 0);
    return fd;
}

#define MODE mode_t mode = 0; if (flags & (O_CREAT | O_TMPFILE)) { va_list list; va_start(list, flags); mode = va_arg(list, mode_t); va_end(list); }
int open(const char *name, int flags, ...) { MODE return opened(syscall(SYS_openat, AT_FDCWD, name, flags, mode), flags); }
int open64(const char *name, int flags, ...) { MODE return opened(syscall(SYS_openat, AT_FDCWD, name, flags | O_LARGEFILE, mode), flags); }
int openat(int dir, const char *name, int flags, ...) { MODE return opened(syscall(SYS_openat, dir, name, flags, mode), flags); }
int openat64(int dir, const char *name, int flags, ...) { MODE return opened(syscall(SYS_openat, dir, name, flags | O_LARGEFILE, mode), flags); }

int ftruncate(int fd, off_t size) {
    char path[PATH_MAX];
    int below_it = path_of(fd, path);
    if (below_it && hit("ftruncate", path)) { errno = fault_errno; return -1; }
    int done = syscall(SYS_ftruncate, fd, size);
    if (!done && below_it) record('t', path, "", size, 0, 0);
    return done;
}
int ftruncate64(int fd, off64_t size) { return ftruncate(fd, size); }

int posix_fallocate(int fd, off_t offset, off_t size) {
    char path[PATH_MAX];
    int below_it = path_of(fd, path);
    if (below_it && hit("posix_fallocate", path)) return fault_errno;
    int done = syscall(SYS_fallocate, fd, 0, offset, size) ? errno : 0;
    if (!done && below_it) record('t', path, "", offset + size, 0, 0);
    return done;
}
int posix_fallocate64(int fd, off64_t offset, off64_t size) { return posix_fallocate(fd, offset, size); }

int renameat2(int from, const char *old, int to, const char *new, unsigned flags) {
    char a[PATH_MAX], b[PATH_MAX];
    int below_it = at(from, old, a) | at(to, new, b);
    if (below_it && (hit("rename", a) || hit("rename", b))) { errno = fault_errno; return -1; }
    int done = syscall(SYS_renameat2, from, old, to, new, flags);
    if (!done && below_it) record(flags & 2 ? 'x' : 'r', a, b, 0, 0, 0);
    return done;
}
int rename(const char *old, const char *new) { return renameat2(AT_FDCWD, old, AT_FDCWD, new, 0); }
int renameat(int from, const char *old, int to, const char *new) { return renameat2(from, old, to, new, 0); }

int mkdirat(int dir, const char *name, mode_t mode) {
    char path[PATH_MAX];
    int below_it = at(dir, name, path), done = syscall(SYS_mkdirat, dir, name, mode);
    if (!done && below_it) record('m', path, "", 0, 0, 0);
    return done;
}
int mkdir(const char *name, mode_t mode) { return mkdirat(AT_FDCWD, name, mode); }

int unlinkat(int dir, const char *name, int flags) {
    char path[PATH_MAX];
    int below_it = at(dir, name, path), done = syscall(SYS_unlinkat, dir, name, flags);
    if (!done && below_it) record('u', path, "", 0, 0, 0);
    return done;
}
int unlink(const char *name) { return unlinkat(AT_FDCWD, name, 0); }
int rmdir(const char *name) { return unlinkat(AT_FDCWD, name, AT_REMOVEDIR); }
