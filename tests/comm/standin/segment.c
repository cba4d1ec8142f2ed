/* What the processes of a communicator share: a file in memory, doorbells, and the news of a failure. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "standin.h"

static char error_text[400];

const char *last_error(void) { return error_text; }

int failed(struct ncclComm *comm) {
    int state = atomic_load(&comm->state);
    if (state != ncclSuccess && state != ncclInProgress) return state;
    return comm->segment && atomic_load(&comm->segment->aborted) ? ncclRemoteError : ncclSuccess;
}

void fail(struct ncclComm *comm, ncclResult_t result, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error_text, sizeof error_text, format, arguments);
    va_end(arguments);
    atomic_store(&comm->state, result);
    if (comm->segment) ring_all(comm);
}

static void wake(_Atomic uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0); }

void ring(struct ncclComm *comm, int rank) {
    struct member *member = &comm->members[rank];
    atomic_fetch_add(&member->bell, 1);
    if (atomic_load(&member->asleep)) wake(&member->bell);
}

void ring_all(struct ncclComm *comm) {
    for (int rank = 0; rank < comm->size; rank++) ring(comm, rank);
}

/* Sleep until the bell has rung since it was `bell`; ten milliseconds at most. */
void doze(struct ncclComm *comm, uint32_t bell) {
    struct member *own = &comm->members[comm->rank];
    for (int i = 0; i < 8; i++) {
        if (atomic_load(&own->bell) != bell) return;
        sched_yield();
    }
    struct timespec limit = {0, 10 * 1000 * 1000};
    atomic_store(&own->asleep, 1);
    syscall(SYS_futex, &own->bell, FUTEX_WAIT, bell, &limit, NULL, 0);
    atomic_store(&own->asleep, 0);
}

/* Map the segment called `name`, and wait until every rank has. Sets `state`. */
void join(struct ncclComm *comm) {
    size_t members = (sizeof(struct segment) + 63) / 64 * 64;
    size_t channels = members + sizeof(struct member) * comm->size;
    comm->bytes = channels + sizeof(struct channel) * comm->size * comm->size;
    comm->sends = calloc(comm->size, sizeof *comm->sends);
    comm->receives = calloc(comm->size, sizeof *comm->receives);
    int file = shm_open(comm->name, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    void *memory = MAP_FAILED;
    if (file >= 0 && ftruncate(file, (off_t)comm->bytes) == 0)
        memory = mmap(NULL, comm->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (file >= 0) close(file);
    if (memory == MAP_FAILED) {
        fail(comm, ncclSystemError, "no shared memory %s: %s", comm->name, strerror(errno));
        return;
    }
    comm->members = (void *)((char *)memory + members);
    comm->channels = (void *)((char *)memory + channels);
    comm->segment = memory;
    int size = 0;
    if (!atomic_compare_exchange_strong(&comm->segment->size, &size, comm->size) && size != comm->size) {
        fail(comm, ncclInvalidUsage, "rank %d says %d ranks, another says %d", comm->rank, comm->size, size);
        return;
    }
    if (atomic_fetch_add(&comm->segment->joined, 1) + 1 == comm->size) {
        shm_unlink(comm->name); /* everybody has it: nothing is left behind, however the processes end */
        ring_all(comm);
    }
    while (atomic_load(&comm->segment->joined) < comm->size) {
        uint32_t bell = atomic_load(&comm->members[comm->rank].bell);
        if (failed(comm)) return;
        if (atomic_load(&comm->segment->joined) < comm->size) doze(comm, bell);
    }
    atomic_store(&comm->state, ncclSuccess);
}

void leave(struct ncclComm *comm) {
    if (comm->segment) munmap(comm->segment, comm->bytes);
    free(comm->sends);
    free(comm->receives);
    free(comm);
}
