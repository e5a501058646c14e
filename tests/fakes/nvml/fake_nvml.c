/* A libnvidia-ml.so.1 that says what a file says, so that nvidia-ml-py runs without a card.
 *
 * The file is named by FAKE_NVML and read anew at each call, so that a test changes what a running
 * process sees. Each line is one fact (text after # is left out):
 *
 *   card UUID TOTAL USED NAME...     a card, in the order of the lines
 *   mig CARD UUID TOTAL USED         an instance of a card, which is in MIG mode then
 *   ids UUID GPU COMPUTE             the numbers of an instance; without, they are not told
 *   pci CARD ADDRESS                 where a card is: 00000000:01:00.0
 *   event CARD XID [GPU]             an error, told once to each process that listens to the card
 *   process UUID PID BYTES           a process on a card; "?" where the driver does not tell bytes
 *   error CALL CODE [UUID]           a call answers with an error, for one card only or for all
 *   hang CALL [SECONDS]              a call does not return for so long, or while the line is there
 *
 * CALL is a function's name without its version: nvmlInit, nvmlDeviceGetMemoryInfo. A file that
 * cannot be read is a driver that is not loaded. With FAKE_NVML_CALLS each call adds its name to
 * that file. No lock is needed: the caller has one thread.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9,
    TIMEOUT = 10,
    GPU_IS_LOST = 15,
};

enum { MOST_LINES = 256, LONGEST_LINE = 256, LONGEST_UUID = 96, MOST_HANDLES = 256 };

typedef struct {
    unsigned long long total, free, used;
} memory_info;

typedef struct {
    unsigned int pid;
    unsigned long long used;
    unsigned int gpu_instance, compute_instance;
} process_info;

typedef struct {
    char bus_id_legacy[16];
    unsigned int domain, bus, device, pci_device_id, pci_subsystem_id;
    char bus_id[32];
} pci_info;

typedef struct {
    void *device;
    unsigned long long type, data;
    unsigned int gpu_instance, compute_instance;
} event_data;

enum { XID_EVENTS = 8 };

static char lines[MOST_LINES][LONGEST_LINE];
static int line_count;
static int init_count;

/* A handle is the place of a UUID in this table: it goes on naming a card that is lost. */
static char handles[MOST_HANDLES][LONGEST_UUID];

static int read_lines(void)
{
    const char *path = getenv("FAKE_NVML");
    FILE *file = path ? fopen(path, "re") : NULL;
    line_count = 0;
    if (!file)
        return DRIVER_NOT_LOADED;
    while (line_count < MOST_LINES && fgets(lines[line_count], LONGEST_LINE, file)) {
        lines[line_count][strcspn(lines[line_count], "#\n")] = 0;
        line_count++;
    }
    fclose(file);
    return SUCCESS;
}

static void note_call(const char *call)
{
    const char *path = getenv("FAKE_NVML_CALLS");
    int file = path ? open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644) : -1;
    if (file < 0)
        return;
    dprintf(file, "%s\n", call);
    close(file);
}

static void pause_for(double seconds)
{
    struct timespec wait = {(time_t)seconds, (long)((seconds - (time_t)seconds) * 1e9)};
    nanosleep(&wait, NULL);
}

/* Return how long a call hangs; below 0 for as long as the file says so. */
static double hang_of(const char *call)
{
    for (int i = 0; i < line_count; i++) {
        char name[64];
        double seconds = -1;
        if (sscanf(lines[i], "hang %63s %lf", name, &seconds) >= 1 && !strcmp(name, call))
            return seconds;
    }
    return 0;
}

/* Begin a call: hang where the file says so, and return the error that it is to answer with. */
static int enter(const char *call, const char *uuid)
{
    note_call(call);
    int failure = read_lines();
    double seconds = hang_of(call);
    if (seconds > 0)
        pause_for(seconds);
    while (seconds < 0) {
        pause_for(0.01);
        failure = read_lines();
        seconds = hang_of(call);
    }
    for (int i = 0; i < line_count; i++) {
        char name[64], only[LONGEST_UUID] = "";
        int code;
        if (sscanf(lines[i], "error %63s %d %95s", name, &code, only) < 2 || strcmp(name, call))
            continue;
        if (!*only || (uuid && !strcmp(only, uuid)))
            return code;
    }
    if (failure)
        return failure;
    return init_count ? SUCCESS : UNINITIALIZED;
}

/* Find a card or an instance; the rest of its line, or NULL when it is lost. */
static const char *line_of(const char *uuid)
{
    static char rest[LONGEST_LINE];
    for (int i = 0; i < line_count; i++) {
        char name[LONGEST_UUID];
        if ((sscanf(lines[i], "card %95s %255[^\n]", name, rest) == 2 && !strcmp(name, uuid)) ||
            (sscanf(lines[i], "mig %*s %95s %255[^\n]", name, rest) == 2 && !strcmp(name, uuid)))
            return rest;
    }
    return NULL;
}

static void *handle_of(const char *uuid)
{
    for (int i = 0; i < MOST_HANDLES; i++) {
        if (!*handles[i])
            strcpy(handles[i], uuid);
        if (!strcmp(handles[i], uuid))
            return handles[i];
    }
    return NULL;
}

int nvmlInitWithFlags(unsigned int flags)
{
    (void)flags;
    init_count++;
    int failure = enter("nvmlInit", NULL);
    init_count -= failure != SUCCESS;
    return failure;
}

int nvmlShutdown(void)
{
    int failure = enter("nvmlShutdown", NULL);
    init_count -= failure == SUCCESS;
    return failure;
}

const char *nvmlErrorString(int code)
{
    (void)code;
    return "an error of the fake";
}

int nvmlDeviceGetCount_v2(unsigned int *count)
{
    int failure = enter("nvmlDeviceGetCount", NULL);
    *count = 0;
    for (int i = 0; i < line_count; i++)
        *count += !strncmp(lines[i], "card ", 5);
    return failure;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **handle)
{
    int failure = read_lines();
    char uuid[LONGEST_UUID] = "";
    for (int i = 0; i < line_count; i++)
        if (sscanf(lines[i], "card %95s", uuid) == 1 && index-- == 0)
            break;
    failure = enter("nvmlDeviceGetHandleByIndex", uuid);
    if (failure)
        return failure;
    if (!*uuid || index != (unsigned int)-1)
        return INVALID_ARGUMENT;
    *handle = handle_of(uuid);
    return SUCCESS;
}

int nvmlDeviceGetUUID(const char *device, char *uuid, unsigned int length)
{
    int failure = enter("nvmlDeviceGetUUID", device);
    if (!failure)
        snprintf(uuid, length, "%s", device);
    return failure;
}

int nvmlDeviceGetName(const char *device, char *name, unsigned int length)
{
    int failure = enter("nvmlDeviceGetName", device);
    if (failure)
        return failure;
    const char *line = line_of(device);
    char model[LONGEST_LINE] = "";
    if (!line)
        return GPU_IS_LOST;
    sscanf(line, "%*s %*s %255[^\n]", model);
    snprintf(name, length, "%s", model);
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(const char *device, memory_info *memory)
{
    int failure = enter("nvmlDeviceGetMemoryInfo", device);
    if (failure)
        return failure;
    const char *line = line_of(device);
    if (!line || sscanf(line, "%llu %llu", &memory->total, &memory->used) != 2)
        return GPU_IS_LOST;
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(const char *device, unsigned int *count,
                                            process_info *infos)
{
    int failure = enter("nvmlDeviceGetComputeRunningProcesses", device);
    if (failure)
        return failure;
    unsigned int found = 0;
    for (int i = 0; i < line_count; i++) {
        char name[LONGEST_UUID], bytes[32];
        unsigned int pid;
        if (sscanf(lines[i], "process %95s %u %31s", name, &pid, bytes) != 3 ||
            strcmp(name, device))
            continue;
        if (infos && found < *count) {
            unsigned long long used = *bytes == '?' ? -1ULL : strtoull(bytes, NULL, 10);
            infos[found] = (process_info){pid, used, -1U, -1U};
        }
        found++;
    }
    int fits = found <= *count && (infos || !found);
    *count = found;
    return fits ? SUCCESS : INSUFFICIENT_SIZE;
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(const char *device, unsigned int *count,
                                             process_info *infos)
{
    (void)infos;
    int failure = enter("nvmlDeviceGetGraphicsRunningProcesses", device);
    *count = 0;
    return failure;
}

static int instance_at(const char *device, unsigned int index, char *uuid)
{
    unsigned int found = 0;
    for (int i = 0; i < line_count; i++) {
        char parent[LONGEST_UUID];
        if (sscanf(lines[i], "mig %95s %95s", parent, uuid) == 2 && !strcmp(parent, device) &&
            found++ == index)
            return 1;
    }
    return 0;
}

int nvmlDeviceGetMigMode(const char *device, unsigned int *current, unsigned int *pending)
{
    char uuid[LONGEST_UUID];
    int failure = enter("nvmlDeviceGetMigMode", device);
    if (failure)
        return failure;
    if (!instance_at(device, 0, uuid))
        return NOT_SUPPORTED;
    *current = *pending = 1;
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(const char *device, unsigned int *count)
{
    *count = 7;
    return enter("nvmlDeviceGetMaxMigDeviceCount", device);
}

int nvmlDeviceGetMigDeviceHandleByIndex(const char *device, unsigned int index, void **handle)
{
    char uuid[LONGEST_UUID];
    int failure = enter("nvmlDeviceGetMigDeviceHandleByIndex", device);
    if (failure)
        return failure;
    if (!instance_at(device, index, uuid))
        return NOT_FOUND;
    *handle = handle_of(uuid);
    return SUCCESS;
}

/* Tell a number of an instance: the first or the second of its line. */
static int number_of(const char *call, const char *device, int second, unsigned int *number)
{
    int failure = enter(call, device);
    if (failure)
        return failure;
    for (int i = 0; i < line_count; i++) {
        char name[LONGEST_UUID];
        unsigned int gpu, compute;
        if (sscanf(lines[i], "ids %95s %u %u", name, &gpu, &compute) == 3 &&
            !strcmp(name, device)) {
            *number = second ? compute : gpu;
            return SUCCESS;
        }
    }
    return NOT_SUPPORTED;
}

int nvmlDeviceGetGpuInstanceId(const char *device, unsigned int *number)
{
    return number_of("nvmlDeviceGetGpuInstanceId", device, 0, number);
}

int nvmlDeviceGetComputeInstanceId(const char *device, unsigned int *number)
{
    return number_of("nvmlDeviceGetComputeInstanceId", device, 1, number);
}

int nvmlDeviceGetPciInfo_v3(const char *device, pci_info *info)
{
    int failure = enter("nvmlDeviceGetPciInfo", device);
    if (failure)
        return failure;
    memset(info, 0, sizeof *info);
    for (int i = 0; i < line_count; i++) {
        char name[LONGEST_UUID], address[32];
        if (sscanf(lines[i], "pci %95s %31s", name, address) == 2 && !strcmp(name, device)) {
            strcpy(info->bus_id, address);
            return SUCCESS;
        }
    }
    return NOT_SUPPORTED;
}

/* There is one event set; it hears the cards in this table, and has told so many events. */
static const void *heard[MOST_HANDLES];
static int told;

int nvmlEventSetCreate(void **set)
{
    int failure = enter("nvmlEventSetCreate", NULL);
    *set = heard;
    return failure;
}

int nvmlEventSetFree(void *set)
{
    int failure = enter("nvmlEventSetFree", NULL);
    if (!failure)
        memset(set, 0, sizeof heard);
    return failure;
}

int nvmlDeviceGetSupportedEventTypes(const char *device, unsigned long long *types)
{
    *types = XID_EVENTS;
    return enter("nvmlDeviceGetSupportedEventTypes", device);
}

int nvmlDeviceRegisterEvents(const char *device, unsigned long long types, void *set)
{
    int failure = enter("nvmlDeviceRegisterEvents", device);
    if (failure)
        return failure;
    if (types != XID_EVENTS || set != heard)
        return INVALID_ARGUMENT;
    for (int i = 0; i < MOST_HANDLES; i++) {
        if (!heard[i])
            heard[i] = device;
        if (heard[i] == device)
            return SUCCESS;
    }
    return INVALID_ARGUMENT;
}

static int is_heard(const void *device)
{
    for (int i = 0; i < MOST_HANDLES; i++)
        if (heard[i] == device)
            return 1;
    return 0;
}

int nvmlEventSetWait_v2(void *set, event_data *event, unsigned int milliseconds)
{
    int failure = enter("nvmlEventSetWait", NULL);
    if (failure)
        return failure;
    if (set != heard)
        return INVALID_ARGUMENT;
    for (int i = 0, number = 0; i < line_count; i++) {
        char uuid[LONGEST_UUID];
        unsigned long long xid;
        unsigned int gpu = -1U;
        if (sscanf(lines[i], "event %95s %llu %u", uuid, &xid, &gpu) < 2 || number++ < told)
            continue;
        told = number;
        void *device = handle_of(uuid);
        if (!is_heard(device))
            continue;
        *event = (event_data){device, XID_EVENTS, xid, gpu, -1U};
        return SUCCESS;
    }
    pause_for(milliseconds / 1e3);
    return TIMEOUT;
}
