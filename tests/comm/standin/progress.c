/* How operations run: each is a small state machine that never blocks; `run` drives those of one group. */

#include <string.h>

#include "standin.h"

static const char *const NAMES[] = {"send", "receive", "all-reduce", "reduce-scatter", "all-gather", "broadcast"};

static int same(const struct header *a, const struct header *b) {
    return a->kind == b->kind && a->type == b->type && a->op == b->op && a->root == b->root && a->count == b->count;
}

/* ---- messages: stage 0 begin, 1 wait for the other half, 2 move bytes, 3 wait until they were taken -------------- */

static int step_send(struct operation *operation) {
    struct ncclComm *comm = operation->comm;
    struct channel *channel = &comm->channels[comm->rank * comm->size + operation->peer];
    size_t bytes = operation->header.count * size_of(operation->header.type);
    uint64_t number = comm->sends[operation->peer] + 1;
    if (operation->stage == 0) {
        channel->header = operation->header;
        atomic_store(&channel->sends, number);
        operation->stage = 1;
    } else if (operation->stage == 1) {
        if (atomic_load(&channel->receives) < number) return 0;
        operation->stage = 2;
    } else if (operation->stage == 2) {
        uint64_t head = atomic_load(&channel->head);
        size_t room = RING - (head - atomic_load(&channel->tail)), left = bytes - operation->moved;
        size_t edge = RING - head % RING, now = left < room ? left : room;
        if (now > edge) now = edge;
        if (now == 0 && left) return 0;
        memcpy(channel->ring + head % RING, (const char *)operation->from + operation->moved, now);
        operation->moved += now;
        atomic_store(&channel->head, head + now);
        if (operation->moved == bytes) operation->stage = 3;
    } else {
        if (atomic_load(&channel->received) < number) return 0;
        comm->sends[operation->peer] = number;
        operation->over = 1;
    }
    ring(comm, operation->peer);
    return 1;
}

static int step_receive(struct operation *operation) {
    struct ncclComm *comm = operation->comm;
    struct channel *channel = &comm->channels[operation->peer * comm->size + comm->rank];
    size_t bytes = operation->header.count * size_of(operation->header.type);
    uint64_t number = comm->receives[operation->peer] + 1;
    if (operation->stage == 0) {
        atomic_store(&channel->receives, number);
        operation->stage = 1;
    } else if (operation->stage == 1) {
        if (atomic_load(&channel->sends) < number) return 0;
        struct header sent = channel->header;
        if (sent.count != operation->header.count || sent.type != operation->header.type) {
            fail(comm, ncclInvalidUsage, "rank %d sends %llu x type %d, rank %d receives %llu x type %d", operation->peer,
                 (unsigned long long)sent.count, sent.type, comm->rank, (unsigned long long)operation->header.count,
                 operation->header.type);
            atomic_store(&comm->segment->aborted, 1 + comm->rank);
            ring_all(comm);
            return 0;
        }
        operation->stage = 2;
    } else {
        uint64_t tail = atomic_load(&channel->tail);
        size_t there = atomic_load(&channel->head) - tail, left = bytes - operation->moved;
        size_t edge = RING - tail % RING, now = left < there ? left : there;
        if (now > edge) now = edge;
        if (now == 0 && left) return 0;
        memcpy((char *)operation->to + operation->moved, channel->ring + tail % RING, now);
        operation->moved += now;
        atomic_store(&channel->tail, tail + now);
        if (operation->moved == bytes) {
            comm->receives[operation->peer] = number;
            atomic_store(&channel->received, number);
            operation->over = 1;
        }
    }
    ring(comm, operation->peer);
    return 1;
}

/* ---- collectives: piece by piece; stage 0 put one's own into the slot, 1 take from everybody's -------------------- */

/* How many elements the piece has that begins at `moved`. */
static size_t piece(const struct operation *operation) {
    size_t most = SLOT / size_of(operation->header.type), left = operation->header.count - operation->moved;
    return left < most ? left : most;
}

static int parts(const struct operation *operation) {
    return operation->header.kind == REDUCE_SCATTER ? operation->comm->size : 1;
}

static int everybody(struct ncclComm *comm, size_t counter, uint64_t least) {
    for (int rank = 0; rank < comm->size; rank++)
        if (atomic_load((_Atomic uint64_t *)((char *)&comm->members[rank] + counter)) < least) return 0;
    return 1;
}

static void put(struct operation *operation) {
    struct ncclComm *comm = operation->comm;
    size_t width = size_of(operation->header.type);
    size_t begin = operation->part * operation->header.count + operation->moved;
    comm->members[comm->rank].header = operation->header;
    if (operation->header.kind != BROADCAST || operation->header.root == comm->rank)
        memcpy(comm->members[comm->rank].slot, (const char *)operation->from + begin * width, piece(operation) * width);
}

static void take(struct operation *operation) {
    struct ncclComm *comm = operation->comm;
    struct header *header = &operation->header;
    size_t width = size_of(header->type), count = piece(operation);
    char *to = (char *)operation->to + operation->moved * width;
    const void *slots[comm->size];
    for (int rank = 0; rank < comm->size; rank++) slots[rank] = comm->members[rank].slot;
    if (header->kind == BROADCAST)
        memmove(to, slots[header->root], count * width);
    else if (header->kind == ALL_GATHER)
        for (int rank = 0; rank < comm->size; rank++) memcpy(to + rank * header->count * width, slots[rank], count * width);
    else if (header->kind == ALL_REDUCE || operation->part == comm->rank)
        reduce(to, slots, comm->size, count, header->type, header->op);
}

static int step_collective(struct operation *operation) {
    struct ncclComm *comm = operation->comm;
    struct member *own = &comm->members[comm->rank];
    if (operation->stage == 0) {
        if (!everybody(comm, offsetof(struct member, took), comm->pieces)) return 0;
        put(operation);
        atomic_store(&own->wrote, comm->pieces + 1);
        operation->stage = 1;
    } else {
        if (!everybody(comm, offsetof(struct member, wrote), comm->pieces + 1)) return 0;
        for (int rank = 0; rank < comm->size; rank++)
            if (!same(&comm->members[rank].header, &operation->header)) {
                struct header *other = &comm->members[rank].header;
                fail(comm, ncclInvalidUsage, "rank %d is in a %s of %llu, rank %d in a %s of %llu, of type %d and %d",
                     comm->rank, NAMES[operation->header.kind], (unsigned long long)operation->header.count, rank,
                     NAMES[other->kind], (unsigned long long)other->count, operation->header.type, other->type);
                return 0;
            }
        take(operation);
        operation->moved += piece(operation);
        operation->stage = 0;
        if (operation->moved == operation->header.count) {
            operation->moved = 0;
            operation->over = ++operation->part == parts(operation);
        }
        atomic_store(&own->took, ++comm->pieces);
    }
    ring_all(comm);
    return 1;
}

/* ---- groups ------------------------------------------------------------------------------------------------------ */

static int step(struct operation *operation) {
    if (operation->header.kind == SEND) return step_send(operation);
    return operation->header.kind == RECEIVE ? step_receive(operation) : step_collective(operation);
}

/* Whether an earlier operation of the group must be over first: a message of the same direction, or a collective. */
static int queued(const struct operation *operations, const struct operation *operation) {
    for (; operations != operation; operations = operations->next)
        if (!operations->over && (operations->header.kind > RECEIVE ? operation->header.kind > RECEIVE
                                  : operations->header.kind == operation->header.kind && operations->peer == operation->peer))
            return 1;
    return 0;
}

/* Run the operations of a group together, to their end or the communicator's failure. */
void run(struct ncclComm *comm, struct operation *operations) {
    for (;;) {
        uint32_t bell = atomic_load(&comm->members[comm->rank].bell);
        int left = 0, moved = 0;
        for (struct operation *operation = operations; operation && !failed(comm); operation = operation->next)
            if (!operation->over) {
                left = 1;
                if (!queued(operations, operation)) moved |= step(operation);
            }
        if (failed(comm)) {
            int state = ncclSuccess; /* keep what failed first */
            if (atomic_compare_exchange_strong(&comm->state, &state, ncclRemoteError)) ring_all(comm);
            return;
        }
        if (!left) return;
        if (!moved) doze(comm, bell);
    }
}
